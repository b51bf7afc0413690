"""What is found out about a server, when, and what a trace says of it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from scripted_model import ScriptedModel
from scripted_server import Fault, Reply, ScriptedServer, default_respond, is_verification

from specrag_integrations import (
    AnswerVote,
    ConfigurationError,
    Draft,
    Endpoint,
    FallbackReason,
    Listwise,
    LogprobsUnavailableError,
    NoAnswerError,
    NoAnswerReason,
    RankStratified,
    Scoring,
    SpeculativeRAG,
    Verifier,
)
from specrag_integrations.errors import EndpointUnavailableError
from specrag_integrations.models import ChatReply
from specrag_integrations.selection import Pool
from specrag_integrations.spans import SpanLogprob
from specrag_integrations.tasks import Tasks
from specrag_integrations.trials import Trial, Tryout, working
from specrag_integrations.verifier import Plan

Scripted = Callable[..., ScriptedServer]
Body = dict[str, Any]

QUESTION = "Which city?"
PASSAGES = [f"Passage {n} is about the city {n}." for n in range(6)]
DRAFTS = [
    Draft(rationale="It says so.", answer="Paris"),
    Draft(rationale="It is old.", answer="Rome"),
]
NO_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")


def verifier(server: ScriptedServer, **options: Any) -> Verifier:
    """Return a verifier on a scripted server, without retries."""
    return Verifier(Endpoint(server.base_url, max_attempts=1), **options)


def rag(drafts: Any, judge: ScriptedServer, **options: Any) -> SpeculativeRAG:
    """Return an engine with two drafts, by one server or by several endpoints."""
    if isinstance(drafts, ScriptedServer):
        drafts = Endpoint(drafts.base_url, max_attempts=1)
    judging = Endpoint(judge.base_url, max_attempts=1)
    return SpeculativeRAG(**{"drafter": drafts, "verifier": judging, "num_drafts": 2, **options})


def tiers_of(server_or_verifier: Any) -> list[str]:
    """Return the tiers of its next question."""
    one = server_or_verifier
    one = one if isinstance(one, Verifier) else verifier(one)

    async def plan() -> list[str]:
        async with Tasks() as tasks:
            return [tier.name for tier in (await one.tiers(tasks)).tiers]

    return asyncio.run(plan())


def both(judge: Callable[[Body, int], Reply | Fault | str]) -> Callable[[Body, int], Any]:
    """Draft as usual, and judge verifications by a function."""

    def respond(body: Body, call: int) -> Reply | Fault | str:
        return judge(body, call) if is_verification(body) else default_respond(body, call)

    return respond


# ---------------------------------------------------------------- servers that are busy


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_tried_again_and_not_found_wanting(
    scripted: Scripted, status: int
) -> None:
    """What it answers then is no refusal of the field."""
    busy = [True]
    server = scripted(kind="vllm", probe=lambda *_: Fault(status) if busy else default_probe())

    def default_probe() -> Reply:
        return Reply("Yes", alternatives={"Yes": -0.1, "No": -2.4})

    one = verifier(server)
    assert tiers_of(one) == ["reflection"]
    busy.clear()
    assert tiers_of(one) == ["prompt_logprobs", "reflection"]


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_busy_server_is_no_wrong_option_for_the_papers_formula(
    scripted: Scripted, kind: str
) -> None:
    """The question goes on, and its own requests show what the server can."""
    server = scripted(kind=kind, probe=Fault(429))
    one = verifier(server, scoring=Scoring(formula="paper"))

    assert tiers_of(one) == ["prompt_logprobs", "forced_decoding"]


def test_a_server_that_keeps_failing_is_left_in_peace(scripted: Scripted) -> None:
    """Two trials in a row failed: the next is some time away."""
    server = scripted(probe=Fault(503))
    one = verifier(server)
    for _ in range(6):
        tiers_of(one)

    assert len(server.probes) == 2


def test_a_field_that_crashes_a_server_is_left_out_of_later_trials(scripted: Scripted) -> None:
    """Its 500 is about the field, since the same request without it is answered."""
    server = scripted(kind="vllm", refuse={"prompt_logprobs": Fault(500)})
    one = verifier(server)
    for _ in range(3):
        assert tiers_of(one) == ["reflection"]

    assert len(server.probes) == 2


# ---------------------------------------------------------------- deadlines


def test_a_trial_that_a_deadline_cut_off_is_not_waited_for_again(scripted: Scripted) -> None:
    """A first log-probability may take long: one question is lost to it, not all."""

    async def slowly(body: Body, call: int) -> Reply:
        await asyncio.sleep(1.5)
        return default_respond(body, call)

    server = scripted(kind="vllm", probe=slowly)
    engine = rag(server, server, partitioner=RankStratified())
    with pytest.raises(NoAnswerError) as raised:
        engine.ask(QUESTION, PASSAGES, deadline=0.8)
    assert raised.value.reason == NoAnswerReason.DEADLINE

    answer = engine.ask(QUESTION, PASSAGES, deadline=0.8)
    assert answer.tier == "reflection"
    assert any("could not be tried yet" in note for note in answer.trace.notes)


# ---------------------------------------------------------------- what a trace says


@pytest.mark.parametrize(
    ("options", "tier", "told"),
    [
        (
            {"kind": "llama.cpp"},
            "reflection",
            r"prompt_logprobs does not work with this server \(0 of \d+ positions\)",
        ),
        (
            {"drops": NO_LOGPROBS},
            "choice",
            r"reflection does not work with this server \(0 alternatives",
        ),
    ],
)
def test_tiers_that_a_trial_ruled_out_are_in_the_trace(
    scripted: Scripted, options: Any, tier: str, told: str
) -> None:
    """A reader of an answer need not guess why its score is not the best there is."""
    judge = scripted(lambda *_: Reply("A"), **options)
    answer = rag(scripted(), judge, fallback="standard").ask(QUESTION, PASSAGES)

    (note,) = [note for note in answer.trace.notes if note.startswith("scored at tier")]
    assert note.startswith(f"scored at tier {tier}: ")
    assert re.search(told, note)


def test_a_tier_that_was_given_up_stays_in_the_trace(scripted: Scripted) -> None:
    """Also for the questions that come long after."""
    judge = scripted(lambda *_: Reply("A", logprobs=None))
    engine = rag(scripted(), judge)
    for _ in range(5):
        answer = engine.ask(QUESTION, PASSAGES)

    assert any("reflection told nothing for 3 questions" in note for note in answer.trace.notes)


def test_the_best_tier_needs_no_note(scripted: Scripted) -> None:
    """Nothing was degraded."""
    server = scripted(kind="vllm")

    assert rag(server, server).ask(QUESTION, PASSAGES).trace.notes == ()


# ---------------------------------------------------------------- giving up


def test_requests_that_always_crash_end_a_tier_as_well(scripted: Scripted) -> None:
    """The trial worked, the real ones do not: three questions are enough to see it."""
    judge = scripted(
        both(lambda body, call: Fault(500) if "prompt_logprobs" in body else default(body, call)),
        kind="vllm",
    )

    def default(body: Body, call: int) -> Reply:
        return default_respond(body, call)

    engine = rag(scripted(), judge)
    asked = [0]
    for _ in range(5):
        assert engine.ask(QUESTION, PASSAGES).tier == "reflection"
        asked.append(len(judge.chats))

    assert [after - before for before, after in pairwise(asked)] == [4, 4, 4, 2, 2]


def test_questions_under_way_give_a_tier_up_once(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that began before it do not count against the next."""
    judge = scripted(lambda *_: Reply("A", logprobs=None))
    one = verifier(judge, tiers=("reflection", "choice"))

    async def ask() -> None:
        await asyncio.gather(*(one.ascore(QUESTION, DRAFTS) for _ in range(9)))

    with caplog.at_level(logging.WARNING):
        asyncio.run(ask())

    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_mute_drafter_is_not_held_against_the_verifier(scripted: Scripted) -> None:
    """A weight of its terms asks for what it does not return; no other tier has it either."""
    drafter = scripted(lambda body, call: replace(default_respond(body, call), logprobs=None))
    judge = scripted(kind="vllm")
    weights = {"reflection": 1.0, "draft": 0.1}
    engine = rag(drafter, judge, scoring=Scoring(weights=weights), selector=AnswerVote())
    for _ in range(4):
        answer = engine.ask(QUESTION, PASSAGES)
        assert answer.fallback_reason is FallbackReason.NO_USABLE_DRAFT

    assert {score.tier for score in answer.trace.scores} == {"prompt_logprobs"}
    assert len([body for body in judge.chats if is_verification(body)]) == 4 * 2


# ---------------------------------------------------------------- nothing to score with


def test_a_pipeline_without_any_tier_left_falls_back(scripted: Scripted) -> None:
    """Its own selector rules out the tiers that need no log-probabilities."""
    judge = scripted(
        lambda body, _: Reply("standard") if body.get("stream") else Reply("A"), drops=NO_LOGPROBS
    )
    drafters = [Endpoint(scripted().base_url, f"m{n}") for n in range(2)]
    engine = rag(drafters, judge, selector=AnswerVote())

    answer = engine.ask(QUESTION, PASSAGES)

    assert (answer.text, answer.fallback_reason) == ("standard", FallbackReason.NO_USABLE_DRAFT)
    with pytest.raises(LogprobsUnavailableError, match="tier='choice'"):
        verifier(judge).score(QUESTION, DRAFTS)


def test_a_disagreement_is_told_where_fallback_is_off(scripted: Scripted) -> None:
    """It is not the same as drafts that nobody could use."""
    server = scripted()
    engine = rag(server, server, scoring=Scoring(tier="agreement"), fallback=None)

    with pytest.raises(NoAnswerError, match=r"no draft was selected \(disagreement\)") as raised:
        engine.ask(QUESTION, PASSAGES)

    assert raised.value.reason == NoAnswerReason.DISAGREEMENT


def test_drafts_that_happen_to_lose_tokens_are_no_wrong_option(scripted: Scripted) -> None:
    """llama.cpp tells nothing of parts of characters; another question's drafts may have none."""

    def respond(body: Body, call: int) -> Reply:
        if body.get("stream"):
            return Reply("standard")
        usage = {"prompt_tokens": 9, "completion_tokens": 99}
        return replace(default_respond(body, call), usage=usage)

    server = scripted(respond, kind="llama.cpp")
    answer = rag(server, server, scoring=Scoring(formula="paper")).ask(QUESTION, PASSAGES)

    assert answer.text == "standard"
    assert any("no draft terms" in note for note in answer.trace.notes)


# ---------------------------------------------------------------- options


def test_replicas_of_one_model_can_be_compared(scripted: Scripted) -> None:
    """The paper's own set-up: five endpoints with the same drafter."""
    replicas = [Endpoint(scripted().base_url, "same") for _ in range(2)]
    judge = scripted(kind="vllm")
    answer = rag(replicas, judge, scoring=Scoring(formula="paper")).ask(QUESTION, PASSAGES)

    assert answer.tier == "prompt_logprobs"
    different = [Endpoint(judge.base_url, name) for name in ("one", "two")]
    with pytest.raises(ConfigurationError, match="different drafting models"):
        rag(different, judge, scoring=Scoring(formula="paper"))


def test_a_selector_says_what_it_needs() -> None:
    """An attribute that is missing is told by its name, before any question."""

    class Nameless:
        async def select(self, pool: Pool) -> None:
            """Never run."""

    model = Endpoint("http://localhost:9")
    with pytest.raises(ConfigurationError, match="selector must say reads_scores"):
        SpeculativeRAG(drafter=model, verifier=model, selector=Nameless())  # type: ignore[arg-type]


def test_tiers_that_ask_about_no_draft_take_no_evidence(scripted: Scripted) -> None:
    """It would be an option without an effect."""
    with pytest.raises(ConfigurationError, match="evidence='passages' does nothing"):
        verifier(scripted(), tiers=("choice",), scoring=Scoring(evidence="passages"))


def test_all_requests_of_a_failed_second_order_are_counted(scripted: Scripted) -> None:
    """What was sent was paid for."""
    turns = iter([0, 1, 1, 1])

    def respond(body: Body, call: int) -> Any:
        if "Draft A" not in body["messages"][0]["content"]:
            return default_respond(body, call)
        even = {"A": math.log(0.5), "B": math.log(0.5)}
        return Fault(503) if next(turns) else Reply("A", alternatives=even)

    server = scripted(respond)
    model = Endpoint(server.base_url, max_attempts=3)
    engine = SpeculativeRAG(drafter=model, verifier=model, num_drafts=2, selector=Listwise())

    answer = engine.ask(QUESTION, PASSAGES)

    assert answer.usage.requests == len(server.chats) == 2 + 1 + 3
    assert any("in one order only" in note for note in answer.trace.notes)


# ---------------------------------------------------------------- secrets and patience


def test_a_tokeniser_that_repeats_a_draft_does_not_get_it_into_the_trace(
    scripted: Scripted,
) -> None:
    """Errors reach logs, and drafts hold what passages say."""
    told = "Canberra was chosen in 1908"
    message = f"cannot tokenize Rationale: {told}\nAnswer: Canberra"
    server = scripted(
        kind="llama.cpp", faults={"/tokenize": Fault(500, body={"error": {"message": message}})}
    )
    one = verifier(server, scoring=Scoring(tier="forced_decoding"))
    with pytest.raises(EndpointUnavailableError, match="cannot tokenize") as raised:
        one.score(QUESTION, [Draft(rationale=told, answer="Canberra")])

    assert told not in str(raised.value)


def test_a_pool_shows_no_text() -> None:
    """It is handed to selectors of other people."""
    pool = Pool(question="a secret question", candidates=(), model=Endpoint("http://localhost:9"))

    assert "secret" not in repr(pool)


def test_a_model_that_is_named_does_not_wait_for_the_list_of_models(scripted: Scripted) -> None:
    """What the list would tell is worth one attempt."""
    server = scripted(kind="vllm", faults={"/v1/models": Fault(503, headers={})})
    one = Verifier(Endpoint(server.base_url, "scripted"))
    started = time.monotonic()

    one.score(QUESTION, DRAFTS[:1])

    assert [path for _, path in server.requests].count("/v1/models") <= 4
    assert time.monotonic() - started < 5


def test_an_option_of_the_users_own_is_never_dropped_in_silence(scripted: Scripted) -> None:
    """The server's refusal is the answer, in its own words."""
    message = "Unsupported parameter: 'chat_template_kwargs'"
    server = scripted(kind="vllm", refuse={"chat_template_kwargs": message})
    model = Endpoint(server.base_url, extra_body={"chat_template_kwargs": {"language": "fr"}})

    with pytest.raises(NoAnswerError, match="chat_template_kwargs"):
        SpeculativeRAG(drafter=model, verifier=model, num_drafts=2).ask(QUESTION, PASSAGES)


@pytest.mark.parametrize("tokeniser", [Fault(503), Fault(close=True)])
def test_a_tokeniser_that_is_away_for_a_moment_is_asked_again(
    scripted: Scripted, tokeniser: Fault
) -> None:
    """Only what it says is remembered."""
    server = scripted(kind="vllm", faults={"/tokenize": tokeniser})
    one = verifier(server)
    one.score(QUESTION, DRAFTS)
    assert "logprob_token_ids" not in server.chats[-1]
    server.faults.clear()
    one.score(QUESTION, DRAFTS)

    assert "logprob_token_ids" in server.chats[-1]


def test_a_verifier_that_begins_with_a_new_line_is_given_room(scripted: Scripted) -> None:
    """Its first token says nothing; the word behind it is the verdict."""

    def respond(body: Body, call: int) -> Reply:
        if not is_verification(body):
            return default_respond(body, call)
        written = [("\n", -0.1), ("Yes", -0.2)][: body["max_tokens"]]
        return Reply(
            "".join(text for text, _ in written),
            logprobs=written,
            alternatives={"\n": -0.1, " ": -3.0} if len(written) == 1 else {},
        )

    server = scripted(respond, probe="respond")
    (trial,) = [t for t in asyncio.run(verifier(server).trials()) if t.tier == "reflection"]

    assert "it writes before it answers" in trial.evidence


# ---------------------------------------------------------------- trials that fail, and then work


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_for_a_moment_is_not_one_without_the_field(
    scripted: Scripted, status: int
) -> None:
    """It would have answered a request without the field as well as one with it."""

    def probed(body: Body, call: int) -> Reply | Fault:
        return default_respond(body, call) if call else Fault(status)

    one = verifier(scripted(kind="vllm", probe=probed))

    assert tiers_of(one) == ["reflection"]
    assert tiers_of(one) == ["prompt_logprobs", "reflection"]


def test_a_busy_server_is_not_one_that_cannot_be_made_to_write(scripted: Scripted) -> None:
    """Its other replies came before it was busy."""
    server = scripted(kind="llama.cpp", refuse={"grammar": Fault(503)})
    one = verifier(server, scoring=Scoring(formula="paper"))

    assert tiers_of(one) == ["prompt_logprobs", "forced_decoding"]
    server.refuse.clear()
    assert tiers_of(one) == ["forced_decoding"]


def test_a_grammar_that_crashes_a_server_is_evidence_of_that_tier_alone(
    scripted: Scripted,
) -> None:
    """Its words are kept, and what it can is known."""
    server = scripted(kind="llama.cpp", refuse={"grammar": Fault(500)})
    trials = {trial.tier: trial for trial in asyncio.run(verifier(server).trials())}

    assert (trials["forced_decoding"].works, trials["reflection"].works) == (False, True)
    assert "HTTP 500" in trials["forced_decoding"].evidence


def test_a_server_that_was_left_in_peace_is_tried_again(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be up by then."""
    server = scripted(kind="vllm", probe=Fault(503))
    one = verifier(server)
    for _ in range(3):
        tiers_of(one)
    server.probe = None
    assert tiers_of(one) == ["reflection"]
    monkeypatch.setattr("specrag_integrations.trials._PATIENCE", 0.0)

    assert tiers_of(one) == ["prompt_logprobs", "reflection"]


def test_a_failure_after_a_trial_that_worked_is_the_first_again() -> None:
    """Two in a row are what ends the patience."""
    busy, fine = EndpointUnavailableError("busy", status_code=503), ChatReply(text="Yes")
    model = ScriptedModel([])

    async def known() -> list[bool]:
        tryout, found = Tryout(model, Scoring()), []
        async with Tasks() as tasks:
            for model.tried in (busy, fine, busy, fine):
                found.append(await tryout.known(("reflection",), tasks) is not None)
        return found

    assert asyncio.run(known()) == [False, True, False, True]


def test_a_late_trial_serves_the_questions_after_it(scripted: Scripted) -> None:
    """No question waits for it any more, until it has come back."""
    waiting = threading.Event()

    async def probed(body: Body, call: int) -> Reply:
        await asyncio.to_thread(waiting.wait, 10)
        return default_respond(body, call)

    server = scripted(kind="vllm", probe=probed)
    one = verifier(server)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(one.ascore(QUESTION, DRAFTS), 0.8))

    def tiers() -> set[str]:
        return {score.tier for score in one.score(QUESTION, DRAFTS)}

    assert tiers() == {"reflection"}
    waiting.set()
    deadline = time.monotonic() + 5
    while tiers() == {"reflection"}:
        assert time.monotonic() < deadline
    assert tiers() == {"prompt_logprobs"}
    assert len(server.probes) == 1


def test_a_trial_that_nobody_waits_for_is_not_sent_again(scripted: Scripted) -> None:
    """It may end, but a server that fails it is left alone once the question is gone."""
    server = scripted(kind="vllm", probe=Fault(503, after=0.6))
    one = Verifier(Endpoint(server.base_url, "scripted", max_attempts=3))

    async def left() -> None:
        asked = asyncio.create_task(one.ascore(QUESTION, DRAFTS))
        assert await asyncio.to_thread(server.wait_for, lambda s: s.probes)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(left())
    time.sleep(1.5)

    assert len(server.probes) == 1


@pytest.mark.parametrize(
    ("weights", "left"),
    [(None, ("choice",)), ({"consistency_answer": 1.0}, ("prompt_logprobs", "choice"))],
)
def test_a_tier_is_used_where_all_that_counts_at_it_can_be_had(weights: Any, left: Any) -> None:
    """Yes and No may come back from no tier, and count at none."""
    trials = [
        Trial(tier="prompt_logprobs", works=True, evidence="45 of 46 positions"),
        Trial(tier="reflection", works=False, evidence="0 alternatives to the first token"),
    ]
    names: Any = ("prompt_logprobs", "reflection", "choice")

    assert working(names, trials, Scoring(weights=weights)) == left


def test_a_verdict_behind_a_new_line_is_the_verdict(scripted: Scripted) -> None:
    """The trial finds out that there is one, and questions leave room for it."""

    def respond(body: Body, _: int) -> Reply:
        written = [("\n", -0.1), ("Yes", -0.2)][: body["max_tokens"]]
        alternatives = {"\n": -0.1, " ": -3.0}
        return Reply(
            "".join(text for text, _ in written), logprobs=written, alternatives=alternatives
        )

    server = scripted(respond, probe="respond")
    one = verifier(server, tiers=("reflection", "agreement"))
    scores = one.score(QUESTION, DRAFTS)

    assert [score.tier for score in scores] == ["reflection"] * 2
    assert None not in [score.value for score in scores]
    assert {body["max_tokens"] for body in server.chats} == {1024}


def test_tiers_below_the_one_in_use_need_no_note(scripted: Scripted) -> None:
    """Nobody would have used them."""
    server = scripted(kind="vllm", drops=("logprobs", "top_logprobs", "logprob_token_ids"))
    one = verifier(server, scoring=Scoring(weights={"consistency_answer": 1.0}))

    async def plan() -> Plan:
        async with Tasks() as tasks:
            return await one.tiers(tasks)

    found = asyncio.run(plan())

    assert [tier.name for tier in found.tiers] == ["prompt_logprobs"]
    assert found.notes == ()


def test_one_draft_without_log_probabilities_is_no_wrong_option(scripted: Scripted) -> None:
    """Another drafter, or another try, had some."""
    span = SpanLogprob(total=-1.0, tokens=2)
    whole = replace(DRAFTS[0], rationale_logprob=span, answer_logprob=span)
    one = verifier(scripted(kind="vllm"), scoring=Scoring(formula="paper"))

    assert [score.value is None for score in one.score(QUESTION, [whole, DRAFTS[1]])] == [
        False,
        True,
    ]
