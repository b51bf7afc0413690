"""LlamaIndex and LangChain as baselines: the real frameworks against a scripted server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer

from specrag_integrations import (
    ConfigurationError,
    Endpoint,
    NoAnswerError,
    NoAnswerReason,
    Passage,
    StandardRAG,
)
from specrag_integrations.errors import MissingDependencyError
from specrag_integrations.evaluation.baselines import LangChainStuff, LlamaIndexCompact
from specrag_integrations.evaluation.cache import CachedModel, ReplyCache
from specrag_integrations.models import Capabilities, ChatDelta, ChatReply

Scripted = Callable[..., ScriptedServer]
Kind = type[LlamaIndexCompact] | type[LangChainStuff]

PASSAGES = [
    Passage(title="Harbour {query_str}", text="  A bridge {x} of 1934,\n\n\n  well {context}.\t"),
    Passage(text="No title here: 100 %  {{kept}} \\n."),
    Passage(title="Ferry", text="It sails on Sundays."),
]
QUESTION = "Who built {context_str} the bridge?"
LONG = [Passage(text=f"passage{n} " + "word " * 150, id=f"p{n}") for n in range(12)]


@pytest.fixture(params=["LlamaIndex", "LangChain"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Return either engine's class; the test is skipped where its framework is not installed."""
    if request.param == "LlamaIndex":
        pytest.importorskip("llama_index.core", reason="needs the extra baselines")
        return LlamaIndexCompact
    pytest.importorskip("langchain_classic", reason="needs langchain-classic")
    return LangChainStuff


@pytest.fixture
def compact() -> type[LlamaIndexCompact]:
    """Return LlamaIndex's engine, where it is installed."""
    pytest.importorskip("llama_index.core", reason="needs the extra baselines")
    return LlamaIndexCompact


def asked(server: ScriptedServer) -> str:
    """Return the words of the last request, its instructions included."""
    return "\n".join(message["content"] for message in server.chats[-1]["messages"])


@pytest.mark.parametrize(
    "history",
    [
        [],
        [
            {"role": "system", "content": "Be {kind}."},
            {"role": "user", "content": "Is there a {bridge}, {query_str}, {question}?"},
            {"role": "assistant", "content": "Yes {sir}."},
        ],
    ],
)
@pytest.mark.parametrize(
    "instructions", [None, "The answer is one of: {true}, {query_str}, {question}, {{false}}."]
)
def test_with_our_prompt_the_request_is_that_of_standard_rag(
    scripted: Scripted, kind: Kind, history: list[dict[str, str]], instructions: str | None
) -> None:
    """Both frameworks' templates carry our few-shot chat, to the last byte of the request."""
    server = scripted(Reply("Ada Lund [1]"))
    endpoint = Endpoint(server.base_url)
    asked = {"question": QUESTION, "passages": PASSAGES, "history": history}

    StandardRAG(endpoint, instructions=instructions).ask(**asked)
    kind(endpoint, prompt="ours", instructions=instructions).ask(**asked)

    ours, theirs = server.chats
    assert theirs == ours
    assert len(ours["messages"]) == 3 + len(history)


def test_the_answer_is_that_of_standard_rag(scripted: Scripted, kind: Kind) -> None:
    """Text, citations, tokens and notes are read alike, and the first token is timed."""
    reply = Reply("<think>hm [9]</think>\n\nAda Lund [1], not [7].", finish_reason="length")
    server = scripted(reply)
    expected = StandardRAG(Endpoint(server.base_url)).ask(QUESTION, PASSAGES)

    answer = kind(Endpoint(server.base_url)).ask(QUESTION, PASSAGES)

    assert answer.text == expected.text == "Ada Lund [1], not."
    assert answer.citations == (1,)
    assert answer.passages == expected.passages
    assert answer.usage.tokens("verifier") == expected.usage.tokens("verifier")
    assert answer.usage.requests == 1
    assert answer.trace.first_token is not None
    assert 0 < answer.trace.first_token <= answer.trace.seconds
    assert any("cut off at 256 tokens" in note for note in answer.trace.notes)


def test_the_first_token_is_the_first_that_can_be_read(scripted: Scripted, kind: Kind) -> None:
    """A stream is timed while it runs, and thinking is not yet an answer."""
    server = scripted(Reply("<think>a b c</think> one two three four", chunk_delay=0.05))
    answer = kind(Endpoint(server.base_url)).ask(QUESTION, PASSAGES)

    first = answer.trace.first_token
    assert first is not None
    assert 0.12 < first < answer.trace.seconds - 0.08


def test_the_pieces_of_a_stream_are_the_text(scripted: Scripted, kind: Kind) -> None:
    """Events come as standard RAG's do: passages, pieces, the answer."""
    server = scripted(Reply("<think>x</think>Ada [1] and [9] Lund"))
    events = list(kind(Endpoint(server.base_url)).stream(QUESTION, PASSAGES))

    assert events[0].type == "passages"
    assert events[-1].answer.text == "Ada [1] and Lund"  # type: ignore[union-attr]
    pieces = [event.text for event in events if event.type == "delta"]
    assert "".join(pieces) == "Ada [1] and Lund"
    assert len(pieces) > 1


def test_the_default_prompt_is_the_frameworks_own(scripted: Scripted, kind: Kind) -> None:
    """Not a word of our prompt is sent; question, titles and texts are."""
    server = scripted(Reply("fine"))
    kind(Endpoint(server.base_url), prompt="default").ask(QUESTION, PASSAGES)

    words = asked(server)
    assert "in a few words" not in words
    assert "Ada Lund" not in words
    assert QUESTION in words
    for passage in PASSAGES:
        assert (passage.title or "") in words
        assert passage.text.strip() in words
    assert [message["role"] for message in server.chats[0]["messages"]] == ["system", "user"]
    assert "context" in words.lower()


def test_the_default_prompt_tells_that_it_leaves_earlier_turns_out(
    scripted: Scripted, kind: Kind
) -> None:
    """History has no place in the frameworks' prompts, and is not lost without a note."""
    server = scripted(Reply("fine"))
    history = [{"role": "user", "content": "earlier words"}]
    answer = kind(Endpoint(server.base_url), prompt="default").ask("q", PASSAGES, history=history)

    assert "earlier words" not in asked(server)
    assert any("no place for earlier turns" in note for note in answer.trace.notes)


def test_replies_come_from_the_cache_of_standard_rag(
    scripted: Scripted, kind: Kind, tmp_path: Any
) -> None:
    """The same request to the same model is replayed in a later run, whoever asks."""
    server = scripted(Reply("Ada Lund [1]"))
    first, cached = (
        CachedModel(Endpoint(server.base_url), cache=ReplyCache(tmp_path / "replies"), identity="m")
        for _ in range(2)
    )
    StandardRAG(first).ask(QUESTION, PASSAGES)
    answer = kind(cached).ask(QUESTION, PASSAGES)

    assert answer.text == "Ada Lund [1]"
    assert cached.replayed == 1
    assert len(server.chats) == 1


def test_a_failing_endpoint_is_no_answer(scripted: Scripted, kind: Kind) -> None:
    """The endpoint's failure comes through the framework as standard RAG reports it."""
    server = scripted(Fault(503))

    with pytest.raises(NoAnswerError, match="HTTP 503") as raised:
        kind(Endpoint(server.base_url, max_attempts=2)).ask(QUESTION, PASSAGES)

    assert raised.value.reason is NoAnswerReason.FALLBACK_FAILED
    assert len(raised.value.failures) == 1
    assert len(server.chats) == 2  # the framework does not try again on its own


@pytest.mark.parametrize("broken", [{"stream_break_after": 2}, {"raw": b"{}"}])
def test_a_broken_stream_is_no_answer(
    scripted: Scripted, kind: Kind, broken: dict[str, Any]
) -> None:
    """What a framework has already shown of a broken reply is not taken for an answer."""
    server = scripted(Fault(status=200, reply="a long answer in words", **broken))

    with pytest.raises(NoAnswerError) as raised:
        kind(Endpoint(server.base_url, max_attempts=1)).ask(QUESTION, PASSAGES)

    assert raised.value.reason is NoAnswerReason.FALLBACK_FAILED


@pytest.mark.parametrize("written", ["", "   ", "<think>only thoughts", "[9]"])
def test_an_empty_answer_is_an_error(scripted: Scripted, kind: Kind, written: str) -> None:
    """No framework's words for an empty reply stand in for an answer."""
    with pytest.raises(NoAnswerError, match="wrote no text"):
        kind(Endpoint(scripted(Reply(written)).base_url)).ask(QUESTION, PASSAGES)


def test_the_deadline_ends_a_stream_that_stalls(scripted: Scripted, kind: Kind) -> None:
    """A server that falls silent in the middle does not hold the question."""
    server = scripted(Fault(reply="a long answer in words", stream_break_after=2, hang=True))

    with pytest.raises(NoAnswerError) as raised:
        kind(Endpoint(server.base_url), deadline=0.6).ask(QUESTION, PASSAGES)

    assert raised.value.reason is NoAnswerReason.DEADLINE
    assert server.wait_idle(2)


class WholeReply:
    """A chat model that cannot stream and tells nothing of itself."""

    name, max_attempts = "whole", 1

    async def stream(self, request: Any, *, step: Any) -> Any:
        yield ChatDelta(reply=ChatReply(text="Ada Lund [1]", finish_reason="stop"))

    async def capabilities(self) -> Capabilities | None:
        return None


def test_a_model_that_cannot_stream_answers_all_the_same(kind: Kind) -> None:
    """The last delta may carry everything."""
    answer = kind(WholeReply()).ask(QUESTION, PASSAGES)  # type: ignore[arg-type]

    assert answer.text == "Ada Lund [1]"


class Mute(WholeReply):
    """A chat model whose stream ends without a reply."""

    async def stream(self, request: Any, *, step: Any) -> Any:
        yield ChatDelta(text="Ada")


def test_a_stream_without_a_reply_is_no_answer(kind: Kind) -> None:
    """A model that breaks its own protocol has not answered."""
    with pytest.raises(NoAnswerError, match="ended without a reply"):
        kind(Mute()).ask(QUESTION, PASSAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["ours", "default"])
def test_what_does_not_fit_is_refined_by_llama_index(
    scripted: Scripted, compact: type[LlamaIndexCompact], prompt: Any
) -> None:
    """Passages beyond the context go into further requests; every one of them is counted."""
    server = scripted(
        lambda _, call: Reply("draft" if call == 0 else f"answer {call} [2]"),
        kind="vllm",
        context_tokens=1700,
    )
    engine = compact(Endpoint(server.base_url), prompt=prompt, max_tokens=100)
    answer = engine.ask("which?", LONG)

    calls = len(server.chats)
    assert calls >= 2
    assert answer.text == f"answer {calls - 1} [2]"
    assert "draft" in "\n".join(m["content"] for m in server.chats[1]["messages"])
    sent = "\n".join(m["content"] for body in server.chats for m in body["messages"])
    assert all(f"passage{n} " in sent for n in range(12))
    assert answer.usage.requests == calls
    assert len(answer.usage.steps) == calls
    assert [step.index for step in answer.usage.steps] == list(range(calls))
    assert answer.usage.tokens("verifier").completion == 1 + 3 * (calls - 1)
    assert answer.trace.first_token is not None
    assert answer.trace.first_token >= answer.usage.steps[-2].arrived
    assert any(f"asked {calls} times" in note for note in answer.trace.notes)


def test_a_failure_of_a_later_request_is_no_answer(
    scripted: Scripted, compact: type[LlamaIndexCompact]
) -> None:
    """The first answer is not handed out where its refinement failed."""
    server = scripted(
        lambda _, call: "draft" if call == 0 else Fault(400), kind="vllm", context_tokens=1700
    )

    with pytest.raises(NoAnswerError, match="HTTP 400") as raised:
        compact(Endpoint(server.base_url), max_tokens=100).ask("which?", LONG)

    assert raised.value.reason is NoAnswerReason.FALLBACK_FAILED


@pytest.mark.parametrize("context", [150, 400])
def test_a_context_that_llama_index_cannot_fill_is_no_answer(
    scripted: Scripted, compact: type[LlamaIndexCompact], context: int
) -> None:
    """LlamaIndex's own refusal is reported as a context that is too small; nothing is sent."""
    server = scripted(Reply("fine"), kind="vllm", context_tokens=context)

    with pytest.raises(NoAnswerError, match=f"no room for the passages in .* {context} tokens"):
        compact(Endpoint(server.base_url), max_tokens=100).ask("which?", LONG)

    assert server.chats == []


def test_what_does_not_fit_is_refused_by_the_server_for_langchain(scripted: Scripted) -> None:
    """The stuffing chain sends everything, and the server's refusal is reported."""
    pytest.importorskip("langchain_classic", reason="needs langchain-classic")
    server = scripted(Reply("fine"), kind="vllm", context_tokens=1000)

    with pytest.raises(NoAnswerError, match="HTTP 400") as raised:
        LangChainStuff(Endpoint(server.base_url), max_tokens=100).ask("which?", LONG)

    assert raised.value.reason is NoAnswerReason.FALLBACK_FAILED


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"deadline": -1}, {"prompt": "theirs"}])
def test_wrong_options_are_refused(kind: Kind, options: dict[str, Any]) -> None:
    """The error comes at construction."""
    with pytest.raises(ConfigurationError):
        kind(WholeReply(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "module", "extra"),
    [
        (LlamaIndexCompact, "llama_index.core.utils", "baselines"),
        (LangChainStuff, "langchain_classic.chains.combine_documents", "baselines"),
    ],
)
def test_a_missing_framework_is_named(
    monkeypatch: pytest.MonkeyPatch, engine: Kind, module: str, extra: str
) -> None:
    """The error comes at construction and says what to install."""
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(MissingDependencyError, match=rf"specrag-integrations\[{extra}\]"):
        engine(WholeReply())  # type: ignore[arg-type]


def test_the_module_imports_no_framework() -> None:
    """Whoever does not ask for these baselines needs neither framework, and waits for none."""
    code = (
        "import sys, specrag_integrations.evaluation.baselines as b; "
        "print([m for m in sys.modules if m.startswith(('llama_index', 'langchain'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"
