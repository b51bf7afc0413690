"""What an application's own models raise and return, read as our values."""

from __future__ import annotations

import asyncio
import gc
import types

import openai
import pytest
from scripted_server import Fault, ScriptedServer

from specrag_integrations.errors import (
    ContextTooSmallError,
    EndpointError,
    EndpointRejectedError,
    EndpointTimeoutError,
    EndpointUnavailableError,
)
from specrag_integrations.foreign import (
    endpoint_error,
    finish_reason_of,
    logprobs_of,
    refuses_logprobs,
    tokens_of,
)
from specrag_integrations.models import user

QUESTION = "Who wrote the secret report about the harbour?"
OVERFLOW = "This model's maximum context length is 8 tokens, you sent 90"


def raised(base_url: str, **options: object) -> BaseException:
    """Return what the real openai client raises on one chat request."""

    def ask() -> None:
        client = openai.OpenAI(base_url=base_url, api_key="k", max_retries=0, timeout=5.0)
        with client:
            client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": QUESTION}], **options
            )

    with pytest.raises(openai.APIError) as caught:
        ask()
    return caught.value


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, EndpointRejectedError),
        (404, EndpointRejectedError),
        (429, EndpointUnavailableError),
        (503, EndpointUnavailableError),
    ],
)
def test_a_status_tells_which_error_it_is(status, kind):
    """What the openai client raises becomes ours, with status, time to wait, and model."""
    fault = Fault(status, headers={"Retry-After": "7"})
    with ScriptedServer(lambda *_: fault) as server:
        error = endpoint_error(raised(server.base_url), model="theirs")
    assert type(error) is kind
    assert (error.status_code, error.retry_after, error.model) == (status, 7.0, "theirs")


def test_a_prompt_that_is_too_long_is_known_as_such():
    """A context overflow is an error of its own, as from an Endpoint."""
    fault = Fault(400, body={"error": {"message": OVERFLOW}})
    with ScriptedServer(lambda *_: fault) as server:
        error = endpoint_error(raised(server.base_url), model="theirs")
    assert type(error) is ContextTooSmallError


def test_words_that_repeat_the_request_are_left_out():
    """Errors reach logs, and questions must not: a server's echo ends where it begins."""
    fault = Fault(400, body={"error": {"message": f"cannot answer: {QUESTION}"}})
    with ScriptedServer(lambda *_: fault) as server:
        told = raised(server.base_url)
    error = endpoint_error(told, model="theirs", messages=[user(QUESTION)])
    assert "cannot answer" in str(error)
    assert "harbour" not in str(error)


def test_a_time_out_and_a_lost_connection_are_failures():
    """No reply in time, and no server at all, from the real client."""
    with ScriptedServer(delay=30.0) as server:
        late = endpoint_error(raised(server.base_url, timeout=0.05), model="theirs")
        nowhere = server.base_url
    lost = endpoint_error(raised(nowhere), model="theirs")
    assert type(late) is EndpointTimeoutError
    assert type(lost) is EndpointUnavailableError
    assert type(endpoint_error(TimeoutError(), model="theirs")) is EndpointTimeoutError
    assert "theirs" in str(endpoint_error(TimeoutError(), model="theirs"))
    assert type(endpoint_error(ConnectionResetError(), model="x")) is EndpointUnavailableError


def test_our_own_error_stays_as_it_is():
    """An Endpoint inside an application's model needs no translation."""
    error = EndpointError("as it is")
    assert endpoint_error(error, model="theirs") is error


def test_a_bug_is_no_failure():
    """What is no API error must propagate as itself."""
    for bug in (ValueError("bug"), RuntimeError("Event loop is closed"), KeyError("x"), OSError(5)):
        assert endpoint_error(bug, model="theirs") is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_closed_loop_is_no_lost_connection():
    """A pooled client used in a second event loop: a bug, though openai 2.x calls it a connection.

    Swallowed, it would be a draft that is silently missing. (Its first connection cannot be closed
    any more, which Python warns of.)
    """
    with ScriptedServer() as server:
        clients = [openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)]

        async def ask() -> None:
            await clients[0].chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": QUESTION}]
            )

        asyncio.run(ask())
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one depends on the major
            asyncio.run(ask())
        clients.clear()
        assert endpoint_error(caught.value, model="theirs") is None
        del caught
        gc.collect()


def sdk_error(package: str, name: str, **attributes: object) -> Exception:
    """Return an error as an SDK that is not installed here would raise it, of a subclass."""
    base = type(name, (Exception,), {"__module__": f"{package}.errors"})
    error = type("Specific", (base,), {"__module__": f"{package}.more"})("out of service")
    vars(error).update(attributes)
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (sdk_error("anthropic", "APIError", status_code=529), 529),
        (sdk_error("ollama", "ResponseError", status_code=404), 404),
        (sdk_error("google", "GoogleAPIError", code=503), 503),
        (sdk_error("google", "APIError", code=429), 429),
        (
            sdk_error(
                "botocore", "ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 403}}
            ),
            403,
        ),
        (
            sdk_error("httpx", "HTTPError", response=types.SimpleNamespace(status_code=502)),
            502,
        ),
        (sdk_error("requests", "RequestException", response=None), None),
    ],
)
def test_other_sdks_are_known_by_name(error, status):
    """Their failures become ours, with the status wherever each keeps it."""
    translated = endpoint_error(error, model="theirs")
    assert translated is not None
    assert translated.status_code == status
    assert "out of service" in str(translated)
    assert endpoint_error(sdk_error("elsewhere", "APIError"), model="theirs") is None


def test_a_key_in_their_words_is_masked():
    """Servers like to echo a wrong key."""
    error = sdk_error("openai", "APIError", body={"message": "wrong key sk-abcdefgh12345678"})
    assert "abcdefgh" not in str(endpoint_error(error, model="theirs"))
    error = sdk_error("openai", "APIError", body={"message": "wrong key open sesame"})
    assert "sesame" in str(endpoint_error(error, model="theirs"))
    assert "sesame" not in str(endpoint_error(error, model="theirs", secrets=["open sesame"]))


@pytest.mark.parametrize(
    ("status", "words", "refuses"),
    [
        (400, "logprobs is not supported with this model", True),
        (422, "extra field: top_logprobs", True),
        (403, "You are not allowed to request logprobs from this model", True),
        (403, "You are not allowed to use this model", False),
        (400, "content was filtered", False),
        (500, "logprobs failed", False),
    ],
)
def test_a_refusal_of_log_probabilities_is_known_by_its_words(status, words, refuses):
    """Any other refusal would be the same without them."""
    fault = Fault(status, body={"error": {"message": words}})
    with ScriptedServer(lambda *_: fault) as server:
        error = endpoint_error(raised(server.base_url), model="theirs")
    assert error is not None
    assert refuses_logprobs(error) is refuses


def test_log_probabilities_are_read_from_dicts_and_objects():
    """The OpenAI form, as LangChain keeps it and as the client returns it."""
    with ScriptedServer() as server, openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        reply = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": QUESTION}],
            logprobs=True,
            top_logprobs=3,
        )
    told = reply.choices[0].logprobs
    tokens = tokens_of(told)
    assert tokens
    assert "".join(token.text for token in tokens) == reply.choices[0].message.content
    assert [len(token.alternatives) for token in tokens] == [3] * len(tokens)
    assert tokens_of(told.model_dump()) == tokens
    assert tokens_of(None) is None
    assert tokens_of({"content": [{"token": "a", "logprob": float("nan")}]}) is None
    assert tokens_of(logprobs_of(tokens)) == tokens


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ((None, "end_turn"), "stop"),
        (("STOP", "length"), "stop"),
        ((None, None, "max_tokens"), "length"),
        (("content_filter",), "content_filter"),
        ((None,), "stop"),
    ],
)
def test_why_a_model_stopped_is_told_in_one_way(told: tuple[object, ...], reason: str):
    """The first place that tells counts; what nobody tells is taken to be done."""
    assert finish_reason_of(*told) == reason
