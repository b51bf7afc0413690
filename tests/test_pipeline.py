"""The path of a question, against a scripted server that speaks real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer, is_verification

from specrag_integrations import (
    Answer,
    ConfigurationError,
    Disjoint,
    Endpoint,
    FallbackReason,
    InputError,
    MultiPerspective,
    NoAnswerError,
    NoAnswerReason,
    Passage,
    Price,
    RankStratified,
    Scoring,
    SpeculativeRAG,
)
from specrag_integrations.drafts import Draft, FailedDraft
from specrag_integrations.models import ChatReply, Message, assistant, user
from specrag_integrations.portal import portal
from specrag_integrations.prompts import draft_request
from specrag_integrations.scores import UNASKED
from specrag_integrations.selection import Pool, Selection

PASSAGES = [Passage(text=f"Fact number {n} is about river {n}.", id=f"p{n}") for n in range(10)]
QUESTION = "Which river is meant?"

Scripted = Callable[..., ScriptedServer]


def TEMPLATE(question: str, passages: Any, history: Any) -> list[Message]:  # noqa: N802 - a value
    """An app's own prompt."""
    return [user(f"Mine: {question}")]


def text_of(body: dict[str, Any]) -> str:
    """Return all that a request says."""
    return "\n".join(message["content"] for message in body["messages"])


def is_fallback(body: dict[str, Any]) -> bool:
    """Tell a standard-RAG request: the only one that is streamed."""
    return bool(body.get("stream"))


def yes(p: float) -> Reply:
    """Return a verdict with P(Yes) = p."""
    return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)})


def lead(body: dict[str, Any]) -> int:
    """Return the number of the fact a draft prompt shows first."""
    return int(text_of(body).split("Fact number ")[1].split()[0])


def by_first_fact(p_yes: dict[int, float]) -> Callable[[dict[str, Any], int], Reply]:
    """Draft "river N" from the subset whose first fact is N; judge it by the table."""

    def respond(body: dict[str, Any], _: int) -> Reply:
        if is_fallback(body):
            return Reply("standard answer [1]")
        if is_verification(body):
            number = int(body["messages"][1]["content"].rsplit(" ", 1)[1])
            return yes(p_yes.get(number, 0.1))
        return Reply(f"Rationale: it says so [1].\nAnswer: river {lead(body)}")

    return respond


def make(server: ScriptedServer, **options: Any) -> SpeculativeRAG:
    """Return an engine whose subsets are stable and easy to tell apart."""
    endpoint = Endpoint(server.base_url, request_timeout=options.pop("request_timeout", 10))
    defaults: dict[str, Any] = {"num_drafts": 4, "passages_per_draft": 2}
    options = {"drafter": endpoint, "verifier": endpoint, **defaults, **options}
    return SpeculativeRAG(**{"partitioner": RankStratified(), **options})


def test_an_answer_that_the_verifier_was_not_asked_about_is_noted(scripted: Scripted) -> None:
    """Without log-probabilities, drafts that all agree leave it nothing to choose from."""
    drafter = scripted("Rationale: it says so [1].\nAnswer: river 1")
    verifier = scripted("Yes", drops=("logprobs", "top_logprobs"))
    rag = make(drafter, verifier=Endpoint(verifier.base_url))

    answer = rag.ask(QUESTION, PASSAGES)

    assert (answer.text, answer.tier) == ("river 1", "choice")
    assert UNASKED in answer.trace.notes
    assert not any(step.kind == "verify" and step.attempts for step in answer.usage.steps)


def test_the_draft_the_verifier_trusts_most_is_the_answer(scripted: Scripted) -> None:
    """The draft with the highest P(Yes) wins, with its passages, citations and rivals."""
    server = scripted()
    rag = make(server)
    firsts = sorted({subset[0] for subset in subsets_of(rag, server)})
    best = firsts[-1]
    server.respond = by_first_fact({best: 0.9})

    answer = rag.ask(QUESTION, PASSAGES)

    assert answer.text == f"river {best}"
    assert answer.passages[0].id == f"p{best}"
    assert answer.citations == (1,)
    assert answer.tier == "reflection"
    assert answer.fallback_reason is None
    assert answer.confidence is None
    winner = answer.selection.winner if answer.selection else None
    score = next(score for score in answer.trace.scores if score.draft == winner)
    assert score.value == pytest.approx(math.log(0.9), abs=1e-6)
    assert {rival.answer for rival in answer.dissent} == {f"river {n}" for n in firsts[:-1]}


def subsets_of(rag: SpeculativeRAG, server: ScriptedServer) -> list[tuple[int, ...]]:
    """Return the subsets an engine makes, learnt from a question of its own."""
    server.respond = by_first_fact({})
    found = [subset.ranks for subset in rag.ask(QUESTION, PASSAGES).trace.subsets]
    server.reset()
    return found


def test_all_four_ways_of_asking_give_the_same_answer(server: ScriptedServer) -> None:
    """ask, aask, stream and astream agree, for the same replies."""
    rag = make(server)

    async def streamed() -> Answer:
        events = [event async for event in rag.astream(QUESTION, PASSAGES)]
        return events[-1].answer  # type: ignore[union-attr]

    answers = [
        rag.ask(QUESTION, PASSAGES),
        asyncio.run(rag.aask(QUESTION, PASSAGES)),
        list(rag.stream(QUESTION, PASSAGES))[-1].answer,  # type: ignore[union-attr]
        asyncio.run(streamed()),
    ]

    assert len({(answer.text, str(answer.selection)) for answer in answers}) == 1


def test_events_come_in_order_and_are_json(server: ScriptedServer) -> None:
    """Passages first; every draft before its score; the answer last; one delta with its text."""
    events = list(make(server).stream(QUESTION, PASSAGES))
    types = [event.type for event in events]

    assert types[0] == "passages"
    assert types[-3:] == ["selected", "delta", "answer"]
    assert types.count("draft") == types.count("score") == 4
    assert events[-2].text == events[-1].answer.text  # type: ignore[union-attr]
    for event in events:
        assert json.loads(json.dumps(event.to_dict(), allow_nan=False))["type"] == event.type


def test_one_failed_draft_does_not_lose_the_answer(scripted: Scripted) -> None:
    """A draft the server refuses is reported; the others still compete."""
    inner = by_first_fact({})
    refused: list[str] = []

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        if not is_verification(body) and (not refused or text_of(body) in refused):
            refused.append(text_of(body))
            return Fault(400, body={"error": {"message": "no such thing"}})
        return inner(body, call)

    answer = make(scripted(respond)).ask(QUESTION, PASSAGES)

    failed = [draft for draft in answer.trace.drafts if not hasattr(draft, "answer")]
    assert len(failed) == 1
    assert "no such thing" in failed[0].to_dict()["failed"]
    assert answer.fallback_reason is None
    assert len(refused) == 1


@pytest.mark.parametrize(
    "bad",
    [Fault(400), "Rationale: I was going to", "Rationale: hm.\nAnswer: unknown"],
    ids=["refused", "unreadable", "abstained"],
)
def test_without_a_usable_draft_standard_rag_answers(scripted: Scripted, bad: Any) -> None:
    """Failed, unreadable and abstaining drafts lead to the fallback, which says why."""

    def respond(body: dict[str, Any], _: int) -> Any:
        return Reply("the Rhine [3]") if is_fallback(body) else bad

    server = scripted(respond)
    events = list(make(server).stream(QUESTION, PASSAGES))
    answer = events[-1].answer  # type: ignore[union-attr]

    assert answer.text == "the Rhine [3]"
    assert answer.citations == (3,)
    assert answer.fallback_reason is FallbackReason.NO_USABLE_DRAFT
    assert len(answer.passages) == len(PASSAGES)
    assert any("fell back" in note for note in answer.trace.notes)
    assert "".join(e.text for e in events if e.type == "delta") == answer.text
    assert [event.type for event in events if event.type in {"selected", "fallback"}] == [
        "fallback"
    ]
    assert not any(is_verification(body) for body in server.chats)


def test_without_fallback_the_failures_are_listed(scripted: Scripted) -> None:
    """With fallback=None there is an error that names every draft's failure."""
    rag = make(scripted(Fault(400, body={"error": {"message": "nope"}})), fallback=None)

    with pytest.raises(NoAnswerError) as raised:
        rag.ask(QUESTION, PASSAGES)

    assert raised.value.reason is NoAnswerReason.NO_USABLE_DRAFT
    assert len(raised.value.failures) == 4
    assert "draft 0" in raised.value.failures[0]
    assert "nope" in raised.value.failures[0]


def test_a_failing_fallback_names_everything_that_failed(scripted: Scripted) -> None:
    """When the fallback fails as well, the error lists the drafts and the fallback."""
    rag = make(scripted(Fault(400, body={"error": {"message": "nope"}})))

    with pytest.raises(NoAnswerError) as raised:
        rag.ask(QUESTION, PASSAGES)

    assert raised.value.reason is NoAnswerReason.FALLBACK_FAILED
    assert len(raised.value.failures) == 5
    text = str(raised.value)
    assert text.startswith("standard RAG failed: ")
    assert "no draft was selected (no_usable_draft): drafts 0, 1, 2, 3: " in text
    assert text.count("nope") == 2


def test_equal_drafts_are_verified_once(scripted: Scripted) -> None:
    """Drafts with the same rationale and answer share one verification and all get its score."""

    def respond(body: dict[str, Any], _: int) -> Reply:
        if is_verification(body):
            return yes(0.8)
        return Reply("Rationale: same.\nAnswer: same")

    server = scripted(respond)
    answer = make(server).ask(QUESTION, PASSAGES)

    assert sum(is_verification(body) for body in server.chats) == 1
    assert len(answer.trace.scores) == 4
    assert len({score.value for score in answer.trace.scores}) == 1
    assert answer.selection is not None
    assert answer.selection.winner == 0
    assert answer.dissent == ()


def test_a_verifier_without_logprobs_leads_to_the_next_tier(scripted: Scripted) -> None:
    """Without log-probabilities from the verifier, all drafts are compared by the drafter's."""
    drafter = scripted(by_first_fact({}))
    verifier = scripted(Reply("Yes", logprobs=None))
    rag = make(drafter, verifier=Endpoint(verifier.base_url))

    answer = rag.ask(QUESTION, PASSAGES)

    assert answer.tier == "draft_only"
    assert any("no log-probabilities" in note for note in answer.trace.notes)
    at_tier = [score for score in answer.trace.scores if score.tier == "draft_only"]
    best = max(at_tier, key=lambda score: score.value or -math.inf)
    assert answer.selection is not None
    assert answer.selection.winner == best.draft
    assert set(best.terms) == {"draft_rationale", "draft_answer", "draft"}


def test_a_tier_is_given_up_after_three_questions_not_one(scripted: Scripted) -> None:
    """Three questions in a row without log-probabilities end the asking; one does not.

    This verifier writes no letters either: three more questions end the asking for those.
    """
    verifier = scripted(Reply("Yes", logprobs=None))
    rag = make(scripted(by_first_fact({})), verifier=Endpoint(verifier.base_url))

    asked = [0]
    for _ in range(8):
        rag.ask(QUESTION, PASSAGES)
        asked.append(len(verifier.chats))

    assert [after - before for before, after in itertools.pairwise(asked)] == [
        *[4 + 1] * 3,
        *[1] * 3,
        *[0] * 2,
    ]


def test_scores_of_different_tiers_are_never_compared(scripted: Scripted) -> None:
    """A draft whose verification failed cannot be selected while another was verified."""
    inner = by_first_fact({0: 0.2})

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        if is_verification(body) and not body["messages"][1]["content"].endswith("river 0"):
            return Fault(400, body={"error": {"message": "overloaded"}})
        return inner(body, call)

    answer = make(scripted(respond), num_drafts=8).ask(QUESTION, PASSAGES)

    assert answer.text == "river 0"
    assert {score.tier for score in answer.trace.scores} == {"reflection"}
    assert any(score.missing and "overloaded" in score.missing for score in answer.trace.scores)


def test_no_logprobs_and_no_agreement_fall_back(scripted: Scripted) -> None:
    """Without log-probabilities, letters or two equal answers no draft can be trusted."""

    def respond(body: dict[str, Any], call: int) -> Reply:
        if "Draft A" in text_of(body):
            return Reply("neither")
        return Reply(by_first_fact({})(body, call).text, logprobs=None)

    answer = make(scripted(respond)).ask(QUESTION, PASSAGES)

    assert answer.fallback_reason is FallbackReason.DISAGREEMENT
    assert answer.tier == "agreement"
    assert answer.text == "standard answer [1]"


def test_a_forced_tier_does_not_descend(scripted: Scripted) -> None:
    """Scoring(tier="reflection") never turns into draft_only."""
    verifier = scripted(lambda body, _: Reply("no idea", logprobs=None))
    rag = make(
        scripted(by_first_fact({})),
        verifier=Endpoint(verifier.base_url),
        scoring=Scoring(tier="reflection"),
        fallback=None,
    )

    with pytest.raises(NoAnswerError, match="no log-probabilities"):
        rag.ask(QUESTION, PASSAGES)


def test_different_drafters_are_not_compared_by_their_own_logprobs(scripted: Scripted) -> None:
    """With two drafting models the draft terms are dropped, and draft_only is refused."""
    one, two = (Endpoint(scripted(by_first_fact({})).base_url) for _ in range(2))
    verifier = scripted(
        lambda body, _: Reply("plain") if is_fallback(body) else Reply("Yes", logprobs=None)
    )
    options: dict[str, Any] = {"drafter": [one, two], "verifier": Endpoint(verifier.base_url)}
    options |= {"partitioner": RankStratified(), "passages_per_draft": 2}

    with pytest.raises(ConfigurationError, match="draft_only"):
        SpeculativeRAG(**options, scoring=Scoring(tier="draft_only"))
    answer = SpeculativeRAG(**options).ask(QUESTION, PASSAGES)
    assert answer.tier == "agreement"
    assert {term for score in answer.trace.scores for term in score.terms} == {"agreement"}


def test_drafts_are_dealt_to_the_drafters_in_turn(scripted: Scripted) -> None:
    """Draft j goes to drafter j modulo their number."""
    servers = [scripted(by_first_fact({})) for _ in range(3)]
    rag = make(servers[0], drafter=[Endpoint(server.base_url) for server in servers])

    rag.ask(QUESTION, PASSAGES)

    drafts = [sum(not is_verification(body) for body in server.chats) for server in servers]
    assert drafts == [2, 1, 1]


def test_the_verifier_never_sees_a_passage(server: ScriptedServer) -> None:
    """Only drafts go to the verifier when there is no fallback."""
    verifier = server
    drafter = ScriptedServer(by_first_fact({}))
    with drafter:
        rag = make(drafter, verifier=Endpoint(verifier.base_url), fallback=None)
        rag.ask(QUESTION, PASSAGES)

    assert verifier.chats
    assert not any("Fact number" in text_of(body) for body in verifier.chats)
    assert all(body["messages"][0]["content"] == QUESTION for body in verifier.chats)


def test_history_and_instructions_reach_drafts_and_fallback_only(scripted: Scripted) -> None:
    """Earlier turns and the app's words are in draft and fallback prompts, never in a check."""

    def respond(body: dict[str, Any], call: int) -> Reply:
        if is_verification(body):
            return Reply("Maybe")
        return by_first_fact({})(body, call)

    server = scripted(respond)
    rag = make(server, instructions="Reply in capitals.", scoring=Scoring(tier="reflection"))
    rag.ask(QUESTION, PASSAGES, history=[{"role": "user", "content": "Earlier turn"}])

    for body in server.chats:
        said = text_of(body)
        expected = not is_verification(body)
        assert ("Earlier turn" in said) is expected
        assert ("Reply in capitals." in said) is expected
    assert any(is_fallback(body) for body in server.chats)


@pytest.mark.parametrize("passages", [[], ["", "   "]], ids=["none", "only empty ones"])
def test_without_passages_no_request_is_sent(server: ScriptedServer, passages: Any) -> None:
    """No passages: an error that says so, and the servers hear nothing."""
    with pytest.raises(NoAnswerError) as raised:
        make(server).ask(QUESTION, passages)

    assert raised.value.reason is NoAnswerReason.NO_PASSAGES
    assert server.requests == []


def test_fewer_passages_than_asked_for_are_answered_from(server: ScriptedServer) -> None:
    """One passage makes one draft; the shortfall and what was dropped are in the trace."""
    answer = make(server).ask(QUESTION, [PASSAGES[0], PASSAGES[0], ""])

    assert len(answer.trace.drafts) == 1
    assert any("1 of 4 drafts" in note for note in answer.trace.notes)
    assert sum("repeats" in note or "empty" in note for note in answer.trace.notes) == 2


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [(Fault(503), 3), (Fault(raw=b"{", status=200), 3), (Fault(400), 3), (Fault(close=True), 2)],
    ids=["503", "malformed", "400", "dropped"],
)
@pytest.mark.parametrize("drafters", [1, 2])
def test_the_request_bound_holds_when_everything_fails(
    scripted: Scripted, fault: Fault, attempts: int, drafters: int
) -> None:
    """A server that fails everything never sees more than `max_requests`."""
    server = scripted(fault)
    endpoints = [Endpoint(server.base_url, max_attempts=attempts) for _ in range(drafters)]
    rag = SpeculativeRAG(drafter=endpoints, verifier=endpoints[0], num_drafts=4)

    with pytest.raises(NoAnswerError):
        rag.ask(QUESTION, PASSAGES)

    # Two tiers of one request per draft, two requests of `choice`, and the fallback.
    assert rag.max_requests == attempts * (4 + 2 * 4 + 2 + 1)
    # Nothing is verified where nothing was drafted: four drafts and the fallback.
    tried = attempts if fault.close or fault.status == 503 else 1
    assert len(server.chats) == 5 * tried


def test_the_request_bound_is_reached_when_every_step_needs_its_last_attempt(
    scripted: Scripted,
) -> None:
    """The bound is exact: each step failing until its last attempt sends that many requests."""
    seen: dict[str, int] = {}
    inner = by_first_fact({})

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        key = text_of(body)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] < 3:
            return Fault(503)
        return Reply("Maybe") if is_verification(body) else inner(body, call)

    server = scripted(respond)
    rag = make(server, scoring=Scoring(tier="reflection"), partitioner=RankStratified(seed=3))
    answer = rag.ask(QUESTION, PASSAGES)

    distinct = len({(d.to_dict()["rationale"], d.to_dict()["answer"]) for d in answer.trace.drafts})
    assert answer.fallback_reason is FallbackReason.NO_USABLE_DRAFT
    assert len(server.chats) == 3 * (4 + distinct + 1) == answer.usage.requests
    assert len(server.chats) <= rag.max_requests == 3 * (4 + 4 + 1)


def ask_in_time(way: str, rag: SpeculativeRAG) -> None:
    """Ask in one of four ways."""

    async def over_events() -> None:
        async for _ in rag.astream(QUESTION, PASSAGES):
            pass
        raise AssertionError("the stream ended")  # pragma: no cover

    async def alone(coroutine: Any) -> None:
        try:
            await coroutine
        finally:
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

    if way == "ask":
        rag.ask(QUESTION, PASSAGES)
    elif way == "aask":
        asyncio.run(alone(rag.aask(QUESTION, PASSAGES)))
    elif way == "stream":
        list(rag.stream(QUESTION, PASSAGES))
    else:
        asyncio.run(alone(over_events()))


WAYS = ["ask", "aask", "stream", "astream"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hang", ["draft", "verify", "fallback"])
def test_the_deadline_fires_in_every_way_of_asking(scripted: Scripted, way: str, hang: str) -> None:
    """A step that never ends ends at the deadline, and leaves neither request nor task."""
    inner = by_first_fact({})

    def respond(body: dict[str, Any], call: int) -> Any:
        kind = "verify" if is_verification(body) else "fallback" if is_fallback(body) else "draft"
        if kind == hang:
            return Fault(hang=True)
        if hang == "fallback" and kind == "draft":
            return "Rationale: hm.\nAnswer: unknown"
        return inner(body, call)

    server = scripted(respond)
    rag = make(server, deadline=0.6)

    with pytest.raises(NoAnswerError) as raised:
        ask_in_time(way, rag)

    assert raised.value.reason is NoAnswerReason.DEADLINE
    assert server.wait_idle(2)
    assert server.aborted >= (4 if hang == "draft" else 1)
    assert not [task for task in asyncio.all_tasks(portal.loop) if not task.done()]


@pytest.mark.parametrize("way", WAYS[:2])
def test_at_the_deadline_the_best_scored_draft_wins(scripted: Scripted, way: str) -> None:
    """One draft that hangs costs the others nothing: the trace says DEADLINE."""
    inner = by_first_fact({})
    hung: list[str] = []

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        if not is_verification(body) and not hung:
            hung.append(text_of(body))
            return Fault(hang=True)
        return inner(body, call)

    rag = make(scripted(respond))
    ask = rag.ask(QUESTION, PASSAGES, deadline=1.0) if way == "ask" else None
    answer = ask or asyncio.run(rag.aask(QUESTION, PASSAGES, deadline=1.0))

    assert answer.trace.deadline_hit
    (note,) = (note for note in answer.trace.notes if "DEADLINE" in note)
    missing = {subset.index for subset in answer.trace.subsets} - {
        draft.index for draft in answer.trace.drafts
    }
    assert note.endswith(f"; not written: {missing.pop()}")
    assert answer.fallback_reason is None
    assert len(answer.trace.drafts) == 3


def test_a_verifier_without_logprobs_is_learnt_from_at_the_deadline_too(
    scripted: Scripted,
) -> None:
    """One slow draft does not keep the finished ones from the tier that costs no request."""
    inner = by_first_fact({})
    hung: list[str] = []

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        if not hung or text_of(body) in hung:
            hung.append(text_of(body))
            return Fault(hang=True)
        return inner(body, call)

    verifier = scripted(Reply("Yes", logprobs=None))
    rag = make(scripted(respond), verifier=Endpoint(verifier.base_url))
    for _ in range(3):
        answer = rag.ask(QUESTION, PASSAGES, deadline=0.7)
        assert answer.trace.deadline_hit
        assert answer.tier == "draft_only"
    asked = len(verifier.chats)

    assert rag.ask(QUESTION, PASSAGES, deadline=0.7).tier == "draft_only"
    assert len(verifier.chats) == asked


def test_a_selector_may_trust_none(server: ScriptedServer) -> None:
    """A selector that returns nothing leads to the fallback; one that invents is an error."""

    class Nobody:
        reads_scores, requests = True, 0

        async def select(self, pool: Pool) -> Selection:
            return Selection(winner=None, ranking=())

    class Twice(Nobody):
        async def select(self, pool: Pool) -> Selection:
            first = pool.candidates[0].draft.index
            return Selection(winner=first, ranking=(first, first))

    server.respond = by_first_fact({})
    assert make(server, selector=Nobody()).ask(QUESTION, PASSAGES).text == "standard answer [1]"
    with pytest.raises(ConfigurationError, match="Twice"):
        make(server, selector=Twice()).ask(QUESTION, PASSAGES)


def test_closing_a_stream_cancels_what_is_under_way(scripted: Scripted) -> None:
    """A reader that leaves after the first event leaves no request behind."""
    server = scripted(Fault(hang=True))
    events = make(server).stream(QUESTION, PASSAGES)

    assert next(events).type == "passages"
    assert server.wait_for(lambda s: s.in_flight == 4, 5)
    events.close()  # type: ignore[attr-defined]

    assert server.wait_idle(2)
    assert server.aborted == 4


def test_cancelling_the_caller_cancels_every_request(scripted: Scripted) -> None:
    """Cancelling `aask` aborts all drafts at the server before the cancellation is passed on."""
    server = scripted(Fault(hang=True))
    rag = make(server)

    async def cancelled() -> None:
        asked = asyncio.create_task(rag.aask(QUESTION, PASSAGES))
        await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 4, 5)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancelled())

    assert server.wait_idle(2)


class Broken:
    """A chat model with a bug."""

    name = "broken"
    max_attempts = 1

    async def chat(self, request: Any, *, step: Any) -> ChatReply:
        raise KeyError("a bug")

    def stream(self, request: Any, *, step: Any) -> Any:
        raise NotImplementedError

    async def capabilities(self) -> None:
        return None

    async def probe(self, request: Any) -> None:
        return None

    async def count_tokens(self, messages: Any) -> int | None:
        return None

    async def aclose(self) -> None:
        return None


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_a_bug_is_raised_as_itself(server: ScriptedServer, role: str) -> None:
    """Only endpoint errors become failed drafts; anything else is raised, and leaves nothing."""
    rag = make(server, **{role: Broken()})

    with pytest.raises(KeyError, match="a bug"):
        rag.ask(QUESTION, PASSAGES)

    assert server.wait_idle(2)


def test_usage_counts_each_request_once_by_role(server: ScriptedServer) -> None:
    """Tokens are the servers' own counts, by role, and cost follows from prices."""
    answer = make(server).ask(QUESTION, PASSAGES)

    drafter, verifier = answer.usage.tokens("drafter"), answer.usage.tokens("verifier")
    assert answer.usage.requests == len(server.chats)
    assert verifier.completion == sum(is_verification(body) for body in server.chats)
    assert drafter.prompt
    assert drafter.completion
    assert answer.usage.cost(
        {"drafter": Price(input=1e6, output=0), "verifier": Price(input=0, output=1e6)}
    ) == pytest.approx(drafter.prompt + (verifier.completion or 0))
    assert set(answer.trace.stages) == {"partition", "draft", "verify"}
    assert answer.trace.first_token == pytest.approx(answer.trace.seconds, abs=0.05)


def test_a_cut_off_draft_loses_against_a_whole_one(scripted: Scripted) -> None:
    """A draft that hit the token limit is selected only if nothing else can be."""

    def respond(body: dict[str, Any], _: int) -> Reply:
        if is_verification(body):
            return yes(0.95 if "cut" in body["messages"][1]["content"] else 0.2)
        if lead(body) == 0:
            return Reply("Rationale: r.\nAnswer: whole")
        return Reply("Rationale: r.\nAnswer: cut", finish_reason="length")

    server = scripted(respond)
    answer = make(server, num_drafts=8).ask(QUESTION, PASSAGES)
    alone = make(server).ask(QUESTION, PASSAGES[1:4])

    assert answer.text == "whole"
    assert alone.text == "cut"
    assert any("cut off" in note for note in alone.trace.notes)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_drafts": 0}, "num_drafts"),
        ({"num_drafts": 2.5}, "num_drafts"),
        ({"passages_per_draft": 0}, "passages_per_draft"),
        ({"max_answer_tokens": -1}, "max_answer_tokens"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": "5"}, "deadline"),
        ({"fallback": "none"}, "fallback"),
        ({"drafter": []}, "drafter"),
        ({"drafter": "http://localhost:8000"}, "Endpoint"),
        ({"drafter": Endpoint}, "drafter must be an Endpoint .*, not the class Endpoint; write"),
        ({"drafter": [Endpoint]}, "drafter must be an Endpoint .*, not the class Endpoint; write"),
        ({"verifier": Endpoint}, "verifier must be an Endpoint .*, not the class Endpoint; write"),
        ({"verifier": None}, "verifier"),
        ({"partitioner": "ByCluster"}, "partitioner"),
        ({"partitioner": RankStratified}, "partitioner"),
        ({"selector": "x"}, "selector"),
        ({"embedder": "x"}, "embedder"),
        ({"draft_template": 5}, "draft_template"),
        ({"fallback_template": 5}, "fallback_template"),
        ({"scoring": "reflection"}, "scoring"),
        ({"instructions": 5}, "instructions"),
    ],
)
def test_wrong_options_are_refused_at_construction(
    server: ScriptedServer, options: dict[str, Any], named: str
) -> None:
    """The error names the option and comes before any question."""
    with pytest.raises(ConfigurationError, match=named):
        make(server, **options)


async def _prompt(*_: Any) -> tuple[Message, ...]:
    return (user("Question?"),)


@pytest.mark.parametrize("name", ["draft_template", "fallback_template"])
def test_a_template_that_takes_other_arguments_is_refused(
    server: ScriptedServer, name: str
) -> None:
    """The error names the parameter and what it is called with; no TypeError comes from within."""
    endpoint = Endpoint(server.base_url)
    templates: Any = {name: lambda question, passages: [user(question)]}
    with pytest.raises(ConfigurationError, match=rf"{name} is called with \(question, passages"):
        SpeculativeRAG(drafter=endpoint, verifier=endpoint, **templates)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "it returned a NoneType"),
        ((), "it returned an empty tuple"),
        ("Answer this.", "it returned a str"),
        ([{"role": "user", "content": "Question?"}], "it returned a list that holds a dict"),
        (iter([user("Question?")]), "it returned a list_iterator"),
        ([user(5)], "it returned a Message whose content is a int"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("name", ["draft_template", "fallback_template"])
def test_a_template_that_makes_no_prompt_is_refused(
    server: ScriptedServer, name: str, returned: Any, told: str
) -> None:
    """It is tried at construction, and the error names the parameter, not our own code."""
    with pytest.raises(ConfigurationError, match=f"{name} must return a list of Message.*{told}"):
        make(server, **{name: lambda *_: returned})
    with pytest.raises(ConfigurationError, match=f"{name} must return .*it returned a coroutine"):
        make(server, **{name: _prompt})


def test_a_template_may_fail_later_and_says_so(scripted: Scripted) -> None:
    """What made a prompt from made-up passages may make none from others."""
    server = scripted()

    def template(question: str, passages: Any, history: Any) -> list[Message]:
        return [] if question == QUESTION else [user(question)]

    with pytest.raises(ConfigurationError, match="draft_template .* an empty list"):
        make(server, draft_template=template).ask(QUESTION, PASSAGES)
    assert server.chats == []


@pytest.mark.parametrize(
    "options",
    [
        {"fallback": None, "fallback_template": TEMPLATE},
        {"draft_template": TEMPLATE, "fallback_template": TEMPLATE, "instructions": "Be brief."},
        {"draft_template": TEMPLATE, "fallback": None, "instructions": "Be brief."},
    ],
)
def test_options_that_would_do_nothing_are_refused(
    server: ScriptedServer, options: dict[str, Any]
) -> None:
    """Each is told of by name; where one of our prompts is left, instructions reach it."""
    with pytest.raises(ConfigurationError, match="does nothing"):
        make(server, **options)
    make(server, **{**options, "fallback": "standard", "refine": "always"})


def test_instructions_reach_the_prompts_that_are_ours(scripted: Scripted) -> None:
    """Beside an app's fallback prompt, they are in the drafts'; beside its drafts', in ours."""
    for own in ("fallback_template", "draft_template"):
        server = scripted(respond="unreadable\n\nAnswer:")  # no draft can be used
        make(server, **{own: TEMPLATE, "instructions": "Be brief."}).ask(QUESTION, PASSAGES)
        prompts = [body["messages"][-1]["content"] for body in server.chats]
        assert len({"Mine:" in prompt for prompt in prompts}) == 2
        assert all(("Be brief." in prompt) != ("Mine:" in prompt) for prompt in prompts)


def test_an_apps_own_prompt_writes_the_drafts(scripted: Scripted) -> None:
    """Each draft is asked for with the subset alone, and the fallback keeps its own prompt."""
    server = scripted(respond=by_first_fact({}))

    def template(question: str, passages: Any, history: Any) -> tuple[Message, ...]:
        told = " ".join(passage.text for passage in passages)
        return draft_request([*history, user(f"App. {told} {question}")])

    rag = make(server, draft_template=template)
    answer = rag.ask(QUESTION, PASSAGES, history=[{"role": "system", "content": "Be exact."}])

    drafts = [body for body in server.chats if not (is_verification(body) or is_fallback(body))]
    told = [[turn["role"] for turn in body["messages"]] for body in drafts]
    assert told == [["system", "user"]] * 4
    asked = drafts[0]["messages"][-1]["content"]
    assert asked.startswith("App. Fact number ")
    assert asked.count("Fact number") == 2
    assert "Rationale:" in asked
    assert asked.index(QUESTION) < asked.index("Rationale:")
    assert len([d for d in answer.trace.drafts if isinstance(d, Draft)]) == 4
    assert rag.fingerprint().prompts != make(server).fingerprint().prompts


def test_a_draft_is_asked_for_in_the_last_user_turn() -> None:
    """Templates that refuse two user turns in a row take an app's prompt all the same."""
    (turn,) = draft_request([user("Question?")])
    assert turn.content.startswith("Question?\n\nWrite two lines.")
    turns = draft_request([user("Question?"), assistant("I see.")])
    assert [turn.role for turn in turns] == ["user", "assistant", "user"]
    assert [turn.role for turn in draft_request([])] == ["user"]


@pytest.mark.parametrize(
    ("question", "passages", "said"),
    [
        ("  ", PASSAGES, "question is empty"),
        (None, PASSAGES, "question must be a str"),
        (QUESTION, "one text", "must be a list"),
        (QUESTION, [3], "passage 0 is a int"),
        (QUESTION, None, "must be a list"),
        (QUESTION, [Passage(text="a", title=3)], "title is a int"),  # type: ignore[arg-type]
        (QUESTION, [Passage(text="a", metadata=5)], "metadata is a int"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named(
    server: ScriptedServer, question: Any, passages: Any, said: str
) -> None:
    """A wrong question or passage gives one clear error and no request."""
    with pytest.raises(InputError, match=said):
        make(server).ask(question, passages)
    assert server.requests == []


def test_failed_and_abstaining_drafts_are_in_the_notes(scripted: Scripted) -> None:
    """What the answer does without is told, also when there is an answer."""
    inner = by_first_fact({})
    seen: list[str] = []

    def respond(body: dict[str, Any], call: int) -> Any:
        if is_verification(body):
            return inner(body, call)
        if text_of(body) not in seen:
            seen.append(text_of(body))
        place = seen.index(text_of(body))
        return (
            [Fault(400), "Rationale: hm.\nAnswer: unknown"][place]
            if place < 2
            else inner(body, call)
        )

    answer = make(scripted(respond)).ask(QUESTION, PASSAGES)

    assert answer.fallback_reason is None
    assert sum("HTTP 400" in note for note in answer.trace.notes) == 1
    assert sum("do not tell" in note for note in answer.trace.notes) == 1


@pytest.mark.parametrize("escaped", [False, True], ids=["as it is", "as JSON"])
def test_what_a_server_echoes_reaches_no_log_or_repr(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, escaped: bool
) -> None:
    """A server that repeats the prompt in its error does not bring it into log, repr or error."""
    secret = [Passage(text=f'the "vault" code is {n} \u2013 keep it to yourself') for n in range(6)]

    def respond(body: dict[str, Any], call: int) -> Fault:
        said = body["messages"][-1]["content"]
        return Fault(
            400, body={"error": {"message": "bad: " + (json.dumps(said) if escaped else said)}}
        )

    rag = make(scripted(respond))
    with (
        caplog.at_level("DEBUG", logger="specrag_integrations"),
        pytest.raises(NoAnswerError) as raised,
    ):
        rag.ask("where is the hidden treasure?", secret)

    told = " ".join([caplog.text, repr(raised.value), str(raised.value), *raised.value.failures])
    cause = raised.value.__cause__
    told += f"{cause!r} {cause and cause.__cause__!r}"
    assert "bad: " in told
    for word in ("vault", "code is", "yourself", "treasure"):
        assert word not in told


def test_the_repr_names_models_and_numbers(server: ScriptedServer) -> None:
    """An engine's repr tells what it is made of."""
    assert "num_drafts=4" in repr(make(server))


def test_bad_history_is_named(server: ScriptedServer) -> None:
    """A turn without role and content is refused."""
    with pytest.raises(InputError, match="each turn of history"):
        make(server).ask(QUESTION, PASSAGES, history=[("user", "hi")])  # type: ignore[list-item]


def test_a_fallback_tells_before_its_first_word_what_it_reads(scripted: Scripted) -> None:
    """A passage that does not fit is not among them, so that [1] is the first of them."""

    def respond(body: dict[str, Any], _: int) -> Reply:
        return Reply("river 1 [1]") if is_fallback(body) else Reply("unreadable\n\nAnswer:")

    server = scripted(respond, kind="vllm", context_tokens=900)
    long = Passage(text="Fact number 0 is long. " * 400, id="long")
    events = list(make(server).stream(QUESTION, [long, *PASSAGES[1:4]]))

    kinds = [event.type for event in events if event.type in {"fallback", "delta", "answer"}]
    assert kinds[:2] == ["fallback", "delta"]
    (fallback,) = [event for event in events if event.type == "fallback"]
    assert [passage.id for passage in fallback.passages] == ["p1", "p2", "p3"]
    assert events[-1].answer.passages == fallback.passages
    assert fallback.to_dict()["passages"][0]["id"] == "p1"
    assert "Fact number" not in repr(fallback)


def kinds_in(told: Any) -> set[type]:
    """Return the types of all values in a JSON-able form."""
    if type(told) is dict:
        return {type(key) for key in told} | set().union(*map(kinds_in, told.values()))
    if type(told) is list:
        return set().union(*map(kinds_in, told))
    return {type(told)}


@pytest.mark.parametrize("drafts", [Fault(400), Reply("Rationale: r [1].\nAnswer: a")])
def test_what_is_told_as_json_holds_plain_values(scripted: Scripted, drafts: Any) -> None:
    """No enum and no number of a library: stores that check types would refuse them."""
    server = scripted(lambda body, _: Reply("plain [1]") if is_fallback(body) else drafts)
    for event in make(server).stream(QUESTION, PASSAGES):
        assert kinds_in(event.to_dict()) <= {str, int, float, bool, type(None)}, event.type


def test_drafts_leave_out_what_does_not_fit(scripted: Scripted) -> None:
    """The best-ranked passage may be in every draft: too long, it would fail all of them."""
    server = scripted(by_first_fact({}), kind="vllm", context_tokens=900)
    long = Passage(text="Fact number 0 is long. " * 400, id="long")
    options = {"partitioner": MultiPerspective(anchor=1), "max_answer_tokens": 64}
    answer = make(server, **options).ask(QUESTION, [long, *PASSAGES[1:6]])

    drafts = [draft for draft in answer.trace.drafts if isinstance(draft, Draft)]
    assert len(drafts) == 4
    assert not any("long" in (passage.id or "") for draft in drafts for passage in draft.passages)
    assert all(0 not in draft.subset.ranks for draft in drafts if draft.subset)
    assert [note for note in answer.trace.notes if "1 of 2 passages fit" in note]
    assert answer.fallback_reason is None


def test_a_draft_of_passages_that_all_are_too_long_fails_unsent(scripted: Scripted) -> None:
    """It costs no request, and the others go on."""
    server = scripted(by_first_fact({}), kind="vllm", context_tokens=900)
    long = Passage(text="Fact number 0 is long. " * 400, id="long")
    options = {"partitioner": Disjoint(), "num_drafts": 3, "passages_per_draft": 1}
    answer = make(server, **options).ask(QUESTION, [long, *PASSAGES[1:3]])

    failed = [draft for draft in answer.trace.drafts if isinstance(draft, FailedDraft)]
    assert [draft.attempts for draft in failed] == [0]
    assert "not one passage fits" in failed[0].reason
    assert len([body for body in server.chats if not is_verification(body)]) == 2
    assert answer.usage.requests == len(server.chats)
