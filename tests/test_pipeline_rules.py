"""Rules that hold on the way of every question, each against a server that speaks real HTTP."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_server import Fault, Reply, ScriptedServer, is_verification

from specrag_integrations import (
    Disjoint,
    Endpoint,
    MultiPerspective,
    Passage,
    SpeculativeRAG,
)

PASSAGES = [Passage(text=f"Fact {n} tells of river {n}.", id=f"p{n}") for n in range(4)]
QUESTION = "Which river?"

Scripted = Callable[..., ScriptedServer]
Body = dict[str, Any]


def river(body: Body) -> int:
    """Return the number of the first river that a request mentions."""
    text = "\n".join(message["content"] for message in body["messages"])
    return int(re.search(r"river (\d)", text)[1])


def verdict(p: float, text: str = "Yes") -> Reply:
    """Return a verdict with P(Yes) = p, whatever its text says."""
    return Reply(text, alternatives={"Yes": math.log(p), "No": math.log(1 - p), "Maybe": -9.0})


def drafting(draft: Callable[[int], Any], verify: Callable[[int], Any]) -> Callable[..., Any]:
    """Answer drafts and verifications by the number of their river, a fallback with `fell back`."""

    def respond(body: Body, _: int) -> Any:
        if body.get("stream"):
            return "fell back"
        return verify(river(body)) if is_verification(body) else draft(river(body))

    return respond


def draft_of(n: int, **options: Any) -> Reply:
    """Return a draft that answers with its river."""
    return Reply(f"Rationale: [1] says so.\nAnswer: river {n}", **options)


def rag(server: ScriptedServer, **options: Any) -> SpeculativeRAG:
    """Return an engine that drafts once from each of four passages."""
    endpoint = Endpoint(server.base_url, "scripted", max_attempts=1)
    settings = {"partitioner": Disjoint(), "num_drafts": 4, "passages_per_draft": 1, **options}
    return SpeculativeRAG(drafter=endpoint, verifier=endpoint, **settings)


def asked(respond: Any, scripted: Scripted, passages: Any = PASSAGES, **options: Any) -> Any:
    """Ask once; return the answer and the server."""
    server = scripted(respond)
    with rag(server, **options) as engine:
        return engine.ask(QUESTION, passages), server


@pytest.mark.parametrize("best", range(4))
def test_the_best_draft_wins_wherever_it_stands(scripted: Scripted, best: int) -> None:
    """With its own passages, its own rationale and no second request."""
    answer, server = asked(
        drafting(draft_of, lambda n: verdict(0.9 if n == best else 0.5)), scripted
    )

    assert answer.text == f"river {best}"
    assert [passage.id for passage in answer.passages] == [f"p{best}"]
    assert (answer.rationale, answer.citations) == ("[1] says so.", (1,))
    assert answer.fallback_reason is None
    assert len(server.chats) == 8


@pytest.mark.parametrize("p", [0.5, 1e-12])
def test_a_tie_goes_to_the_first_draft_although_it_comes_last(scripted: Scripted, p: float) -> None:
    """The same replies give the same answer; a verdict near zero is not lost in a tie of zeros."""
    slow_first = drafting(lambda n: draft_of(n, delay=0.3 if n == 0 else 0.0), lambda _: verdict(p))
    answer, _ = asked(slow_first, scripted)

    assert answer.text == "river 0"
    assert [score.draft for score in answer.trace.scores][-1] == 0


def test_the_verdict_is_read_from_the_probabilities_not_from_the_text(scripted: Scripted) -> None:
    """A "Yes" at 0.4 is worth less than a "No" at 0.6."""
    answer, _ = asked(
        drafting(draft_of, lambda n: verdict(0.6, "No") if n == 2 else verdict(0.4, "Yes")),
        scripted,
    )

    assert answer.text == "river 2"


def test_drafts_are_written_at_the_same_time(scripted: Scripted) -> None:
    """All of them are under way before the first one lands."""
    _, server = asked(drafting(lambda n: draft_of(n, delay=0.3), lambda _: verdict(0.5)), scripted)

    assert server.max_in_flight == 4


def test_a_draft_is_verified_while_others_are_still_written(scripted: Scripted) -> None:
    """The slowest draft does not hold up the verification of the rest."""
    seen: list[str] = []

    async def respond(body: Body, _: int) -> Any:
        n = river(body)
        if is_verification(body):
            seen.append(f"verify {n}")
            return verdict(0.5)
        if n == 0:
            for _ in range(500):
                if len(seen) == 3:
                    break
                await asyncio.sleep(0.01)
            seen.append("draft 0")
        return draft_of(n)

    asked(respond, scripted)

    assert sorted(seen[:3]) == ["verify 1", "verify 2", "verify 3"]
    assert seen[3:] == ["draft 0", "verify 0"]


def test_verifications_do_not_wait_for_each_other(scripted: Scripted) -> None:
    """The server batches them."""
    under_way: list[int] = [0]

    async def respond(body: Body, _: int) -> Any:
        if not is_verification(body):
            return draft_of(river(body))
        under_way.append(under_way[-1] + 1)
        await asyncio.sleep(0.5)
        under_way.append(under_way[-1] - 1)
        return verdict(0.5)

    asked(respond, scripted)

    assert max(under_way) == 4


@pytest.mark.parametrize("bad", [Fault(400), "", "Rationale: cut", "Rationale: x\nAnswer: unknown"])
def test_a_draft_that_answers_nothing_is_not_verified(scripted: Scripted, bad: Any) -> None:
    """Nobody pays for a verdict on an empty answer, and the others still compete."""
    answer, server = asked(
        drafting(lambda n: bad if n == 1 else draft_of(n), lambda n: verdict(0.1 + n / 10)),
        scripted,
    )

    assert answer.text == "river 3"
    assert sum(map(is_verification, server.chats)) == 3


def test_a_draft_whose_verification_failed_is_not_selected(scripted: Scripted) -> None:
    """Missing is neither 0 nor 1: the others are compared without it."""
    answer, _ = asked(
        drafting(draft_of, lambda n: Fault(400) if n == 0 else verdict(0.001 * n)), scripted
    )

    assert answer.text == "river 3"
    assert answer.selection.ranking == (3, 2, 1)
    assert answer.tier == "reflection"


def test_the_retrievers_scores_do_not_matter(scripted: Scripted) -> None:
    """Their scales differ; the rank is the place in the list."""
    respond = drafting(draft_of, lambda n: verdict(0.2 + n / 10))
    answers = []
    for scores in ([1.0, 0.5, 0.2, 0.1], [-9.0, 99.0, math.nan, 0.0], [None] * 4):
        scored = [
            Passage(text=passage.text, id=passage.id, score=score)
            for passage, score in zip(PASSAGES, scores, strict=True)
        ]
        answer, server = asked(respond, scripted, scored, partitioner=MultiPerspective())
        answers.append((answer.text, sorted(str(body["messages"]) for body in server.chats)))

    assert answers[0] == answers[1] == answers[2]


def test_everything_left_out_or_cut_short_is_in_the_trace(scripted: Scripted) -> None:
    """Dropped passages, fewer drafts than asked for, other vectors, a draft cut off."""
    passages = [
        Passage(text="Fact 1 tells of river 1.", embedding=[1.0, math.nan], id="odd"),
        Passage(text="Fact 2 tells of river 2.", embedding=[1.0, 0.0], id="even"),
        Passage(text="Fact 2 tells of river 2.", id="copy"),
        Passage(text=" ", id="blank"),
    ]
    respond = drafting(lambda n: draft_of(n, finish_reason="length"), lambda _: verdict(0.5))
    answer, _ = asked(respond, scripted, passages, partitioner=MultiPerspective(), num_drafts=5)
    notes = "\n".join(answer.trace.notes)

    assert "passage 2 copy: repeats an earlier one" in notes
    assert "passage 3 blank: empty" in notes
    assert "embeddings not finite (passage 0 odd)" in notes
    assert "2 of 5 drafts" in notes
    assert "may be cut off" in notes


def test_an_embedder_hears_the_question(scripted: Scripted) -> None:
    """So that embeddings can be conditioned on it, as in the paper."""
    heard = []

    def embedder(texts: list[str], question: str) -> Any:
        heard.append((len(texts), question))
        return np.eye(len(texts))

    respond = drafting(draft_of, lambda _: verdict(0.5))
    asked(respond, scripted, partitioner=MultiPerspective(), embedder=embedder)

    assert heard == [(4, QUESTION)]


def test_a_fallback_rests_on_all_passages_and_drops_dead_citations(scripted: Scripted) -> None:
    """What was tried before is listed, with its cost."""

    def respond(body: Body, _: int) -> Any:
        return "river 3 [4] [9]" if body.get("stream") else "Rationale: cut"

    answer, _ = asked(respond, scripted)

    assert (answer.text, answer.citations) == ("river 3 [4]", (4,))
    assert [passage.id for passage in answer.passages] == ["p0", "p1", "p2", "p3"]
    assert answer.usage.requests == 5
    assert len([note for note in answer.trace.notes if "fell back to standard RAG" in note]) == 1
