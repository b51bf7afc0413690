"""LlamaIndex's own classes over OpenAI's API as models of the pipeline, over real HTTP.

They hold openai back to 2.x, so that these tests run in an environment of their own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer, is_verification, unsupported

pytest.importorskip("llama_index.llms.openai_like")

from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from llama_index_kit import (
    FALLBACK,
    QUESTION,
    Json,
    Scripted,
    dialogue,
    is_draft,
    is_fallback,
    nodes,
    synthesizer,
    text_from,
    unknown,
)

from specrag_integrations.llama_index import LLMChat

# The classes never close their clients.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def llm_of(server: ScriptedServer, kind: Any = OpenAILike, **options: Any) -> Any:
    """Return the class that most apps use for servers of their own."""
    defaults: Json = {
        "model": "scripted",
        "api_base": server.base_url,
        "api_key": "k",
        **({"is_chat_model": True} if kind is OpenAILike else {}),
        "max_retries": 0,
        "reuse_client": False,
    }
    return kind(**{**defaults, **options})


def both(server: ScriptedServer, llm: Any, **options: Any) -> Any:
    """Return a synthesizer with the LLM in both roles."""
    return synthesizer(server, drafter=llm, verifier=llm, **options)


def test_its_log_probabilities_are_asked_for_and_read(scripted: Scripted) -> None:
    """The class is known to take OpenAI's options: drafts are scored at `reflection`."""
    server = scripted(dialogue(r2=0.9))
    answering = both(server, llm_of(server))

    responses = [
        answering.synthesize(QUESTION, nodes()),
        asyncio.run(answering.asynthesize(QUESTION, nodes())),
    ]

    for response in responses:
        told = response.metadata["specrag"]
        assert response.response == "river 2 [1]"
        assert told["tier"] == "reflection"
        assert told["trace"]["drafts"][0]["answer_logprob"] is not None
        assert told["usage"]["drafter"]["completion_tokens"] > 0
    assert len(server.chats) == 12


def test_its_own_max_tokens_holds_for_drafts_and_not_for_verifications(
    scripted: Scripted,
) -> None:
    """One token is asked for where one is enough, although the class prefers its own limit."""
    server = scripted(dialogue(r2=0.9))
    llm = llm_of(server, max_tokens=77, reuse_client=True)

    both(server, llm).synthesize(QUESTION, nodes())

    assert {b["max_tokens"] for b in server.chats if is_draft(b)} == {77}
    assert {b["max_tokens"] for b in server.chats if is_verification(b)} == {1}
    assert llm.max_tokens == 77


def test_its_fallback_is_streamed_and_read_anywhere(scripted: Scripted) -> None:
    """All ways of reading a streamed fallback give its text."""

    def respond(body: Json, call: int) -> Any:
        # Where it is heard first, it is not streamed.
        asked_plainly = body["messages"][0]["role"] == "system"
        return Reply(FALLBACK) if asked_plainly else unknown(body, call)

    server = scripted(respond)
    answering = both(server, llm_of(server), streaming=True)

    async def asked() -> Any:
        return await answering.asynthesize(QUESTION, nodes())

    async def read() -> str:
        return await text_from(await asked())

    pieces = list(answering.synthesize(QUESTION, nodes()).response_gen)
    assert len(pieces) > 2
    assert "".join(pieces) == asyncio.run(read()) == str(asyncio.run(asked())) == FALLBACK


def cut_off(body: Json, call: int) -> Reply:
    """Let every draft say that the passages do not tell, and the fallback run out of tokens."""
    return Reply(FALLBACK, finish_reason="length") if is_fallback(body) else unknown(body, call)


@pytest.mark.parametrize(
    ("kind", "options", "counted"),
    [
        (OpenAI, {"model": "gpt-4o-mini"}, True),
        (OpenAILike, {}, False),
        (OpenAILike, {"additional_kwargs": {"stream_options": {"include_usage": True}}}, True),
    ],
    ids=["openai", "like", "like, told to"],
)
def test_a_streamed_fallback_is_counted_where_that_can_be_asked_for(
    scripted: Scripted, kind: Any, options: Json, counted: bool
) -> None:
    """OpenAI takes the request for it; a server of the app's only where the app says so."""
    server = scripted(cut_off)
    llm = llm_of(server, kind, **options)

    for streaming in (True, False):
        response = both(server, llm, streaming=streaming).synthesize(QUESTION, nodes())
        text = str(response)
        told = response.metadata["specrag"]
        last = told["usage"]["steps"][-1]
        assert text == FALLBACK
        assert (last["prompt_tokens"] is not None) == (counted or not streaming)
        assert any("was cut off" in note for note in told["trace"]["notes"])
    assert [bool(body.get("stream")) for body in server.chats if is_fallback(body)] == [True, False]


def test_a_rejected_draft_is_asked_for_once(scripted: Scripted) -> None:
    """A refusal that is not about log-probabilities costs one request, which is told of."""

    def respond(body: Json, call: int) -> Any:
        if is_draft(body):
            return Fault(401, body={"error": {"message": "bad key"}})
        return dialogue()(body, call)

    server = scripted(respond)
    answering = both(server, llm_of(server))

    for _ in range(2):
        server.reset()
        response = answering.synthesize(QUESTION, nodes())
        assert [b["logprobs"] for b in server.chats if is_draft(b)] == [True] * 3
        assert response.metadata["specrag"]["usage"]["requests"] == len(server.chats) == 4


def test_a_model_that_refuses_log_probabilities_still_drafts(scripted: Scripted) -> None:
    """Reasoning models refuse them: drafts are written without, and chosen by text alone."""

    def respond(body: Json, call: int) -> Any:
        if body["messages"][-1]["content"].endswith("Reply with its letter only."):
            return "A"
        return dialogue()(body, call)

    server = scripted(respond, refuse=unsupported("logprobs", "top_logprobs"))
    answering = both(server, llm_of(server), num_drafts=2)

    response = answering.synthesize(QUESTION, nodes())
    again = answering.synthesize(QUESTION, nodes())

    for told in (response.metadata["specrag"], again.metadata["specrag"]):
        assert not any("failed" in draft for draft in told["trace"]["drafts"])
        assert told["tier"] == "choice"
    assert len([b for b in server.chats if is_draft(b) and "logprobs" in b]) <= 2
    requests = [r.metadata["specrag"]["usage"]["requests"] for r in (response, again)]
    assert sum(requests) == len(server.chats)
    assert requests[0] <= answering.rag.max_requests


def test_a_completion_model_gets_no_chat_options(scripted: Scripted) -> None:
    """`logprobs` means another thing there, so that none is sent."""
    server = scripted()

    chat = LLMChat(llm_of(server, is_chat_model=False))

    assert chat._wording is None


@pytest.mark.parametrize(("retries", "most"), [(0, 1), (1, 2), (2, 6)])
def test_its_retries_are_its_own_and_are_counted(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, retries: int, most: int
) -> None:
    """A failing draft costs what the class and its client make of it, and the warning says so."""

    def respond(body: Json, call: int) -> Any:
        if is_fallback(body):
            return Reply(FALLBACK)
        return Fault(503) if is_draft(body) else dialogue()(body, call)

    server = scripted(respond)
    with caplog.at_level(logging.WARNING, logger="specrag_integrations"):
        answering = both(server, llm_of(server, max_retries=retries), num_drafts=1)
    warned = caplog.text

    response = answering.synthesize(QUESTION, nodes(2))

    assert len([b for b in server.chats if is_draft(b)]) == most
    assert len(server.chats) <= answering.rag.max_requests
    assert (f"{answering.rag.max_requests} HTTP requests" in warned) == bool(retries)
    assert response.response == FALLBACK
