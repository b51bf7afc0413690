"""Standard RAG: the baseline and the fallback, against a scripted server."""

from __future__ import annotations

import threading
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
from specrag_integrations.models import Capabilities, ChatDelta, ChatReply, user
from specrag_integrations.standard import Shown

Scripted = Callable[..., ScriptedServer]

PASSAGES = [Passage(text=f"passage{n} " + "word " * 100, id=f"p{n}") for n in range(8)]


def sent(server: ScriptedServer) -> str:
    """Return the prompt of the only chat request."""
    (body,) = server.chats
    return "\n".join(message["content"] for message in body["messages"])


def test_one_request_holds_all_passages_in_rank_order(scripted: Scripted) -> None:
    """A prompt that fits is sent whole; the answer knows its citations and its cost."""
    server = scripted(Reply("river one [2]"))
    answer = StandardRAG(Endpoint(server.base_url)).ask("which?", PASSAGES)

    places = [sent(server).find(f"passage{n} ") for n in range(8)]
    assert places == sorted(places)
    assert -1 not in places
    assert answer.text == "river one [2]"
    assert answer.citations == (2,)
    assert answer.selection is None
    assert answer.usage.tokens("verifier").completion == 3
    assert answer.trace.first_token is not None


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("context", [400, 600, 800])
def test_passages_are_fitted_by_the_servers_tokeniser(
    scripted: Scripted, kind: str, context: int
) -> None:
    """The best-ranked passages that fit are sent, none is cut, and the trace says how many."""
    server = scripted(Reply("fine"), kind=kind, context_tokens=context)
    rag = StandardRAG(Endpoint(server.base_url), max_tokens=100)

    answer = rag.ask("which?", PASSAGES)

    # 101 words a passage and its number; the prompt's own words take some of the room as well.
    assert 1 <= len(answer.passages) <= (context - 100) // 102
    assert (context - 100) // 102 - len(answer.passages) <= 1
    assert [passage.id for passage in answer.passages] == [
        f"p{n}" for n in range(len(answer.passages))
    ]
    assert f"{len(answer.passages)} of 8 passages fit" in " ".join(answer.trace.notes)


def test_a_prompt_that_surely_fits_is_not_counted(scripted: Scripted) -> None:
    """Where there are fewer bytes than tokens of room, the tokeniser is not asked."""
    server = scripted(Reply("fine"), kind="vllm", context_tokens=8192)
    StandardRAG(Endpoint(server.base_url)).ask("which?", PASSAGES)

    assert ("POST", "/tokenize") not in server.requests


def test_a_passage_that_is_too_long_by_itself_is_passed_over(scripted: Scripted) -> None:
    """One huge passage at the top does not keep the others out, and the trace counts it."""
    server = scripted(Reply("fine"), kind="llama.cpp", context_tokens=600)
    huge = Passage(text="long " * 2000, id="huge")

    answer = StandardRAG(Endpoint(server.base_url), max_tokens=100).ask("q", [huge, *PASSAGES])

    assert [passage.id for passage in answer.passages][:2] == ["p0", "p1"]
    assert any("of 9 passages fit" in note for note in answer.trace.notes)


def test_a_context_that_holds_no_passage_is_an_error(scripted: Scripted) -> None:
    """Nothing is sent when not even the first passage fits; the error names the numbers."""
    server = scripted(Reply("fine"), kind="llama.cpp", context_tokens=150)
    rag = StandardRAG(Endpoint(server.base_url), max_tokens=100)

    with pytest.raises(NoAnswerError, match="not one passage fits .* 150 tokens") as raised:
        rag.ask("which?", PASSAGES)

    assert raised.value.reason is NoAnswerReason.FALLBACK_FAILED
    assert server.chats == []


def test_a_server_that_cannot_count_judges_the_prompt_itself(scripted: Scripted) -> None:
    """Without a tokeniser all passages are sent, and the server's own refusal is reported."""
    server = scripted(Reply("fine"), kind="openai", context_tokens=300)

    with pytest.raises(NoAnswerError, match="HTTP 400"):
        StandardRAG(Endpoint(server.base_url)).ask("which?", PASSAGES)


def test_an_apps_own_template_is_what_is_sent(scripted: Scripted) -> None:
    """With a template, not a word of ours is in the prompt."""
    server = scripted(Reply("fine"))
    rag = StandardRAG(
        Endpoint(server.base_url),
        template=lambda question, passages, _: (user(f"{question}|{len(passages)}"),),
    )

    rag.ask("which?", PASSAGES)

    assert sent(server) == "which?|8"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("<think>let me see [9]</think>\n\nthe Rhine [2]", "the Rhine [2]"),
        ("the Rhine [2] and [77] the Elbe [1, 44]", "the Rhine [2] and the Elbe [1]"),
        ("  in 1998 [1998] \n", "in 1998 [1998]"),
        ("a < b and [x] too", "a < b and [x] too"),
        ("<unfinished", "<unfinished"),
    ],
)
def test_the_pieces_of_a_stream_are_the_text(scripted: Scripted, written: str, read: str) -> None:
    """Thinking and dead citations are never shown, not even in passing."""
    events = list(StandardRAG(Endpoint(scripted(Reply(written)).base_url)).stream("q", PASSAGES))

    assert events[-1].answer.text == read  # type: ignore[union-attr]
    assert "".join(event.text for event in events if event.type == "delta") == read


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize(
    "written",
    [
        "Ada [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] built it",
        "Ada 【9】 built it, says [Passage 2]. And [99]more",
        "```python\nprint([1])\n```\nand ***\n---\nso on [8",
        "◁think▷hm [9]◁/think▷ Ada <b>bold</b> a < b",
        "Ada<|im_end|>\n<|im_start|>user more",
        "<think>one</think> Ada   \n\n [55]  Lund  ",
    ],
)
def test_the_pieces_are_the_text_wherever_they_are_cut(written: str, size: int) -> None:
    """However a server cuts its stream, the pieces shown together are the final text."""
    shown = Shown(8)
    pieces = [written[start : start + size] for start in range(0, len(written), size)]

    told = [shown.add(piece, ended=False) for piece in pieces]
    told.append(shown.add("", ended=True))

    assert "".join(told) == shown.text
    assert "think" not in shown.text
    assert "99" not in shown.text


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (None, "the server did not say why it stopped"),
        ("content_filter", "it ended with 'content_filter'"),
    ],
)
def test_an_answer_that_ended_otherwise_is_noted(
    scripted: Scripted, ended: str | None, told: str
) -> None:
    """A stream that ended without a reason, or for another one, may be cut off."""
    server = scripted(Reply("the river", finish_reason=ended))
    answer = StandardRAG(Endpoint(server.base_url)).ask("q", PASSAGES)

    assert f"the answer may be cut off: {told}" in answer.trace.notes


class WholeReply:
    """A chat model that cannot stream: its one delta brings the whole reply. Not hashable."""

    name, max_attempts = "whole", 1
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    async def chat(self, request: Any, *, step: Any) -> ChatReply:
        return ChatReply(text="Ada Lund [1]", finish_reason="stop")

    async def stream(self, request: Any, *, step: Any) -> Any:
        yield ChatDelta(reply=await self.chat(request, step=step))

    async def capabilities(self) -> Capabilities:
        return Capabilities()


def test_a_model_that_cannot_stream_answers_all_the_same() -> None:
    """The protocol lets the last delta carry everything."""
    events = list(StandardRAG(WholeReply()).stream("q", PASSAGES))  # type: ignore[arg-type]

    assert events[-1].answer.text == "Ada Lund [1]"  # type: ignore[union-attr]
    assert [event.text for event in events if event.type == "delta"] == ["Ada Lund [1]"]


def test_a_lazy_retriever_runs_on_its_callers_thread(scripted: Scripted) -> None:
    """Passages from a generator are read where `ask` was called, and may even ask themselves."""
    rag = StandardRAG(Endpoint(scripted(Reply("fine")).base_url))
    threads = []

    def retrieve() -> Any:
        threads.append(threading.current_thread())
        yield rag.ask("first", ["a passage"]).text

    assert rag.ask("q", retrieve()).text == "fine"
    assert threads == [threading.current_thread()]


def test_notes_are_logged_once(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """What is in the trace's notes is in the log, without the passage's text."""
    with caplog.at_level("INFO", logger="specrag_integrations"):
        StandardRAG(Endpoint(scripted(Reply("fine")).base_url)).ask("q", ["same", "same"])

    assert caplog.text.count("repeats an earlier one") == 1


def test_an_abstention_is_recognised(scripted: Scripted) -> None:
    """A model that says the passages do not tell is not taken for an answer."""
    answer = StandardRAG(Endpoint(scripted(Reply("Unknown.")).base_url)).ask("q", PASSAGES)

    assert answer.abstained


@pytest.mark.parametrize("written", ["", "   ", "<think>only thoughts"])
def test_an_empty_answer_is_an_error(scripted: Scripted, written: str) -> None:
    """A model that wrote nothing readable has not answered."""
    with pytest.raises(NoAnswerError, match="wrote no text"):
        StandardRAG(Endpoint(scripted(Reply(written)).base_url)).ask("q", PASSAGES)


def test_a_cut_off_answer_is_noted(scripted: Scripted) -> None:
    """An answer that reached the token limit is returned, and the trace says so."""
    server = scripted(Reply("the river", finish_reason="length"))
    answer = StandardRAG(Endpoint(server.base_url)).ask("q", PASSAGES)

    assert any("cut off" in note for note in answer.trace.notes)


def test_the_deadline_ends_a_stream_that_stalls(scripted: Scripted) -> None:
    """A server that falls silent in the middle does not hold the question."""
    server = scripted(Fault(reply="a long answer in words", stream_break_after=2, hang=True))
    rag = StandardRAG(Endpoint(server.base_url), deadline=0.4)

    with pytest.raises(NoAnswerError) as raised:
        rag.ask("q", PASSAGES)

    assert raised.value.reason is NoAnswerReason.DEADLINE
    assert server.wait_idle(2)


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"deadline": -1}])
def test_wrong_options_are_refused(server: ScriptedServer, options: dict[str, Any]) -> None:
    """The error comes at construction."""
    with pytest.raises(ConfigurationError):
        StandardRAG(Endpoint(server.base_url), **options)


@pytest.mark.parametrize("model", [None, "http://127.0.0.1:9", Endpoint])
def test_what_is_no_model_is_refused(model: Any) -> None:
    """An address alone is not one; the remedy is named."""
    with pytest.raises(ConfigurationError, match=r"model must be .* write Endpoint\(base_url"):
        StandardRAG(model)


def test_no_history_may_be_none(server: ScriptedServer) -> None:
    """As with the other options that may be left out."""
    with StandardRAG(Endpoint(server.base_url)) as rag:
        rag.ask("Question?", ["A passage."], history=None)
        rag.ask("Question?", ["A passage."])
    first, second = server.chats
    assert first["messages"] == second["messages"]


def test_an_apps_own_prompt_is_checked_and_takes_no_instructions(server):
    """What can never work is refused at construction, by name."""
    endpoint = Endpoint(server.base_url)
    with pytest.raises(ConfigurationError, match="template must be an object with"):
        StandardRAG(endpoint, template="x")
    with pytest.raises(ConfigurationError, match="template must return a list of Message"):
        StandardRAG(endpoint, template=lambda *_: "x")
    with pytest.raises(ConfigurationError, match="instructions= does nothing"):
        StandardRAG(endpoint, template=lambda *_: [user("x")], instructions="Be brief.")
    rag = StandardRAG(endpoint, template=lambda *_: [user("Mine?")])
    rag.ask("Question?", ["A passage."])
    rag.close()
    assert [body["messages"] for body in server.chats] == [[{"role": "user", "content": "Mine?"}]]
