"""How an endpoint words what is wanted of log-probabilities, and what it learns from refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer, unsupported

from specrag_integrations import ConfigurationError, Endpoint
from specrag_integrations.errors import (
    EndpointError,
    EndpointRejectedError,
    EndpointUnavailableError,
    LogprobsUnavailableError,
)
from specrag_integrations.models import ChatReply, ChatRequest, Step, assistant, user

STEP = Step(kind="verify")
CHECK = ChatRequest(
    messages=(user("Who wrote Emma?"), assistant("Answer: Austen"), user("Does it hold?")),
    max_tokens=1,
    top_logprobs=20,
    labels=("Yes", "No"),
    think=False,
)
SCORED = replace(CHECK, score_message=1)
NO_THINKING = {"enable_thinking": False, "thinking": False}
NOT_JSON = Fault(
    400, body={"error": {"message": "Out of range float values are not JSON compliant"}}
)


@pytest.fixture
def connect() -> Iterator[Callable[..., Endpoint]]:
    """Make endpoints that are closed at the end."""
    made: list[Endpoint] = []

    def make(server: ScriptedServer, **options: Any) -> Endpoint:
        made.append(Endpoint(server.base_url, "scripted", **options))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def chat(endpoint: Endpoint, request: ChatRequest) -> ChatReply:
    """Send one request."""
    return asyncio.run(endpoint.chat(request, step=STEP))


def probe(endpoint: Endpoint, request: ChatRequest = SCORED) -> ChatReply:
    """Send one trial request."""
    return asyncio.run(endpoint.probe(request))


# ---------------------------------------------------------------- labels


def test_vllm_is_asked_for_the_labels_by_their_ids(scripted, connect):
    """All spellings of one token; their probabilities come back whatever their rank."""
    server = scripted(
        Reply("Paris", alternatives={"Yes": -9.0, " no": -12.0}), kind="vllm", max_logprobs=5
    )
    endpoint = connect(server)

    reply = chat(endpoint, CHECK)

    spellings = ["Yes", " Yes", "yes", " yes", "YES", " YES", "No", " No", "no", " no", "NO", " NO"]
    assert server.chats[-1]["logprob_token_ids"] == server.ids([s.encode() for s in spellings])
    listed = dict(reply.tokens[0].alternatives)
    assert (listed["Yes"], listed[" no"]) == (-9.0, -12.0)
    tokenised = len([path for _, path in server.requests if path == "/tokenize"])
    chat(endpoint, CHECK)
    assert len([path for _, path in server.requests if path == "/tokenize"]) == tokenised


@pytest.mark.parametrize("kind", ["openai", "llama.cpp", "sglang"])
def test_other_servers_are_asked_for_alternatives(scripted, connect, kind):
    """They know no ids."""
    server = scripted("Yes", kind=kind)

    chat(connect(server), CHECK)

    assert "logprob_token_ids" not in server.chats[0]
    assert server.chats[0]["top_logprobs"] == 20


def test_labels_of_several_tokens_are_left_out(scripted, connect):
    """No id stands for them; the alternatives may still hold their beginning."""
    server = scripted("Yes", kind="vllm")

    chat(connect(server), replace(CHECK, labels=("Quite so", "No")))

    assert len(server.chats[0]["logprob_token_ids"]) == 6


def test_a_vllm_without_its_tokeniser_is_asked_for_alternatives(scripted, connect):
    """Gateways often pass `/v1` alone on."""
    server = scripted("Yes", kind="vllm", faults={"/tokenize": Fault(404)})
    endpoint = connect(server)

    for _ in range(2):
        chat(endpoint, CHECK)

    assert "logprob_token_ids" not in server.chats[1]
    assert [path for _, path in server.requests].count("/tokenize") == 1


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("kind", "told"), [("vllm", True), ("sglang", True), ("llama.cpp", True), ("openai", False)]
)
def test_servers_that_know_the_switch_are_told_not_to_think(scripted, connect, kind, told):
    """Others would refuse the field."""
    server = scripted("Yes", kind=kind)

    chat(connect(server), CHECK)
    chat(connect(server), replace(CHECK, think=True))

    assert server.chats[0].get("chat_template_kwargs") == (NO_THINKING if told else None)
    assert "chat_template_kwargs" not in server.chats[1]


def test_the_users_word_on_the_template_counts_more(scripted, connect):
    """And what we say is added to it, not put in its place."""
    server = scripted("Yes", kind="vllm")
    own = {"chat_template_kwargs": {"thinking": True, "language": "fr"}, "seed": 7}

    chat(connect(server, extra_body=own), CHECK)
    chat(connect(server, extra_body=own), replace(CHECK, think=True))

    merged = {"enable_thinking": False, "thinking": True, "language": "fr"}
    assert server.chats[0]["chat_template_kwargs"] == merged
    assert server.chats[1]["chat_template_kwargs"] == own["chat_template_kwargs"]
    assert server.chats[0]["seed"] == 7


def test_template_options_must_be_a_mapping():
    """Told at construction."""
    with pytest.raises(ConfigurationError, match="chat_template_kwargs"):
        Endpoint("http://host", extra_body={"chat_template_kwargs": "no"})


@pytest.mark.parametrize(
    ("options", "thought"),
    [
        ({"thinks": True, "obeys_thinking_switch": False, "reasoning_parser": True}, True),
        ({"thinks": True, "obeys_thinking_switch": True, "reasoning_parser": True}, False),
        ({}, False),
    ],
)
def test_a_reply_tells_whether_the_model_thought(scripted, connect, options, thought):
    """Servers with a reasoning parser put the thoughts into a field of their own."""
    for kind in ("vllm", "sglang", "llama.cpp"):
        endpoint = connect(scripted("Yes", kind=kind, **options))
        assert chat(endpoint, replace(CHECK, max_tokens=50)).thinking is thought


# ---------------------------------------------------------------- forced text


def forced(text: str) -> ChatRequest:
    """Return a request that has a text written."""
    return ChatRequest(messages=(user("Q?"),), max_tokens=1, top_logprobs=0, forced=text)


def test_llama_cpp_is_made_to_write_a_text_token_by_token(scripted, connect):
    """By a grammar of token literals, and no token more."""
    server = scripted("something else", kind="llama.cpp", bos=True)

    reply = chat(connect(server), forced("Answer: Jane <|im_end|> Austen"))

    body = server.chats[0]
    assert body["grammar"].startswith("root ::= <[")
    assert body["max_tokens"] == body["grammar"].count("<[")
    assert "".join(token.text for token in reply.tokens) == "Answer: Jane <|im_end|> Austen"


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang"])
def test_other_servers_cannot_be_forced(scripted, connect, kind):
    """The reason names what would be needed; no request is sent."""
    server = scripted("x", kind=kind)

    with pytest.raises(EndpointRejectedError, match=r"only llama\.cpp"):
        chat(connect(server), forced("Austen"))

    assert server.chats == []


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "refused",
    [
        {"prompt_logprobs": "Unrecognized request argument supplied: prompt_logprobs"},
        {"return_token_ids": "extra fields not permitted: return_token_ids"},
        {"logprob_token_ids": "Unknown parameter: 'logprob_token_ids'."},
        {"chat_template_kwargs": "Unsupported parameter: 'chat_template_kwargs'"},
        unsupported("prompt_logprobs", "return_token_ids", model="gpt"),
    ],
    ids=lambda refused: next(iter(refused)),
)
def test_fields_a_request_can_do_without_are_left_out_once_refused(scripted, connect, refused):
    """And the log-probabilities themselves are still asked for."""
    server = scripted("Yes", kind="vllm", refuse=refused)
    endpoint = connect(server)

    assert chat(endpoint, SCORED).tokens
    sent = len(server.chats)
    assert chat(endpoint, SCORED).tokens

    assert len(server.chats) == sent + 1
    assert not server.chats[-1].keys() & refused.keys()
    assert server.chats[-1]["logprobs"] is True


def test_a_strict_server_is_understood_field_by_field(scripted, connect):
    """FastAPI names one field at a time; a trial has attempts enough for all."""
    server = scripted("Yes", kind="vllm", forbid_extra=True, probe="respond")

    reply = probe(connect(server))

    assert reply.tokens
    assert reply.attempts > 3
    assert reply.scored_evidence == f"0 of {reply.count.prompt} positions"


def test_a_reasoning_model_that_refuses_four_things_is_learnt_in_one_trial(scripted, connect):
    """Four refusals would use up the attempts of an ordinary request."""
    refuse = {
        "max_tokens": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
        "temperature": "Unsupported value: 'temperature' does not support 0 with this model.",
        "prompt_logprobs": "Unrecognized request argument supplied: prompt_logprobs",
        "return_token_ids": "Unrecognized request argument supplied: return_token_ids",
        "logprobs": "You are not allowed to request logprobs from this model",
    }
    server = scripted("Yes", refuse=refuse)
    endpoint = connect(server)

    assert probe(endpoint).tokens is None
    assert chat(endpoint, SCORED).attempts == 1
    assert server.chats[-1].keys() == {"model", "messages", "max_completion_tokens"}


def test_infinite_values_are_tried_with_fewer_alternatives_then_given_up(scripted, connect):
    """Servers answer 400 where a log-probability has no place in JSON: the model's fault."""
    server = scripted(lambda body, _: NOT_JSON if body["top_logprobs"] > 5 else "Yes")
    assert chat(connect(server), CHECK).attempts == 2

    server = scripted(NOT_JSON)
    with pytest.raises(LogprobsUnavailableError, match="not JSON compliant"):
        chat(connect(server), CHECK)
    assert [body["top_logprobs"] for body in server.chats] == [20, 5]


def test_a_text_is_worth_having_without_log_probabilities(scripted, connect):
    """A draft needs them less than its words; a check is nothing without them."""
    server = scripted(lambda body, _: NOT_JSON if body.get("logprobs") else "Austen")

    reply = chat(
        connect(server), ChatRequest(messages=CHECK.messages, max_tokens=9, top_logprobs=0)
    )

    assert (reply.text, reply.tokens, reply.attempts) == ("Austen", None, 2)
    with pytest.raises(LogprobsUnavailableError):
        chat(connect(server), CHECK)


# ---------------------------------------------------------------- trials


def test_a_trial_is_sent_once_however_many_ask(scripted, connect):
    """From any thread and loop; those who come meanwhile wait for the outcome."""
    server = scripted("Yes", kind="vllm", probe="respond")
    endpoint = connect(server)

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: probe(endpoint), range(8)))

    assert len(server.chats) == 1
    assert {reply.text for reply in replies} == {"Yes"}
    probe(endpoint, CHECK)  # another trial
    assert len(server.chats) == 2


def test_a_refused_trial_is_remembered(scripted, connect):
    """It would be refused again, with the same words."""
    server = scripted(Fault(400, body={"error": {"message": "no such thing"}}))
    endpoint = connect(server)

    for _ in range(3):
        with pytest.raises(EndpointRejectedError, match="no such thing"):
            probe(endpoint)

    assert len(server.chats) == 1


@pytest.mark.parametrize("fault", [Fault(503), Fault(401), Fault(404), Fault(close=True)])
def test_a_trial_that_may_succeed_later_is_sent_again(scripted, connect, fault):
    """A server that is starting, a key that is renewed, a model that is loaded."""
    faults: list[Fault] = [fault] * 20
    server = scripted(lambda body, _: faults[0] if faults else "Yes")
    endpoint = connect(server)

    with pytest.raises(EndpointError):
        probe(endpoint)
    assert len(server.chats) <= endpoint.max_attempts
    faults.clear()

    assert probe(endpoint).text == "Yes"


def test_an_unreachable_server_is_told_as_such(connect):
    """Not as one that cannot."""
    with ScriptedServer("Yes") as server:
        pass
    endpoint = connect(server, max_attempts=1)

    with pytest.raises(EndpointUnavailableError):
        probe(endpoint)


# ---------------------------------------------------------------- spans


def test_the_first_span_is_confirmed_by_two_calls_of_the_tokeniser(scripted, connect):
    """Once per endpoint: later spans are found in the same way."""
    server = scripted("Yes", kind="vllm")
    endpoint = connect(server)
    plain = replace(SCORED, labels=(), think=True)

    for _ in range(3):
        reply = chat(endpoint, plain)
        assert reply.scored
        assert reply.scored_evidence.endswith("positions, confirmed by /tokenize")

    assert [path for _, path in server.requests].count("/tokenize") == 2


@pytest.mark.parametrize("template", ["drops-thoughts", "empty-thought-last"])
def test_templates_that_treat_the_last_turn_otherwise_are_confirmed(scripted, connect, template):
    """What is compared is the conversation as it is scored."""
    reply = chat(connect(scripted("Yes", kind="vllm", template=template)), SCORED)

    assert "".join(token.text for token in reply.scored) == "Answer: Austen"
    assert "confirmed by /tokenize" in reply.scored_evidence


def test_a_template_that_alters_the_text_gives_nothing(scripted, connect):
    """There is no such text in the prompt, and nobody guesses which of its tokens are meant."""
    reply = chat(connect(scripted("Yes", kind="vllm", template="upper-cases")), SCORED)

    assert reply.scored is None
    assert "the chat template changes the messages" in reply.scored_evidence


def test_spans_that_the_tokeniser_contradicts_are_not_believed(scripted, connect):
    """Also later ones, though it is asked only once."""
    tokenised = {"count": 3, "max_model_len": 99, "tokens": [1, 2, 3]}
    fault = Fault(200, body=tokenised)
    server = scripted("Yes", kind="vllm", faults={"/tokenize": fault})
    endpoint = connect(server)

    for _ in range(2):
        reply = chat(endpoint, replace(SCORED, labels=()))
        assert reply.scored is None
        assert "another prompt than the chat route" in reply.scored_evidence


@pytest.mark.parametrize("text", ["0", "Answer: 1920", "Answer: Zz", "0 is # Z", "#0", "Z#"])
def test_what_stands_in_for_the_text_never_looks_like_it(scripted, connect, text):
    """Its first and last token would otherwise be taken for the template's."""
    messages = (CHECK.messages[0], assistant(text), CHECK.messages[2])
    server = scripted("Yes", kind="vllm")

    reply = chat(connect(server), replace(SCORED, messages=messages))

    assert "".join(token.text for token in reply.scored) == text


def test_without_the_tokeniser_the_text_must_do(scripted, connect):
    """A proxy hides it; the whole text was found all the same, from both ends."""
    server = scripted("Yes", kind="vllm", faults={"/tokenize": Fault(404)})

    reply = chat(connect(server), SCORED)

    assert reply.scored
    assert "not cross-checked" in reply.scored_evidence


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("kind", "version"),
    [("vllm", "0.32.0"), ("llama.cpp", "b11549-abc"), ("sglang", "0.5.6"), ("openai", None)],
)
def test_a_server_tells_its_version(scripted, connect, kind, version):
    """Where it has a route for it."""
    assert asyncio.run(connect(scripted(kind=kind)).version()) == version


def test_a_server_without_the_route_has_no_version(scripted, connect, caplog):
    """Nothing depends on it, so that nothing fails."""
    server = scripted(kind="vllm", faults={"/version": Fault(404)})

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(connect(server).version()) is None
    assert caplog.records == []


# ---------------------------------------------------------------- tokenisers


@pytest.mark.parametrize("kind", ["openai", "llama.cpp", "sglang"])
def test_only_vllm_is_asked_for_ids(scripted, connect, kind):
    """Others have another tokeniser, or none."""
    server = scripted("Yes", kind=kind)

    chat(connect(server), CHECK)

    assert "/tokenize" not in [path for _, path in server.requests]


def test_a_tokeniser_that_was_away_is_asked_about_the_next_span(scripted, connect):
    """What it did not say is not remembered."""
    server = scripted("Yes", kind="vllm", faults={"/tokenize": Fault(503)})
    endpoint = connect(server, max_attempts=1)

    assert "not cross-checked" in chat(endpoint, SCORED).scored_evidence
    server.faults.clear()
    assert "confirmed by /tokenize" in chat(endpoint, SCORED).scored_evidence


def test_a_text_with_parts_of_characters_is_not_forced(scripted, connect):
    """llama.cpp would write them all and leave out their log-probabilities."""
    tokens = [{"id": 1, "piece": "So"}, *({"id": n, "piece": [240 - n]} for n in (2, 3))]
    fault = Fault(200, body={"tokens": tokens})
    server = scripted("x", kind="llama.cpp", faults={"/tokenize": fault})

    with pytest.raises(LogprobsUnavailableError, match=r"2 of the text's 3 tokens are parts"):
        chat(connect(server), forced("So 😀"))

    assert server.chats == []
