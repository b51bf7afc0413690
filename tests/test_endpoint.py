"""The endpoint speaks HTTP as servers expect it, and tells their failures in our words."""

from __future__ import annotations

import asyncio
import base64
import copy
import email.utils
import logging
import math
import pickle
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from scripted_server import Fault, Reply, ScriptedServer, prompt_pieces, pseudo_logprob, words

from specrag_integrations import Endpoint
from specrag_integrations.errors import (
    ConfigurationError,
    ContextTooSmallError,
    EndpointError,
    EndpointRejectedError,
    EndpointTimeoutError,
    EndpointUnavailableError,
    MalformedReplyError,
)
from specrag_integrations.models import ChatRequest, Step, assistant, user
from specrag_integrations.portal import portal

KEY = "correct-horse-battery"
QUESTION = ChatRequest(messages=(user("Who wrote Emma?"),), max_tokens=20)
STEP = Step(kind="draft")
SCORED = ChatRequest(
    messages=(
        user("Who wrote Emma?"),
        assistant("Rationale: her name is on it.\nAnswer: Austen"),
        user("Does it hold?"),
    ),
    max_tokens=1,
    top_logprobs=20,
    score_message=1,
)


@pytest.fixture
def connect():
    """Make endpoints that are closed at the end."""
    made = []

    def make(target, model="scripted", **options):
        url = target if isinstance(target, str) else target.base_url
        made.append(Endpoint(url, model, **options))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def chat(endpoint, request=QUESTION):
    return asyncio.run(endpoint.chat(request, step=STEP))


def chat_fails(endpoint, kind=EndpointError, request=QUESTION):
    with pytest.raises(kind) as caught:
        chat(endpoint, request)
    return caught.value


def shown(error):
    """Return everything a log with a traceback would show of an error."""
    return "".join(traceback.format_exception(error)) + repr(vars(error))


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/chat/completions/", " "]
)
def test_url_may_be_written_in_many_ways(server, connect, suffix):
    """Root, `/v1` or the full route: all reach the same route."""
    endpoint = connect(server.url + suffix)
    chat(endpoint)
    assert endpoint.base_url == server.base_url
    assert server.requests == [("POST", "/v1/chat/completions")]


@pytest.mark.parametrize("path", ["/team/llm", "/team/llm/v1", "/openai/v1/chat/completions"])
def test_path_of_a_proxy_is_kept(server, connect, path):
    """A path is the proxy's own, so nothing is put into it."""
    chat_fails(connect(server.url + path))
    expected = path.removesuffix("/chat/completions") + "/chat/completions"
    assert server.requests == [("POST", expected)]


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000/v1", "ftp://host/v1", "http://", "http://[half", "http://h:port", None, 3],
)
def test_what_is_no_url_is_refused_at_once(url):
    """A mistyped address is a configuration error with an example."""
    with pytest.raises(ConfigurationError, match="is not a URL; write it with its scheme"):
        Endpoint(url)


@pytest.mark.parametrize("url", ["me:secretword@host:80/v1", "http://me:secretword@[half?k=other"])
def test_secrets_of_a_bad_url_are_not_echoed(url):
    """The error for a mistyped address does not repeat the password in it."""
    with pytest.raises(ConfigurationError) as caught:
        Endpoint(url)
    assert "secretword" not in str(caught.value)
    assert "other" not in str(caught.value)


def test_credentials_and_query_in_the_url_are_sent_and_never_shown(server, connect, caplog):
    """Basic authentication and query parameters work, and are left out wherever text is shown."""
    caplog.set_level(logging.INFO)
    server.respond = Fault(400, body={"error": {"message": "no secret%word, no hush-hush"}})
    url = server.url.replace("://", "://me:secret%25word@") + "/v1?token=hush-hush"
    endpoint = connect(url)
    error = chat_fails(endpoint)
    encoded = server.headers[0]["authorization"].removeprefix("Basic ")
    assert base64.b64decode(encoded) == b"me:secret%word"
    assert server.requests == [("POST", "/v1/chat/completions")]
    for text in (repr(endpoint), endpoint.name, endpoint.base_url, str(error), error.endpoint):
        assert "secret" not in text.replace("no secret%word", "")
        assert "hush" not in text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"request_timeout": 0},
        {"request_timeout": math.inf},
        {"request_timeout": "1"},
        {"max_concurrency": 0},
        {"max_concurrency": 0.5},
        {"max_concurrency": True},
        {"max_attempts": 0},
        {"max_attempts": 1.5},
        {"api_key": 7},
        {"api_key": ""},
        {"api_key": "key\n"},
        {"api_key": "two words"},
        {"api_key": "kéy"},
        {"headers": {"X-Token": "key\n"}},
        {"headers": {"X-Token": None}},
        {"headers": {"X-Token": " padded"}},
    ],
)
def test_options_that_can_never_work_are_refused_at_construction(options):
    """Each is a configuration error that does not repeat the key."""
    with pytest.raises(ConfigurationError) as caught:
        Endpoint("http://localhost", **options)
    assert "key\n" not in str(caught.value)
    assert "kéy" not in str(caught.value)


# ---------------------------------------------------------------- which model


def test_the_only_served_model_is_found_once(scripted, connect):
    """Ten calls at a time ask `/v1/models` once, and capabilities not again."""
    server = scripted(models=["org/only"])
    endpoint = connect(server, None)
    assert endpoint.name == endpoint.base_url

    async def ten():
        return await asyncio.gather(*(endpoint.chat(QUESTION, step=STEP) for _ in range(10)))

    assert {reply.model for reply in asyncio.run(ten())} == {"org/only"}
    asyncio.run(endpoint.capabilities())
    assert server.requests.count(("GET", "/v1/models")) == 1
    assert {body["model"] for body in server.chats} == {"org/only"}
    assert endpoint.name == "org/only"


def test_a_named_model_is_not_looked_up(server, connect):
    """No request is spent on what the caller said."""
    chat(connect(server, "mine"))
    assert server.requests == [("POST", "/v1/chat/completions")]
    assert server.chats[0]["model"] == "mine"


@pytest.mark.parametrize(
    ("models", "message"), [((), "lists no models"), (("a", "b"), r"serves 2 models \(a, b\)")]
)
def test_no_model_or_several_is_a_clear_error(scripted, connect, models, message):
    """The error names what is served and how to choose."""
    server = scripted(models=models)
    endpoint = connect(server, None)
    with pytest.raises(EndpointRejectedError, match=message) as caught:
        chat(endpoint)
    assert "name one: Endpoint(url, model)" in str(caught.value)
    assert server.chats == []


def test_a_model_served_later_is_found(scripted, connect):
    """An empty list is not remembered."""
    server = scripted(models=())
    endpoint = connect(server, None)
    chat_fails(endpoint)
    server.models = ("late",)
    assert chat(endpoint).model == "late"


def test_a_failing_lookup_is_shared_by_those_who_wait(scripted, connect):
    """Ten callers cost one round of attempts, not ten; the next call asks again."""
    server = scripted(faults={"/v1/models": Fault(503, after=0.05)})
    endpoint = connect(server, None, max_attempts=2)

    async def ten():
        calls = (endpoint.chat(QUESTION, step=STEP) for _ in range(10))
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = asyncio.run(ten())
    assert {type(error) for error in errors} == {EndpointUnavailableError}
    assert {error.attempts for error in errors} == {0}  # nothing was generated
    assert len(server.requests) == 2
    server.faults.clear()
    assert chat(endpoint).model == "scripted"


# ---------------------------------------------------------------- keys and headers


def test_a_server_without_keys_gets_a_placeholder(server, connect):
    """Without a key, the usual EMPTY is sent and no environment variable."""
    chat(connect(server))
    assert server.headers[0]["authorization"] == "Bearer EMPTY"


@pytest.mark.parametrize("flavour", ["text", "sync", "async"])
def test_key_is_text_or_a_callable(scripted, connect, flavour):
    """All three forms authenticate."""

    async def ask():
        return KEY

    server = scripted(api_key=KEY)
    chat(connect(server, api_key={"text": KEY, "sync": lambda: KEY, "async": ask}[flavour]))
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_callable_key_is_asked_for_each_request(scripted, connect):
    """A key that expired is replaced by the next request, a retry included."""
    keys = iter(["first-key", "second-key", "third-key"])
    server = scripted(lambda _, call: Fault(503) if call == 0 else "fine")
    endpoint = connect(server, api_key=lambda: next(keys))
    assert chat(endpoint).attempts == 2
    chat(endpoint)
    sent = [headers["authorization"] for headers in server.headers]
    assert sent == ["Bearer first-key", "Bearer second-key", "Bearer third-key"]


@pytest.mark.parametrize("given", ["", "line\n", None, 5])
def test_unusable_key_from_a_callable_is_a_clear_error(server, connect, given):
    """A bad key is reported without showing it, and nothing is sent."""
    with pytest.raises(ConfigurationError) as caught:
        chat(connect(server, api_key=lambda: given))
    assert "line" not in str(caught.value).replace("line break", "")
    assert server.requests == []


def test_failure_of_a_key_callable_passes_unchanged(server, connect):
    """The caller's own exception is not dressed up as a server's."""

    def ask():
        raise LookupError("vault is sealed")

    with pytest.raises(LookupError, match="vault is sealed"):
        chat(connect(server, api_key=ask))
    assert server.requests == []


@pytest.mark.parametrize("kind", ["openai", "vllm", "llama.cpp"])
def test_wrong_key_is_told_once(scripted, connect, kind):
    """Every shape of a 401 becomes one error that says what to check; no retry."""
    server = scripted(kind=kind, api_key=KEY)
    error = chat_fails(connect(server, api_key="wrong-key"), EndpointRejectedError)
    assert (error.status_code, error.attempts, error.retryable) == (401, 1, False)
    assert str(error).endswith("; check api_key")
    said = {"openai": "Incorrect API key", "vllm": "Unauthorized", "llama.cpp": "Invalid API Key"}
    assert said[kind] in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("form", ["text", "callable"])
@pytest.mark.parametrize("stream", [False, True])
def test_keys_and_headers_reach_no_repr_error_or_log(scripted, connect, caplog, form, stream):
    """Not even from a server that echoes them, and not in the traceback's causes."""
    caplog.set_level(logging.DEBUG, logger="specrag_integrations")
    echo = f"bad key {KEY}, bad token hush-hush; logprobs too"
    server = scripted(Fault(400, body={"error": {"message": echo}}))
    endpoint = connect(
        server,
        api_key=KEY if form == "text" else lambda: KEY,
        headers={"X-Token": "hush-hush", "X-Other": "Bearer tell-no-one"},
        max_attempts=2,
    )
    request = ChatRequest(messages=QUESTION.messages, max_tokens=5, top_logprobs=1)
    with pytest.raises(EndpointRejectedError) as caught:
        asyncio.run(whole(endpoint, request) if stream else endpoint.chat(request, step=STEP))
    text = repr(endpoint) + endpoint.name + shown(caught.value) + caplog.text
    assert "bad key ***, bad token ***" in str(caught.value)
    assert "refuses log-probabilities" in caplog.text
    for secret in (KEY, "hush-hush", "tell-no-one"):
        assert secret not in text


def test_questions_reach_no_log(scripted, connect, caplog):
    """Nothing of ours logs what was asked."""
    caplog.set_level(logging.DEBUG, logger="specrag_integrations")
    server = scripted(lambda _, call: Fault(503) if call == 0 else "fine", kind="vllm")
    endpoint = connect(server)
    chat(endpoint)
    asyncio.run(endpoint.count_tokens(QUESTION.messages))
    assert "Emma" not in caplog.text


def test_headers_and_extra_body_are_sent(server, connect):
    """They reach the chat request; an extra field overrides ours."""
    endpoint = connect(
        server,
        headers={"X-Team": "blue"},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0.5},
    )
    chat(endpoint)
    assert server.headers[0]["x-team"] == "blue"
    assert server.chats[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.chats[0]["temperature"] == 0.5


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_passing_failures_are_tried_again_exactly_so_often(scripted, connect, status):
    """`max_attempts` requests in all: the client's own retries are off."""
    server = scripted(Fault(status, body={"error": {"message": "busy"}}))
    error = chat_fails(connect(server, max_attempts=4), EndpointUnavailableError)
    assert len(server.chats) == error.attempts == 4
    assert (error.status_code, error.retryable) == (status, True)
    assert f"HTTP {status}: busy" in str(error)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422])
def test_lasting_refusals_are_not_tried_again(scripted, connect, status):
    """One request, the server's own words."""
    server = scripted(Fault(status, body={"detail": "that is not for you"}))
    error = chat_fails(connect(server), EndpointRejectedError)
    assert len(server.chats) == error.attempts == 1
    assert "that is not for you" in str(error)


@pytest.mark.parametrize("stream", [False, True])
def test_dropped_connections_are_tried_again(scripted, connect, stream):
    """A connection lost before any answer counts as an attempt."""
    server = scripted(Fault(close=True))
    endpoint = connect(server, max_attempts=2)
    with pytest.raises(EndpointUnavailableError, match="no connection") as caught:
        asyncio.run(whole(endpoint) if stream else endpoint.chat(QUESTION, step=STEP))
    assert len(server.chats) == caught.value.attempts == 2


@pytest.mark.parametrize("stream", [False, True])
def test_silence_is_a_timeout_and_tried_again(scripted, connect, stream):
    """`request_timeout` bounds each attempt, and the server sees each one end."""
    server = scripted(Fault(hang=True))
    endpoint = connect(server, request_timeout=0.1, max_attempts=2)
    with pytest.raises(EndpointTimeoutError, match=r"no reply within 0\.1 s") as caught:
        asyncio.run(whole(endpoint) if stream else endpoint.chat(QUESTION, step=STEP))
    assert len(server.chats) == caught.value.attempts == 2
    assert server.wait_idle()
    assert server.aborted == 2


def test_slow_bodies_do_not_outlast_the_timeout(connect):
    """The limit is on the whole request, also where a server drips a byte now and then."""

    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "100")
            self.end_headers()
            with suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.05)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as dripping:
        threading.Thread(target=dripping.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{dripping.server_port}"
        endpoint = Endpoint(url, "slow", request_timeout=0.3, max_attempts=1)
        started = time.perf_counter()
        chat_fails(endpoint, EndpointTimeoutError)
        assert time.perf_counter() - started < 3  # the whole body would take 5 s
        endpoint.close()
        dripping.shutdown()


def test_an_apps_own_authorization_is_the_only_one(server, connect):
    """A header spelled in another way replaces the key instead of standing beside it."""
    endpoint = connect(server, headers={"authorization": "Bearer mine"})
    asyncio.run(endpoint.chat(QUESTION, step=STEP))

    assert server.headers[0].getall("Authorization") == ["Bearer mine"]


def test_an_error_event_that_echoes_the_prompt_is_cut_short(scripted, connect):
    """Neither error nor cause repeats in a traceback what a stream's error event repeats."""
    said = {"error": {"message": "bad input: what is the secret treasure called?", "code": 500}}
    server = scripted(Fault(reply="a b c", stream_break_after=1, body=said))
    request = replace(QUESTION, messages=(user("what is the secret treasure called?"),))

    with pytest.raises(EndpointError) as caught:
        asyncio.run(whole(connect(server, max_attempts=1), request))

    told = "".join(traceback.format_exception(caught.value))
    assert "bad input" in told
    assert "treasure called" not in told.replace('user("what is the secret treasure called?")', "")


def test_nobody_listening_is_a_clear_error(scripted, connect):
    """The error asks the question a reader would."""
    server = scripted()
    server.close()
    error = chat_fails(connect(server, max_attempts=1), EndpointUnavailableError)
    assert "is the server running?" in str(error)


def test_success_after_failures_counts_its_attempts(scripted, connect):
    """The reply says what it cost."""
    server = scripted(lambda _, call: Fault(503) if call < 2 else "fine")
    reply = chat(connect(server))
    assert (reply.text, reply.attempts, len(server.chats)) == ("fine", 3, 3)


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "0"},
        {"Retry-After": "-3"},
        {"Retry-After": email.utils.formatdate(0, usegmt=True)},
        {"retry-after-ms": "1", "Retry-After": "3600"},
    ],
)
def test_retry_after_is_obeyed(scripted, connect, headers):
    """Seconds, an HTTP date in the past, and milliseconds, which outrank seconds."""
    server = scripted(lambda _, call: Fault(429, headers=headers) if call == 0 else "fine")
    assert chat(connect(server, max_attempts=2)).attempts == 2


def test_retry_after_is_waited_for(scripted, connect):
    """The second request does not come before its time."""
    arrived = []

    def respond(body, call):
        arrived.append(time.monotonic())
        return "fine" if call else Fault(503, headers={"retry-after-ms": "300"})

    chat(connect(scripted(respond)))
    assert arrived[1] - arrived[0] >= 0.3


@pytest.mark.parametrize("value", ["3600", email.utils.formatdate(4e9, usegmt=True)])
def test_absurd_retry_after_is_not_waited_for(scripted, connect, value):
    """The caller is told at once when the server wants to be asked again."""
    server = scripted(Fault(429, headers={"Retry-After": value}))
    error = chat_fails(connect(server), EndpointUnavailableError)
    assert len(server.chats) == error.attempts == 1
    assert error.retry_after > 3000


@pytest.mark.parametrize("value", ["soon", "nan", "Fri, 99 Foo 99999"])
def test_unreadable_retry_after_is_ignored(scripted, connect, value):
    """A bad header costs nothing but the usual wait."""
    server = scripted(Fault(503, headers={"Retry-After": value}))
    assert chat_fails(connect(server, max_attempts=1)).retry_after is None


@pytest.mark.parametrize(("status", "told", "requests"), [(503, "false", 1), (400, "true", 3)])
def test_the_server_may_say_whether_to_retry(scripted, connect, status, told, requests):
    """`x-should-retry` outranks the status."""
    server = scripted(Fault(status, headers={"x-should-retry": told, "Retry-After": "0"}))
    assert chat_fails(connect(server)).attempts == len(server.chats) == requests


# ---------------------------------------------------------------- adapting to a server

REFUSES_MAX_TOKENS = {
    "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. "
    "Use 'max_completion_tokens' instead."
}
WITH_LOGPROBS = ChatRequest(messages=QUESTION.messages, max_tokens=1, top_logprobs=20)


def test_max_completion_tokens_is_learnt(scripted, connect):
    """Refused once, never sent again; the refusal counts as an attempt."""
    server = scripted(refuse=REFUSES_MAX_TOKENS)
    endpoint = connect(server)
    assert [chat(endpoint).attempts, chat(endpoint).attempts] == [2, 1]
    assert ["max_tokens" in body for body in server.chats] == [True, False, False]
    assert server.chats[-1]["max_completion_tokens"] == 20


def test_requests_under_way_together_all_learn(scripted, connect):
    """Five drafts refused at the same moment are each sent again in the new wording."""
    everyone = asyncio.Barrier(5)

    async def respond(body, call):
        if "max_tokens" in body:
            await everyone.wait()
            message = REFUSES_MAX_TOKENS["max_tokens"]
            return Fault(400, body={"error": {"message": message}})
        return "fine"

    server = scripted(respond)
    endpoint = connect(server)

    async def five():
        return await asyncio.gather(*(endpoint.chat(QUESTION, step=STEP) for _ in range(5)))

    assert [reply.attempts for reply in asyncio.run(five())] == [2] * 5


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("Invalid 'top_logprobs': Expected a value <= 5, but got 20 instead.", [20, 5]),
        ("Requested sample logprobs of 20, which is greater than max allowed: 8", [20, 8]),
        ("top_logprobs must be between 0 and 7.", [20, 7]),
        ("top_logprobs is too high", [20, 5]),
    ],
)
def test_fewer_alternatives_are_asked_for(scripted, connect, caplog, message, asked):
    """The server's limit is kept from then on, and log-probabilities still come."""

    def respond(body, call):
        refused = body["top_logprobs"] == 20
        return Fault(400, body={"error": {"message": message}}) if refused else "Yes"

    server = scripted(respond)
    endpoint = connect(server)
    assert chat(endpoint, WITH_LOGPROBS).tokens is not None
    chat(endpoint, WITH_LOGPROBS)
    assert [body["top_logprobs"] for body in server.chats] == [*asked, asked[-1]]
    assert caplog.records == []


@pytest.mark.parametrize(
    "message",
    [
        "logprobs is not supported by this model",
        "This model does not support 'logprobs' and 'top_logprobs'. Use gpt-4o 2 or 3.",
        "Requested sample logprobs of 20, which is greater than max allowed: 0",
    ],
)
def test_a_server_without_logprobs_still_writes_text(scripted, connect, caplog, message):
    """The reply has no tokens, and one line says why; who needs them warns."""
    caplog.set_level(logging.INFO, "specrag_integrations")

    def respond(body, call):
        return Fault(400, body={"detail": message}) if "logprobs" in body else "Yes"

    endpoint = connect(scripted(respond))
    replies = [chat(endpoint, WITH_LOGPROBS) for _ in range(3)]
    assert [(reply.text, reply.tokens) for reply in replies] == [("Yes", None)] * 3
    assert [reply.attempts for reply in replies[1:]] == [1, 1]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert message in caplog.text


def test_temperature_and_stream_options_are_left_out_where_refused(scripted, connect):
    """Each is dropped alone, and for good."""
    server = scripted(
        refuse={
            "temperature": "Unsupported value: 'temperature' does not support 0 with this model.",
            "stream_options": "Unknown field stream_options",
        }
    )
    endpoint = connect(server)
    texts, reply = asyncio.run(whole(endpoint))
    assert (reply.attempts, "".join(texts)) == (3, reply.text)
    chat(endpoint)
    assert len(server.chats) == 4
    assert not {"temperature", "stream_options"} & server.chats[-1].keys()


def test_adapting_stays_within_the_attempts(scripted, connect):
    """A server that refuses everything costs `max_attempts` requests, each time."""
    server = scripted(
        refuse=REFUSES_MAX_TOKENS
        | {"temperature": "temperature is fixed", "max_completion_tokens": "no max_tokens either"}
    )
    endpoint = connect(server, max_attempts=2)
    assert chat_fails(endpoint, EndpointRejectedError).attempts == 2
    assert len(server.chats) == 2


# ---------------------------------------------------------------- failures in our words


def subclasses(kind):
    return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))


def leaf_of(error):
    with pytest.raises(EndpointError) as caught, Endpoint("http://host")._translated():
        raise error
    return type(caught.value)


def test_every_error_of_the_client_becomes_one_of_ours(server):
    """No class of openai's API errors is left untranslated."""

    async def real():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.get("/nowhere", cast_to=object)
            return caught.value.response

    response = asyncio.run(real())
    expected = {
        openai.APITimeoutError: EndpointTimeoutError,
        openai.APIConnectionError: EndpointUnavailableError,
        openai.APIError: EndpointUnavailableError,
        openai.APIResponseValidationError: MalformedReplyError,
    }
    seen = set()
    for kind in subclasses(openai.APIError):
        error = kind.__new__(kind)
        Exception.__init__(error, "it failed")
        error.message, error.body, error.request = "it failed", None, response.request
        if issubclass(kind, openai.APIStatusError | openai.APIResponseValidationError):
            error.response = response
            error.status_code = getattr(kind, "status_code", 404)
        if issubclass(kind, openai.InternalServerError):
            error.status_code = 500
        leaf = leaf_of(error)
        passing = issubclass(
            kind, openai.RateLimitError | openai.ConflictError | openai.InternalServerError
        )
        usual = EndpointUnavailableError if passing else EndpointRejectedError
        assert leaf is expected.get(kind, usual), kind
        seen.add(kind)
    assert len(seen) >= 13


def test_bugs_pass_the_border_unchanged():
    """Only the client's errors are translated."""
    with pytest.raises(ZeroDivisionError), Endpoint("http://host")._translated():
        raise ZeroDivisionError


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(200, raw=b"<html>Welcome</html>", content_type="text/html"),
        Fault(200, raw=b"[1, 2]"),
        Fault(200, raw=b'{"choices": ['),
        Fault(200, raw=b'\xff\xfe{"a'),
        Fault(200, raw=b""),
        Fault(200, body={"choices": []}),
        Fault(200, body={"choices": 5}),
        Fault(200, body={"choices": [{"text": "the other route"}]}),
        Fault(200, body={"hello": "world"}),
    ],
)
def test_what_is_no_chat_reply_is_malformed(scripted, connect, fault, stream):
    """A 200 that is no reply is told as such, once."""
    server = scripted(fault)
    endpoint = connect(server)
    with pytest.raises(MalformedReplyError) as caught:
        asyncio.run(whole(endpoint) if stream else endpoint.chat(QUESTION, step=STEP))
    assert caught.value.endpoint == endpoint.base_url
    assert len(server.chats) == caught.value.attempts == 1


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ({"message": "overloaded", "code": 529}, EndpointUnavailableError, "HTTP 529: overloaded"),
        ({"message": "no credit", "code": 402}, EndpointRejectedError, "HTTP 402: no credit"),
        ("engine died", EndpointUnavailableError, "engine died"),
    ],
)
def test_an_error_with_status_200_is_an_error(scripted, connect, error, kind, said):
    """Proxies report a provider's failure that way; its code says whether to try again."""
    server = scripted(Fault(200, body={"error": error}))
    found = chat_fails(connect(server, max_attempts=2), kind)
    assert said in str(found)
    assert len(server.chats) == (2 if found.retryable else 1)


def test_a_message_without_content_is_an_empty_text(scripted, connect):
    """A refusal or a tool call is no broken reply."""
    reply = chat(connect(scripted(Reply(message={"content": None, "refusal": "no"}))))
    assert (reply.text, reply.finish_reason) == ("", "stop")


@pytest.mark.parametrize("kind", ["openai", "vllm", "llama.cpp"])
def test_a_prompt_that_is_too_long_says_so(scripted, connect, kind):
    """Each server's own words become the one error a caller can act on."""
    server = scripted(kind=kind, context_tokens=30)
    request = ChatRequest(messages=(user("word " * 50),), max_tokens=5)
    error = chat_fails(connect(server), ContextTooSmallError, request)
    said = {"openai": "resulted in 54", "vllm": "at least 31", "llama.cpp": "size (30 tokens)"}
    assert said[kind] in str(error)
    assert len(server.chats) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
        (400, "prompt is too long: 210000 tokens > 200000 maximum"),
        (400, "Prompt has 40000 tokens, too large for model with 32768 maximum context length"),
        (500, "the request exceeds the available context size. try increasing it"),
        (
            400,
            "'max_completion_tokens' is too large: 5000. Maximum context length is 4096 tokens.",
        ),
    ],
)
def test_other_servers_words_for_a_long_prompt(scripted, connect, status, message):
    """SGLang, Anthropic, Mistral, older llama.cpp and older vLLM."""
    server = scripted(Fault(status, body={"error": {"message": message}}))
    chat_fails(connect(server), ContextTooSmallError)
    assert len(server.chats) == 1


def test_errors_keep_what_a_caller_needs(scripted, connect):
    """Endpoint, model, status and request id."""
    server = scripted(Fault(500, headers={"x-request-id": "req-7", "Retry-After": "0"}))
    error = chat_fails(connect(server, max_attempts=1))
    assert (error.endpoint, error.model) == (server.base_url, "scripted")
    assert (error.status_code, error.request_id) == (500, "req-7")
    assert isinstance(error.__cause__, openai.InternalServerError)


def test_long_error_pages_become_one_line(scripted, connect):
    """A page of HTML does not flood a log: nobody asked a web server for a page."""
    page = b"<html>\n" + b"<p>Bad gateway</p>\n" * 500
    server = scripted(Fault(502, raw=page, content_type="text/html"))
    message = str(chat_fails(connect(server, max_attempts=1)))
    assert "HTTP 502: an HTML page instead of JSON" in message
    assert "\n" not in message
    assert len(message) < 600


# ---------------------------------------------------------------- streaming


async def whole(endpoint, request=QUESTION):
    """Return the pieces of a stream and its reply."""
    deltas = [delta async for delta in endpoint.stream(request, step=STEP)]
    return [delta.text for delta in deltas if delta.text], deltas[-1].reply


@pytest.mark.parametrize("kind", ["openai", "vllm", "llama.cpp"])
def test_a_stream_brings_what_a_whole_reply_brings(scripted, connect, kind):
    """Pieces, text, tokens, counts and reason are the same in both modes."""
    server = scripted(Reply("Añ 日本 is it", split_bytes=True, finish_reason="length"), kind=kind)
    endpoint = connect(server)
    request = ChatRequest(messages=QUESTION.messages, max_tokens=9, top_logprobs=2)
    pieces, reply = asyncio.run(whole(endpoint, request))
    at_once = chat(endpoint, request)
    assert "".join(pieces) == reply.text == at_once.text
    assert (reply.tokens, reply.count) == (at_once.tokens, at_once.count)
    assert reply.count.completion == len(reply.tokens)
    assert (reply.finish_reason, reply.attempts) == ("length", 1)
    assert len(pieces) > 3


@pytest.mark.parametrize("where", ["foreign loop", "portal", "sync"])
def test_a_stream_can_be_read_from_anywhere(server, connect, where):
    """A caller's loop, the portal's own, and synchronous code."""
    endpoint = connect(server)
    if where == "foreign loop":
        pieces, reply = asyncio.run(whole(endpoint))
    elif where == "portal":
        pieces, reply = portal.run(whole(endpoint))
    else:
        deltas = list(portal.iterate(endpoint.stream(QUESTION, step=STEP)))
        pieces, reply = [delta.text for delta in deltas], deltas[-1].reply
    assert "".join(pieces) == reply.text
    assert reply.count.completion is not None


def test_a_stream_is_tried_again_only_before_its_first_piece(scripted, connect):
    """A refused start is repeated, and counted."""
    server = scripted(lambda _, call: Fault(503) if call == 0 else "fine")
    pieces, reply = asyncio.run(whole(connect(server)))
    assert (pieces, reply.attempts, len(server.chats)) == (["fine"], 2, 2)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ({}, EndpointUnavailableError, "no connection"),
        ({"hang": True}, EndpointTimeoutError, "no reply within"),
        ({"body": {"error": {"message": "engine died"}}}, EndpointUnavailableError, "engine died"),
        ({"body": {"error": "a plain word"}}, EndpointUnavailableError, "a plain word"),
        ({"body": {"error": {"message": "no", "code": 400}}}, EndpointRejectedError, "400: no"),
        ({"body": [1]}, MalformedReplyError, "not a JSON object"),
    ],
)
def test_a_stream_that_breaks_is_not_repeated(scripted, connect, fault, kind, message):
    """What was read stays read, and the failure is told in our words."""
    server = scripted(Fault(stream_break_after=3, reply="one two three four", **fault))
    endpoint = connect(server, request_timeout=0.5)
    read = []

    async def consume():
        async for delta in endpoint.stream(QUESTION, step=STEP):
            read.append(delta.text)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(kind, match=message) as caught:
        asyncio.run(consume())
    assert "".join(read) == "one two"
    assert (len(server.chats), caught.value.attempts) == (1, 1)
    assert server.wait_idle()


def test_an_error_event_before_the_first_piece_is_tried_again(scripted, connect):
    """Nothing was shown yet, so nothing is repeated to the reader."""
    fault = Fault(stream_break_after=0, body={"error": {"message": "engine died"}})
    server = scripted(fault)
    with pytest.raises(EndpointUnavailableError, match="engine died") as caught:
        asyncio.run(whole(connect(server, max_attempts=2)))
    assert len(server.chats) == caught.value.attempts == 2


ENDLESS = Reply("word " * 500, chunk_delay=0.02)


@pytest.mark.parametrize("where", ["foreign loop", "portal", "sync"])
def test_closing_a_stream_early_aborts_it_and_frees_its_place(scripted, connect, where):
    """The server sees the disconnect, and a waiting request goes on."""
    server = scripted(lambda _, call: ENDLESS if call == 0 else "next")
    endpoint = connect(server, max_concurrency=1)

    async def first_pieces():
        stream = endpoint.stream(QUESTION, step=STEP)
        async for _ in stream:
            break
        await stream.aclose()

    if where == "sync":
        pieces = portal.iterate(endpoint.stream(QUESTION, step=STEP))
        next(pieces)
        pieces.close()
    elif where == "portal":
        portal.run(first_pieces())
    else:
        asyncio.run(first_pieces())
    assert server.wait_for(lambda s: s.aborted == 1)
    assert chat(endpoint).text == "next"


@pytest.mark.parametrize("where", ["foreign loop", "ended loop", "sync", "portal's garbage"])
def test_a_forgotten_stream_leaves_nothing_in_flight(scripted, connect, where):
    """Garbage collection closes what the caller did not, on whichever thread it runs."""
    server = scripted(lambda _, call: ENDLESS if call == 0 else "next")
    endpoint = connect(server, max_concurrency=1)

    async def forget(*, wait):
        stream = endpoint.stream(QUESTION, step=STEP)
        await anext(stream)
        del stream
        return not wait or await asyncio.to_thread(server.wait_for, lambda s: s.aborted == 1)

    if where == "sync":
        pieces = portal.iterate(endpoint.stream(QUESTION, step=STEP))
        next(pieces)
        del pieces
    elif where == "portal's garbage":
        held = [portal.iterate(endpoint.stream(QUESTION, step=STEP))]
        next(held[0])

        async def collect():
            held.clear()

        portal.run(collect())
    else:
        assert asyncio.run(forget(wait=where == "foreign loop"))
    assert server.wait_for(lambda s: s.aborted == 1)
    assert chat(endpoint).text == "next"


def test_reading_a_stream_leaves_no_task_behind(scripted, connect):
    """No clean-up is left to the garbage collector, chunk by chunk."""
    endpoint = connect(scripted(Reply("a b c d e f g h")))
    tasks = []

    async def count():
        async for delta in endpoint.stream(QUESTION, step=STEP):
            if delta.text:
                await asyncio.sleep(0)
                tasks.append(len(asyncio.all_tasks()))

    portal.run(count())
    assert tasks == [1] * 8


# ---------------------------------------------------------------- what a server says of itself


def test_vllm_scores_exactly_the_assistant_message(scripted, connect):
    """`scored` comes with the first request, nothing having been asked before."""
    server = scripted("Yes", kind="vllm")
    reply = chat(connect(server), SCORED)
    text = SCORED.messages[1].content
    assert "".join(token.text for token in reply.scored) == text
    pieces = prompt_pieces(server.chats[0]["messages"])
    start = pieces.index(words(text)[0].encode())
    values = [pseudo_logprob(pieces[i], i) for i in range(start, start + len(words(text)))]
    assert [token.logprob for token in reply.scored] == values
    assert len(reply.tokens) == 1


def test_any_server_is_asked_for_prompt_logprobs_and_may_ignore_it(scripted, connect):
    """It may be a proxy to a vLLM. Without `score_message` nobody is asked."""
    for kind in ("openai", "llama.cpp", "sglang"):
        server = scripted("Yes", kind=kind)
        reply = chat(connect(server), SCORED)
        assert reply.scored is None
        assert reply.scored_evidence == f"0 of {reply.count.prompt} positions"
        assert server.chats[0]["prompt_logprobs"] == 0
    server = scripted("Yes", kind="vllm")
    chat(connect(server), WITH_LOGPROBS)
    assert server.requests == [("POST", "/v1/chat/completions")]
    assert "prompt_logprobs" not in server.chats[0]


@pytest.mark.parametrize(
    "reply",
    [
        Reply("Yes", prompt_logprobs=None),
        Reply("Yes", prompt_logprobs=[None]),
        Reply("Yes", prompt_token_ids=[1, 2, 3]),
        Reply("Yes", prompt_token_ids=[7] * 60, prompt_logprobs=[None] * 60),
    ],
)
def test_unusable_prompt_logprobs_are_none(scripted, connect, reply):
    """The text and its tokens are there all the same."""
    read = chat(connect(scripted(reply, kind="vllm")), SCORED)
    assert (read.text, read.scored, len(read.tokens)) == ("Yes", None, 1)


@pytest.mark.parametrize(
    ("kind", "server_name", "counts"),
    [("openai", None, False), ("vllm", "vllm", True), ("llama.cpp", "llama.cpp", True)],
)
def test_capabilities_are_asked_once(scripted, connect, kind, server_name, counts):
    """Server, context and tokeniser, as far as the server tells."""
    server = scripted(kind=kind, context_tokens=4096)
    endpoint = connect(server)
    for _ in range(2):
        found = asyncio.run(endpoint.capabilities())
    assert (found.server, found.counts_tokens) == (server_name, counts)
    assert found.context_tokens == (None if kind == "openai" else 4096)
    assert server.requests == [("GET", "/v1/models")]


@pytest.mark.parametrize("fault", [Fault(503), Fault(401), Fault(close=True), Fault(200, raw=b"x")])
def test_failing_to_learn_is_not_remembered(scripted, connect, fault):
    """Unknown for now; the next call asks again."""
    server = scripted(kind="vllm", faults={"/v1/models": fault})
    endpoint = connect(server, max_attempts=1)
    assert asyncio.run(endpoint.capabilities()).server is None
    server.faults.clear()
    assert asyncio.run(endpoint.capabilities()).server == "vllm"


def test_a_server_without_the_route_is_not_asked_again(scripted, connect):
    """404 is an answer: it says nothing of itself."""
    server = scripted(kind="vllm", faults={"/v1/models": Fault(404)})
    endpoint = connect(server)
    for _ in range(2):
        assert asyncio.run(endpoint.capabilities()).server is None
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["openai", "vllm", "llama.cpp"])
def test_tokens_are_counted_by_the_servers_tokeniser(scripted, connect, kind):
    """The templated prompt, by vLLM and llama.cpp; others cannot."""
    server = scripted(kind=kind)
    count = asyncio.run(connect(server).count_tokens(SCORED.messages))
    pieces = prompt_pieces([message.to_dict() for message in SCORED.messages])
    expected = {
        "openai": None,
        "vllm": len(pieces),
        "llama.cpp": len(words(b"".join(pieces).decode())),
    }
    assert count == expected[kind]


@pytest.mark.parametrize(
    "fault",
    [Fault(500), Fault(200, body={"count": "many"}), Fault(200, body={}), Fault(close=True)],
)
@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_tokeniser_that_fails_counts_nothing(scripted, connect, kind, fault):
    """The caller goes on without a count, and may ask again."""
    server = scripted(kind=kind, faults={"/tokenize": fault})
    endpoint = connect(server)
    assert asyncio.run(endpoint.count_tokens(QUESTION.messages)) is None
    server.faults.clear()
    assert asyncio.run(endpoint.count_tokens(QUESTION.messages)) is not None


# ---------------------------------------------------------------- clients of one's own


def test_client_factory_gets_the_options(server, connect):
    """It can pass them on and add its own; its retries are switched off."""
    seen = {}

    def factory(**options):
        seen.update(options)
        return openai.AsyncOpenAI(**options | {"max_retries": 5, "default_query": {"from": "me"}})

    server.respond = Fault(503)
    endpoint = connect(
        server, client_factory=factory, api_key=KEY, headers={"X-A": "b"}, max_attempts=2
    )
    chat_fails(endpoint, EndpointUnavailableError)
    assert len(server.chats) == 2
    assert (seen["base_url"], seen["api_key"]) == (server.base_url, KEY)
    assert (seen["default_headers"], seen["max_retries"]) == ({"X-A": "b"}, 0)
    assert server.headers[0]["x-a"] == "b"


def test_client_factory_must_return_an_async_client(server, connect):
    """Anything else is a configuration error."""
    with pytest.raises(ConfigurationError, match=r"returned a dict; it must return an openai\."):
        chat(connect(server, client_factory=dict))
    assert server.requests == []


def test_azure_client_reaches_its_deployment(server, connect):
    """The path is Azure's own, in both ways of naming a deployment."""

    def factory(**_):
        return openai.AsyncAzureOpenAI(
            azure_endpoint=server.url, api_key=KEY, api_version="2024-10-21"
        )

    chat_fails(connect(server, "my-gpt", client_factory=factory), EndpointRejectedError)
    assert server.requests == [("POST", "/openai/deployments/my-gpt/chat/completions")]
    assert server.headers[0]["api-key"] == KEY


def test_a_strict_client_is_translated_too(scripted, connect):
    """Its validation errors are malformed replies."""

    def factory(**options):
        return openai.AsyncOpenAI(**options, _strict_response_validation=True)

    server = scripted(Fault(200, raw=b"<html>", content_type="text/html"))
    chat_fails(connect(server, client_factory=factory), MalformedReplyError)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_closed_endpoint_opens_again(server, connect, mode):
    """Closing releases connections and nothing else, also twice, also unused."""
    endpoint = connect(server)
    endpoint.close()
    for _ in range(2):
        chat(endpoint)
        endpoint.close() if mode == "sync" else asyncio.run(endpoint.aclose())
    endpoint.close()
    assert len(server.connections) == 2


def test_closing_ends_what_is_under_way(scripted, connect):
    """A request that another caller waits for fails in our words, and is sent anew."""
    server = scripted(lambda _, call: Fault(hang=True) if call == 0 else "again")
    endpoint = connect(server)

    async def close_meanwhile():
        waiting = asyncio.create_task(endpoint.chat(QUESTION, step=STEP))
        assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 1)
        await endpoint.aclose()
        return await waiting

    reply = asyncio.run(close_meanwhile())
    assert (reply.text, reply.attempts) == ("again", 2)


def test_nothing_is_left_open_at_the_end_of_a_script(server: ScriptedServer) -> None:
    """A script that never closes its endpoint ends without a warning of open sockets."""
    script = (
        "from specrag_integrations import Endpoint, StandardRAG\n"
        f"rag = StandardRAG(Endpoint({server.base_url!r}))\n"
        "print(rag.ask('q', ['a passage']).text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        (["hush: hush"], "headers must be a mapping of names to values, not a list"),
        ("X-Token: hush", "headers must be a mapping of names to values, not a str"),
        ([], "headers must be a mapping of names to values, not a list"),
        ({5: "hush"}, "a header's name must be a str, not a int"),
    ],
)
def test_what_is_no_mapping_of_headers_is_refused_by_its_type(headers, told):
    """What a header holds may be secret, and is not shown."""
    with pytest.raises(ConfigurationError) as caught:
        Endpoint("http://localhost", headers=headers)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("extra_body", "told"),
    [
        ({"a": {7531}}, "extra_body['a'] is a set, which JSON cannot hold"),
        ({"a": [1, {"b": b"7531"}]}, "extra_body['a'][1]['b'] is a bytes, which JSON cannot hold"),
        ({"a": {(7531,): 1}}, "extra_body['a'] has a key of type tuple, which JSON cannot hold"),
        ({"a": math.nan}, "extra_body['a'] is not finite"),
        ([], "extra_body must be a mapping, not a list"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_place(extra_body, told):
    """At construction, with the type and without the value."""
    with pytest.raises(ConfigurationError) as caught:
        Endpoint("http://localhost", extra_body=extra_body)
    assert str(caught.value).startswith(told)
    assert "7531" not in str(caught.value)


def test_all_that_json_can_hold_is_sent(server, connect):
    """Whole numbers as keys too, as in `logit_bias`."""
    body = {"logit_bias": {50256: -100}, "stop": ("a", None), "x": [True, 0.5, {}]}
    chat(connect(server, extra_body=body))
    sent = {name: server.chats[0][name] for name in body}
    assert sent == {"logit_bias": {"50256": -100}, "stop": ["a", None], "x": [True, 0.5, {}]}


@pytest.mark.parametrize("name", ["SPECRAG_API_KEY", "SPECRAG_JUDGE_API_KEY"])
def test_a_bad_key_of_the_environment_is_told_by_its_variable(monkeypatch, name):
    """The command line reads it there; a key given otherwise is `api_key`."""
    monkeypatch.setenv(name, "two words")
    with pytest.raises(ConfigurationError, match=f"^{name} is empty or holds white space"):
        Endpoint("http://localhost", api_key="two words")
    with pytest.raises(ConfigurationError, match="^api_key is empty or holds white space"):
        Endpoint("http://localhost", api_key="two other words")


@pytest.mark.parametrize(
    "options",
    [{"model": 5}, {"model": " "}, {"extra_body": "x"}, {"client_factory": 5}],
)
def test_a_wrong_model_or_body_is_refused(options: dict[str, Any]) -> None:
    """The error comes at construction and names the argument."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Endpoint("http://localhost:1", **options)


def test_a_copy_is_the_same_endpoint():
    """Frameworks copy what they hold; a copy's own connections would go beyond the limit."""
    endpoint = Endpoint("http://gpu:8000/v1", "m", api_key="secret-key-123")
    assert copy.copy(endpoint) is endpoint
    assert copy.deepcopy({"drafter": [endpoint]})["drafter"][0] is endpoint


def test_a_pickled_endpoint_has_its_options_and_no_key(monkeypatch):
    """The key stays behind; where the copy is used, it comes from the environment."""
    key = "from-the-environment"
    with ScriptedServer(kind="vllm", api_key=key) as server:
        endpoint = Endpoint(
            server.base_url,
            "scripted",
            api_key=key,
            extra_body={"seed": 1},
            request_timeout=7.0,
            max_concurrency=3,
            max_attempts=2,
        )
        portal.run(endpoint.chat(QUESTION, step=STEP))  # used, so that it holds connections
        pickled = pickle.dumps(endpoint)
        endpoint.close()
        assert key.encode() not in pickled
        monkeypatch.delenv("SPECRAG_API_KEY", raising=False)
        again = pickle.loads(pickled)
        assert again.options == endpoint.options
        with pytest.raises(ConfigurationError, match="SPECRAG_API_KEY is not set"):
            portal.run(again.chat(QUESTION, step=STEP))
        monkeypatch.setenv("SPECRAG_API_KEY", key)
        portal.run(again.chat(QUESTION, step=STEP))
        again.close()
    assert [body["seed"] for body in server.chats] == [1, 1]


def test_a_pickled_endpoint_without_a_key_needs_none(monkeypatch):
    """A server without authentication is reached as before, whatever the environment holds."""
    monkeypatch.setenv("SPECRAG_API_KEY", "not-for-this-server")
    with ScriptedServer() as server:
        endpoint = pickle.loads(pickle.dumps(Endpoint(server.base_url)))
        portal.run(endpoint.chat(QUESTION, step=STEP))
        endpoint.close()
    sent = [headers.get("authorization") for headers in server.headers]
    assert sent
    assert not any("not-for-this-server" in (value or "") for value in sent)


@pytest.mark.parametrize(
    ("base_url", "headers", "named"),
    [
        ("http://gpu/v1", {"X-Token": "hidden-1"}, "headers"),
        ("http://someone:hidden-1@gpu/v1", None, "headers"),
        ("http://gpu/v1?key=hidden-1", None, "a query in its URL"),
    ],
)
def test_what_may_be_secret_is_not_pickled(base_url, headers, named):
    """Left out in silence, the copy would be refused far from here."""
    endpoint = Endpoint(base_url, headers=headers)
    with pytest.raises(pickle.PicklingError, match=named) as caught:
        pickle.dumps(endpoint)
    assert "hidden-1" not in str(caught.value)
    assert copy.deepcopy(endpoint) is endpoint
