"""Refinement: the verifier mends the winning draft against the draft's own passages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from scripted_model import ScriptedModel
from scripted_server import Fault, Reply, ScriptedServer, is_verification

from specrag_integrations import (
    Answer,
    ConfigurationError,
    Endpoint,
    Passage,
    RankStratified,
    Scoring,
    SpeculativeRAG,
)
from specrag_integrations.answers import Refinement
from specrag_integrations.events import AnswerEvent, DeltaEvent, Event, SelectedEvent

Scripted = Callable[..., ScriptedServer]
Body = dict[str, Any]

QUESTION = "Which city is the seat?"
CITIES = ("Paris", "Rome", "Oslo")
PASSAGES = [Passage(text=f"{city} is a seat.", title=f"On {city}", id=city) for city in CITIES]
TASK = (
    "A draft answers the question from these passages. Check it against them and write the answer "
    "in a few words, corrected where it is wrong, and cite the passage. "
    "If the passages do not tell, the answer is unknown."
)


def is_refinement(body: Body) -> bool:
    """Tell a refinement by its prompt; a fallback is streamed as well."""
    return bool(body["messages"][-1]["content"].startswith("A draft answers"))


def city_in(text: str) -> str:
    """Return the first city that a text names."""
    return min((city for city in CITIES if city in text), key=text.index)


def answering(refined: Any, **p_yes: float) -> Callable[[Body, int], Any]:
    """Draft the city of a passage, judge it by `p_yes`, and refine as told."""

    def respond(body: Body, _: int) -> Any:
        last = body["messages"][-1]["content"]
        if is_refinement(body):
            return refined(body) if callable(refined) else refined
        if body.get("stream"):
            return "standard answer"
        if is_verification(body):
            p = p_yes.get(city_in(body["messages"][1]["content"]), 0.1)
            return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)})
        return f"Rationale: [1] says so.\nAnswer: {city_in(last.partition('[1]')[2])}"

    return respond


def rag(server: ScriptedServer, **options: Any) -> SpeculativeRAG:
    """Return an engine that drafts from each of three passages."""
    endpoint = Endpoint(server.base_url, "scripted", max_attempts=options.pop("attempts", 1))
    return SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=3,
        passages_per_draft=1,
        partitioner=RankStratified(),
        **{"refine": "always", **options},
    )


def streamed(server: ScriptedServer, **options: Any) -> tuple[Answer, list[Event]]:
    """Ask once; return the answer and all events."""
    deadline = options.pop("ask_within", None)
    with rag(server, **options) as engine:
        events = list(engine.stream(QUESTION, PASSAGES, deadline=deadline))
    last = events[-1]
    assert isinstance(last, AnswerEvent)
    return last.answer, events


def deltas(events: list[Event]) -> list[DeltaEvent]:
    """Return the pieces of the answer."""
    return [event for event in events if isinstance(event, DeltaEvent)]


def read(events: list[Event]) -> str:
    """Return what a reader has in the end: a restart empties the page."""
    text = ""
    for delta in deltas(events):
        text = delta.text if delta.restart else text + delta.text
    return text


def refinements(server: ScriptedServer) -> list[Body]:
    """Return the refining requests."""
    return [body for body in server.chats if is_refinement(body)]


# ---------------------------------------------------------------- what is asked


def test_the_verifier_reads_the_winner_and_its_passages_alone(scripted: Scripted) -> None:
    """In one streamed request, which may write as much as a draft."""
    server = scripted(answering("Rome, Italy [1]", Rome=0.9))
    rag(server, max_answer_tokens=99).ask(QUESTION, PASSAGES)
    (body,) = refinements(server)

    assert body == {
        "model": "scripted",
        "messages": [
            {
                "role": "user",
                "content": f"{TASK}\n\n[1] On Rome\nRome is a seat.\n\n"
                f"Question: {QUESTION}\n\nRationale: [1] says so.\nAnswer: Rome",
            }
        ],
        "max_tokens": 99,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_history_and_the_apps_own_words_are_part_of_the_prompt(scripted: Scripted) -> None:
    """As they are in all prompts that read passages."""
    server = scripted(answering("Rome", Rome=0.9))
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
    ]
    rag(server, instructions="Answer in Latin.").ask(QUESTION, PASSAGES, history=history)
    (body,) = refinements(server)

    assert body["messages"][:-1] == history
    assert body["messages"][-1]["content"].startswith(f"{TASK}\n\nAnswer in Latin.\n\n[1] On Rome")


# ---------------------------------------------------------------- when


def test_never_is_the_default(scripted: Scripted) -> None:
    """The draft is the answer, word for word, without another request."""
    server = scripted(answering("mended", Rome=0.9))
    answer, events = streamed(server, refine="never")

    assert (answer.text, refinements(server)) == ("Rome", [])
    assert [delta.text for delta in deltas(events)] == ["Rome"]
    assert answer.trace.refinement is None
    assert "refine" not in answer.trace.stages


@pytest.mark.parametrize(
    ("p_yes", "asked"),
    [
        ({"Rome": 0.9, "Paris": 0.89}, 1),
        ({"Rome": 0.9, "Paris": 0.9 * math.exp(-0.09)}, 1),
        ({"Rome": 0.9, "Paris": 0.9 * math.exp(-0.11)}, 0),
        ({"Rome": 0.9}, 0),
    ],
)
def test_when_unsure_asks_only_where_a_rival_answer_is_close(
    scripted: Scripted, p_yes: Any, asked: int
) -> None:
    """Within 0.1 nats."""
    server = scripted(answering("mended", **p_yes))
    answer, _ = streamed(server, refine="when_unsure")

    assert len(refinements(server)) == asked
    assert answer.text == ("mended" if asked else "Rome")


def test_where_all_drafts_agree_there_is_no_rival(scripted: Scripted) -> None:
    """Equal scores of equal answers are no doubt."""

    def respond(body: Body, call: int) -> Any:
        reply = answering("mended", Rome=0.9)(body, call)
        return "Rationale: [1] says so.\nAnswer: Rome" if isinstance(reply, str) else reply

    server = scripted(respond)
    answer, _ = streamed(server, refine="when_unsure")

    assert (answer.text, refinements(server)) == ("Rome", [])


def test_a_fallback_is_not_refined(scripted: Scripted) -> None:
    """There is no winner, and its prompt has the passages already."""
    server = scripted(answering("mended"))
    server.respond = lambda body, _: "standard answer" if body.get("stream") else "Rationale: cut"
    answer, _ = streamed(server)

    assert (answer.text, refinements(server)) == ("standard answer", [])


@pytest.mark.parametrize("refine", ["sometimes", True, None])
def test_an_unknown_value_names_the_known_ones(refine: Any) -> None:
    """At construction."""
    model = ScriptedModel([])
    with pytest.raises(ConfigurationError, match="must be one of never, always, when_unsure"):
        SpeculativeRAG(drafter=model, verifier=model, refine=refine)


# ---------------------------------------------------------------- what comes of it


def test_the_pieces_are_streamed_and_together_they_are_the_answer(scripted: Scripted) -> None:
    """As they are written, behind the event that names the draft and its passages."""
    mended = Reply("Rome, the seat since 1871 [1].", chunk_delay=0.02)
    server = scripted(answering(mended, Rome=0.9))
    answer, events = streamed(server)
    types = [event.type for event in events]
    (chosen,) = [event for event in events if isinstance(event, SelectedEvent)]

    assert answer.text == "Rome, the seat since 1871 [1]." == read(events)
    assert len(deltas(events)) > 3
    assert not any(delta.restart for delta in deltas(events))
    assert types.index("selected") < types.index("delta")
    assert [passage.id for passage in chosen.passages] == ["Rome"]
    assert answer.trace.first_token is not None
    assert answer.trace.first_token < answer.trace.seconds - 0.02


def test_the_trace_keeps_both_texts(scripted: Scripted) -> None:
    """The answer has the new one, the passages and the rationale are the draft's."""
    answer, _ = streamed(scripted(answering("Rome, Italy [1]", Rome=0.9)))

    assert answer.trace.refinement is not None
    assert answer.trace.refinement.to_dict() == {"before": "Rome", "after": "Rome, Italy [1]"}
    assert answer.trace.to_dict()["refinement"] == answer.trace.refinement.to_dict()
    assert "Italy" not in repr(answer.trace)
    assert (answer.rationale, answer.citations) == ("[1] says so.", (1,))
    assert [passage.id for passage in answer.passages] == ["Rome"]
    assert {rival.answer for rival in answer.dissent} == {"Paris", "Oslo"}


def test_a_text_that_needed_no_mending_was_looked_at_all_the_same(scripted: Scripted) -> None:
    """The trace tells that it was, by two equal texts."""
    answer, _ = streamed(scripted(answering("Rome", Rome=0.9)))

    assert answer.text == "Rome"
    assert answer.trace.refinement == Refinement(before="Rome", after="Rome")
    assert [step.kind for step in answer.usage.steps].count("refine") == 1


def test_a_verifier_may_find_that_the_passages_do_not_tell(scripted: Scripted) -> None:
    """Then the answer abstains."""
    answer, _ = streamed(scripted(answering("Unknown.", Rome=0.9)))

    assert (answer.text, answer.abstained) == ("Unknown.", True)


@pytest.mark.parametrize(
    "written", ["Rome [7]", "<think>Paris?</think>\nRome", "<think>\n\n</think>\n\nRome [2, 3]"]
)
def test_a_reader_sees_no_thoughts_and_no_dead_citations(scripted: Scripted, written: str) -> None:
    """Neither in the pieces nor in the text."""
    answer, events = streamed(scripted(answering(written, Rome=0.9)))

    assert answer.text == "Rome" == read(events)


def test_a_refinement_that_was_cut_off_says_so(scripted: Scripted) -> None:
    """In the notes."""
    cut = Reply("Rome, the", finish_reason="length")
    answer, _ = streamed(scripted(answering(cut, Rome=0.9)), max_answer_tokens=7)

    assert "the answer was cut off at 7 tokens" in answer.trace.notes


def test_a_draft_whose_passages_do_not_all_fit_is_not_refined(scripted: Scripted) -> None:
    """The verifier may have a smaller context than the drafter; [1] must not become another."""
    drafts = scripted("Rationale: [2] says so.\nAnswer: Rome")
    server = scripted(answering("Paris [1]", Rome=0.9), kind="vllm", context_tokens=600)
    engine = SpeculativeRAG(
        drafter=Endpoint(drafts.base_url, "scripted"),
        verifier=Endpoint(server.base_url, "scripted"),
        num_drafts=1,
        passages_per_draft=2,
        refine="always",
    )
    answer = engine.ask(QUESTION, ["So it goes on. " * 300, "Rome is a seat."])

    assert (answer.text, refinements(server)) == ("Rome", [])
    assert any("not refined" in note and "fits into" in note for note in answer.trace.notes)


# ---------------------------------------------------------------- where it fails

PIECES = Reply("Paris, or maybe not Paris")


@pytest.mark.parametrize("fault", [Fault(503), Fault(400), Fault(close=True), Reply("")])
def test_a_refinement_that_fails_at_once_leaves_the_draft(scripted: Scripted, fault: Any) -> None:
    """With a note; nothing was shown, so nothing begins anew."""
    answer, events = streamed(scripted(answering(fault, Rome=0.9)))

    assert answer.text == "Rome" == read(events)
    assert [(delta.text, delta.restart) for delta in deltas(events)] == [("Rome", False)]
    assert answer.trace.refinement is None
    (note,) = [note for note in answer.trace.notes if "not refined, so the draft stands" in note]
    assert len(note) > len("not refined, so the draft stands: ")
    assert answer.fallback_reason is None


@pytest.mark.parametrize(
    "fault",
    [
        Fault(stream_break_after=4, reply=PIECES),
        Fault(stream_break_after=4, reply=PIECES, body={"error": {"message": "engine died"}}),
    ],
)
def test_a_refinement_that_breaks_off_begins_the_text_anew(
    scripted: Scripted, fault: Fault
) -> None:
    """What was shown of it is taken back: the draft stands."""
    answer, events = streamed(scripted(answering(fault, Rome=0.9)))
    *shown, last = deltas(events)

    assert "".join(delta.text for delta in shown).startswith("Paris")
    assert not any(delta.restart for delta in shown)
    assert (last.text, last.restart) == ("Rome", True)
    assert last.to_dict() == {"type": "delta", "text": "Rome", "restart": True}
    assert answer.text == "Rome" == read(events)
    assert answer.trace.refinement is None
    assert any("not refined, so the draft stands" in note for note in answer.trace.notes)


def test_at_the_deadline_the_draft_stands(scripted: Scripted) -> None:
    """There is an answer in hand."""
    slow = Reply("Rome, " * 50, chunk_delay=0.1)
    started = time.perf_counter()
    answer, events = streamed(scripted(answering(slow, Rome=0.9)), ask_within=1.5)

    assert time.perf_counter() - started < 3.0
    assert answer.text == "Rome" == read(events)
    assert deltas(events)[-1].restart
    assert any("not refined, so the draft stands: no answer" in n for n in answer.trace.notes)


def test_a_deadline_that_cut_a_refinement_is_in_the_trace(scripted: Scripted) -> None:
    """As one that cut drafts is."""
    slow = Reply("Rome, " * 50, chunk_delay=0.1)
    answer, _ = streamed(scripted(answering(slow, Rome=0.9)), ask_within=1.5)

    assert answer.trace.deadline_hit


def test_after_the_deadline_nothing_is_refined(scripted: Scripted) -> None:
    """The best draft scored by then is the answer."""

    def respond(body: Body, call: int) -> Any:
        reply = answering("mended", Rome=0.9)(body, call)
        slow = isinstance(reply, str) and reply.endswith("Oslo")
        return Reply(reply, delay=20.0) if slow else reply

    server = scripted(respond)
    answer, _ = streamed(server, ask_within=1.5)

    assert (answer.text, answer.trace.deadline_hit) == ("Rome", True)
    assert refinements(server) == []
    assert "refine" not in answer.trace.stages


# ---------------------------------------------------------------- what it costs


def test_a_refinement_is_a_step_of_its_own(scripted: Scripted) -> None:
    """With its tokens, and the time it ended."""
    server = scripted(answering("Rome, Italy", Rome=0.9))
    answer, _ = streamed(server)
    (step,) = [step for step in answer.usage.steps if step.kind == "refine"]
    (body,) = refinements(server)

    assert (step.index, step.role, step.model, step.attempts) == (0, "verifier", "scripted", 1)
    assert (step.count.prompt, step.count.completion) == (len(server.prompt(body)), 2)
    assert step.arrived > max(s.arrived for s in answer.usage.steps if s.kind == "verify")
    assert answer.usage.requests == len(server.chats) == 3 + 3 + 1
    assert answer.trace.stages["refine"] >= answer.trace.stages["verify"]


def test_a_refinement_that_failed_was_paid_for_too(scripted: Scripted) -> None:
    """All HTTP requests are counted, retries included."""
    server = scripted(answering(Fault(503), Rome=0.9))
    answer, _ = streamed(server, attempts=2)

    assert len(refinements(server)) == 2
    assert answer.usage.requests == len(server.chats)


@pytest.mark.parametrize(("refine", "more"), [("never", 0), ("always", 2), ("when_unsure", 2)])
def test_the_most_requests_of_a_question_count_the_refinement(
    scripted: Scripted, refine: Any, more: int
) -> None:
    """And its second attempt."""
    server = scripted()
    options = {"scoring": Scoring(tier="reflection"), "attempts": 2}
    engine = rag(server, refine=refine, **options)

    assert engine.max_requests == 2 * 3 + 2 * 3 + 2 + more
