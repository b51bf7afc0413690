"""Runs of several systems over questions, on a scripted server that speaks real HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer, is_verification

from specrag_integrations import ConfigurationError, Endpoint, EndpointError, Passage
from specrag_integrations.answers import Answer, Trace
from specrag_integrations.confidence import Calibration, Thresholds
from specrag_integrations.drafts import Draft
from specrag_integrations.errors import EvaluationError
from specrag_integrations.evaluation.cache import ReplyCache
from specrag_integrations.evaluation.outcomes import Outcome, Tokens
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.runs import Progress, Run, outcome_of, served
from specrag_integrations.evaluation.systems import (
    GROUPS,
    Models,
    described,
    parse_systems,
    system_named,
)
from specrag_integrations.portal import portal
from specrag_integrations.scores import Score
from specrag_integrations.selection import FallbackReason, Selection
from specrag_integrations.subsets import MultiPerspective, Subset

Scripted = Callable[..., ScriptedServer]
Json = dict[str, Any]


def question(number: int, **fields: Any) -> Question:
    passages = tuple(
        Passage(text=f"Fact {place} tells of river {place}.", id=f"p{place}") for place in range(6)
    )
    return Question(
        **{
            "id": f"q{number}",
            "dataset": "rivers",
            "question": f"Which river is number {number}?",
            "answers": ("river 0",),
            "passages": passages,
            "gold": frozenset({"p0"}),
            **fields,
        }
    )


def text_of(body: Json) -> str:
    return "\n".join(message["content"] for message in body["messages"])


def respond(body: Json, _: int) -> Reply:
    """Draft the river of the first fact; believe in river 0; answer with river 0 otherwise."""
    text = text_of(body)
    if is_verification(body):
        p = 0.9 if "river 0" in body["messages"][1]["content"] else 0.2
        return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)})
    if body.get("stream"):
        if "Write two lines" in text:
            return Reply("Rationale: it says so [1].\nAnswer: river 0")
        return Reply("river 0 [1]")
    if "[1] Fact " not in text:
        return Reply("OK")
    first = text.rsplit("[1] Fact ", 1)[1].split()[0]
    return Reply(f"Rationale: it says so [1].\nAnswer: river {first}")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ReplyCache]:
    cache = ReplyCache(tmp_path / "replies.sqlite")
    yield cache
    cache.close()


def models_of(server: ScriptedServer, cache: ReplyCache, *, fresh: bool = False) -> Models:
    roles = {}
    for role in ("drafter", "verifier"):
        endpoint = Endpoint(server.base_url, request_timeout=5)
        found = served(endpoint, cache=cache, weights=None, fresh=fresh)
        roles[role], _ = portal.run(found)
    server.reset()
    return Models(**roles)


def answered(run: Run, **options: Any) -> list[Outcome]:
    outcomes: list[Outcome] = []
    portal.run(run.answer_all(keep=outcomes.append, **options))
    return outcomes


def run_of(
    server: ScriptedServer, cache: ReplyCache, names: str, *questions: Question, **options: Any
) -> Run:
    return Run(
        questions=questions or (question(0), question(1), question(2)),
        systems=parse_systems(names),
        models=models_of(server, cache, **options),
    )


# -------------------------------------------------------------------- systems


def test_a_name_says_what_a_system_does() -> None:
    """Numbers, samplers, selectors and scores are read from the name, in any order."""
    system = system_named("speculative+vote+m3+k4+anchor2+lead5+only_draft_answer")
    assert system.num_drafts == 3
    assert system.options["passages_per_draft"] == 4
    assert system.options["partitioner"] == MultiPerspective(anchor=2, lead=5)
    assert type(system.options["selector"]).__name__ == "AnswerVote"
    assert system.scoring == {"weights": {"draft_answer": 1.0}}
    assert "vote" in system.description
    assert system_named("drafter_only+top5").top == 5


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("speculativ", "'speculativ' is unknown; there are standard"),
        ("standard+m3", "standard has no 'm3'"),
        ("drafter_only+rationale", "drafter_only has no 'rationale'"),
        ("speculative+quick", "speculative has no 'quick'; it takes mN"),
        ("speculative+random+anchor1", "only multi_perspective has anchor"),
        ("speculative+lead3+disjoint", "only multi_perspective has lead"),
        ("speculative+m0", "'m0' takes a number from 1 to 9999"),
        ("speculative+lead10000", "'lead10000' takes a number from 1 to 9999"),
        ("speculative+m3+m4", "'m4' replaces another part of it"),
        ("speculative+random+disjoint", "'disjoint' replaces another part of it"),
        (" , ", "no system is named"),
    ],
)
def test_a_wrong_name_is_told_with_what_there_is(name: str, told: str) -> None:
    """A misspelt system is a clear error before any model is asked."""
    with pytest.raises(ConfigurationError, match=told.replace("+", r"\+")):
        parse_systems(name)


def test_every_name_of_every_group_makes_an_engine(server: ScriptedServer, tmp_path: Path) -> None:
    """No group names a system that cannot be built, and each is listed once."""
    cache = ReplyCache(tmp_path / "replies.sqlite")
    names = list(GROUPS)
    run = Run(
        questions=[question(0)],
        systems=parse_systems(",".join([*names, *names])),
        models=models_of(server, cache),
    )
    assert len(run.engines()) == len({name for members in GROUPS.values() for name in members})
    assert all(name in described() for name in names)
    cache.close()


def test_a_calibrated_system_needs_a_calibration(server: ScriptedServer, cache: ReplyCache) -> None:
    """The error names the option, before the first question."""
    run = run_of(server, cache, "speculative+calibrated")
    with pytest.raises(ConfigurationError, match="--calibration"):
        run.engines()


# -------------------------------------------------------------------- outcomes


def test_each_system_answers_each_question_in_a_rotated_order(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """No system always goes first."""
    outcomes = answered(run_of(scripted(respond), cache, "standard,drafter_only"))
    assert [(one.id, one.system) for one in outcomes] == [
        ("q0", "standard"),
        ("q0", "drafter_only"),
        ("q1", "drafter_only"),
        ("q1", "standard"),
        ("q2", "standard"),
        ("q2", "drafter_only"),
    ]


def test_an_outcome_tells_what_was_right_what_it_rests_on_and_what_it_took(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """Drafts are right or wrong each, with terms and times; the winner is among them."""
    server = scripted(respond, kind="llama.cpp")
    (outcome,) = answered(run_of(server, cache, "speculative+m3+k2+rank_stratified", question(0)))

    assert outcome.right
    assert outcome.grades is not None
    assert outcome.grades.citation_precision == 1.0
    assert len(outcome.drafts) == 3
    rights = [draft.right for draft in outcome.drafts]
    assert rights == [0 in draft.ranks for draft in outcome.drafts]
    assert not all(rights)
    assert outcome.drafts[outcome.winner or 0].right
    assert [draft.group for draft in outcome.drafts] == [0, 1, 2]
    assert all(draft.value == draft.terms["reflection"] for draft in outcome.drafts)
    assert all("draft_answer" in draft.terms for draft in outcome.drafts)
    assert all(
        draft.arrived and draft.arrived <= (outcome.seconds or 0) for draft in outcome.drafts
    )
    assert outcome.requests == len(server.chats) == 6
    assert outcome.drafter.completion > outcome.verifier.completion > 0
    assert outcome.drafter.busy
    assert sum(outcome.stages.values()) <= (outcome.seconds or 0)
    assert Outcome.from_dict(outcome.to_dict()) == outcome


def test_without_texts_nothing_written_is_left(scripted: Scripted, cache: ReplyCache) -> None:
    """The form for a public repository holds no word of the data or of a model."""
    (outcome,) = answered(run_of(scripted(respond), cache, "speculative", question(0)))
    failed = replace(outcome, error="400 for river 0", passages=("river 0",))
    bare = failed.to_dict(texts=False)
    assert "river" not in str(bare).replace("rivers", "")
    assert Outcome.from_dict(bare).right


def test_a_replayed_outcome_has_no_times(scripted: Scripted, cache: ReplyCache) -> None:
    """Everything but the times comes out the same; asked afresh, the times are back."""
    server = scripted(respond)
    (first,) = answered(run_of(server, cache, "speculative", question(0)))
    (again,) = answered(run_of(server, cache, "speculative", question(0)))
    assert not server.chats
    assert again.replayed
    assert (again.seconds, again.first_token, dict(again.stages)) == (None, None, {})
    assert (again.text, again.winner, again.drafter.completion) == (
        first.text,
        first.winner,
        first.drafter.completion,
    )
    assert first.seconds
    (fresh,) = answered(run_of(server, cache, "speculative", question(0), fresh=True))
    assert fresh.seconds
    assert server.chats


def test_one_replayed_reply_is_enough_to_spoil_the_times(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """Drafts from the cache and a verification that was sent are no measured question."""
    server = scripted(respond)
    run = run_of(server, cache, "speculative", question(0))
    answered(run)
    verifier = models_of(server, cache, fresh=True).verifier
    (half,) = answered(replace(run, models=replace(run.models, verifier=verifier)))
    assert server.chats
    assert all(is_verification(body) for body in server.chats)
    assert half.replayed
    assert (half.seconds, half.verifier.busy, half.drafts[0].arrived) == (None, None, None)


def test_requests_side_by_side_keep_a_model_busy_once(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """Three drafts at the same time cost the hardware the time of one."""
    server = scripted(respond, delay=0.2)
    (outcome,) = answered(run_of(server, cache, "speculative+m3+k2", question(0)))
    one_by_one = sum(draft.draft_seconds for draft in outcome.drafts)
    assert 0.2 <= (outcome.drafter.busy or 0) < 0.8 * one_by_one


def test_systems_that_share_drafts_ask_for_them_once(scripted: Scripted, cache: ReplyCache) -> None:
    """A vote over the same scores sends nothing."""
    server = scripted(respond)
    outcomes = answered(run_of(server, cache, "speculative,speculative+vote", question(0)))
    assert [one.replayed for one in outcomes] == [False, True]
    assert len(server.chats) == outcomes[0].requests


def test_each_model_pays_for_what_it_writes(scripted: Scripted, cache: ReplyCache) -> None:
    """A drafter that answers alone is no verifier, and a verifier that drafts is no drafter."""
    server = scripted(respond)
    alone, itself = answered(
        run_of(server, cache, "drafter_only,speculative+self_drafting", question(0))
    )
    assert (alone.verifier.prompt, itself.drafter.prompt) == (0, 0)
    assert alone.drafter.prompt > 0
    assert itself.verifier.completion > alone.drafter.completion


def test_each_part_is_played_by_its_model(scripted: Scripted, cache: ReplyCache) -> None:
    """Standard RAG asks the verifier alone, drafter_only the drafter alone."""
    drafter, verifier = scripted(respond), scripted(respond)
    models = Models(
        drafter=models_of(drafter, cache).drafter, verifier=models_of(verifier, cache).verifier
    )
    asked = {}
    disjoint = "speculative+m5+k1+disjoint"  # whose drafts all differ
    for name in ("standard", "drafter_only", disjoint, f"{disjoint}+self_drafting"):
        for server in (drafter, verifier):
            server.reset()
        answered(Run(questions=[question(0)], systems=parse_systems(name), models=models))
        asked[name] = [
            (sum(not is_verification(body) for body in server.chats), len(server.chats))
            for server in (drafter, verifier)
        ]
    assert asked == {
        "standard": [(0, 0), (1, 1)],
        "drafter_only": [(1, 1), (0, 0)],
        disjoint: [(5, 5), (0, 5)],
        f"{disjoint}+self_drafting": [(0, 0), (5, 5)],
    }


def test_a_draft_is_right_if_it_holds_the_reference(scripted: Scripted, cache: ReplyCache) -> None:
    """Drafts are judged as answers are, and not by their wording."""
    server = scripted(Reply("Rationale: it says so [1].\nAnswer: It is river 0, they say."))
    (outcome,) = answered(run_of(server, cache, "speculative", question(0)))
    assert all(draft.right for draft in outcome.drafts)
    assert all(0 < draft.f1 < 1 for draft in outcome.drafts)


def test_a_calibrated_system_acts_on_its_thresholds(scripted: Scripted, cache: ReplyCache) -> None:
    """A draft below `min_confidence` is not the answer, but the one that was selected."""
    server = scripted(respond)
    setup = run_of(server, cache, "speculative", question(0)).fingerprint()
    thresholds = Thresholds(
        min_confidence=0.95,
        accept_confidence=None,
        target=0.9,
        asked=0.9,
        delta=0.1,
        questions=50,
        accepted=30,
        right=30,
    )
    calibration = Calibration(
        fingerprint=replace(setup, tier="reflection"),
        kind="isotonic",
        coefficients={"reflection": 1.0},
        knots=tuple((math.log(n / 100), n / 100) for n in range(1, 100)),
        thresholds=thresholds,
    )
    run = run_of(server, cache, "speculative+calibrated", question(0))
    (outcome,) = answered(replace(run, models=replace(run.models, calibration=calibration)))
    assert outcome.fallback == FallbackReason.LOW_CONFIDENCE
    best = max(outcome.drafts, key=lambda draft: draft.value or -math.inf)
    assert best.confidence == pytest.approx(0.9, abs=0.02)
    assert outcome.winner == best.index


def test_scores_of_a_tier_that_was_left_are_not_compared() -> None:
    """A question that descended a tier has scores of both, and was decided by the last ones."""
    drafts = tuple(
        Draft(
            rationale="it says so",
            answer=f"river {index}",
            subset=Subset(index=index, ranks=(index,), passages=()),
        )
        for index in range(2)
    )
    scores = (
        Score(draft=0, value=-1.0, tier="reflection", terms={"reflection": -1.0}),
        Score(draft=1, value=None, tier="agreement"),
        Score(draft=0, value=0.5, tier="agreement"),
        Score(draft=1, value=-2.0, tier="reflection", terms={"reflection": -2.0}),
    )
    answer = Answer(
        text="river 0",
        selection=Selection(winner=0, ranking=(0,)),
        tier="agreement",
        trace=Trace(passages=(), drafts=drafts, scores=scores),
    )
    outcome = outcome_of(answer, system_named("speculative"), question(0), replayed=False)
    assert [draft.value for draft in outcome.drafts] == [0.5, None]
    assert not any(draft.terms for draft in outcome.drafts)


def test_a_server_that_hangs_does_not_fill_the_run_with_failures(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """After some failures in a row the run ends; a question that fails alone does not end it."""
    server = scripted(respond)
    run = run_of(server, cache, "standard", *(question(n) for n in range(12)))
    server.respond = Fault(400)
    outcomes: list[Outcome] = []
    with pytest.raises(EvaluationError, match="5 failures in a row, at last: .*400"):
        portal.run(run.answer_all(keep=outcomes.append))
    assert not outcomes
    assert len(server.chats) == 5

    server.respond = respond
    run = run_of(server, cache, "standard", *(question(n) for n in range(12)))
    server.respond = lambda body, call: Fault(400) if call % 2 else respond(body, call)
    assert sum(one.failed for one in answered(run)) == 6


def test_a_rationale_is_not_part_of_the_answer(scripted: Scripted, cache: ReplyCache) -> None:
    """The answer is what stands behind the rationale, and begins when it is reached."""
    server = scripted(respond)
    outcomes = answered(run_of(server, cache, "standard+rationale,standard", question(0)))
    texts = {one.system: one.text for one in outcomes}
    assert texts == {"standard+rationale": "river 0", "standard": "river 0 [1]"}
    # What a rationale cites is what its answer rests on, as with a draft that won.
    assert all(one.grades and one.grades.citation_precision is not None for one in outcomes)
    reasoned = outcomes[0]
    assert reasoned.first_token
    assert reasoned.first_token <= (reasoned.seconds or 0)

    server.respond = Reply("Rationale: it says so [1].\nAnswer: river 0", chunk_delay=0.05)
    (slow,) = answered(run_of(server, cache, "standard+rationale", question(0), fresh=True))
    assert slow.first_token
    assert slow.first_token > 0.3  # six pieces before the answer


def test_claims_are_asked_for_their_label(scripted: Scripted, cache: ReplyCache) -> None:
    """Every system is told the labels of the set."""
    server = scripted(respond)
    claim = question(0, kind="label", labels=("SUPPORTS", "REFUTES"), answers=("SUPPORTS",))
    answered(run_of(server, cache, "standard,standard+rationale,drafter_only,speculative", claim))
    asked = [body for body in server.chats if not is_verification(body)]
    assert len(asked) >= 5
    assert all("SUPPORTS, REFUTES" in text_of(body) for body in asked)


def test_only_the_first_passages_are_read_where_so_named(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """`+top2` cuts the ranking."""
    server = scripted(respond)
    answered(run_of(server, cache, "standard+top2", question(0)))
    assert "Fact 1 " in text_of(server.chats[0])
    assert "Fact 2 " not in text_of(server.chats[0])


def test_earlier_turns_are_sent(scripted: Scripted, cache: ReplyCache) -> None:
    """A question that refers to earlier ones is asked with them."""
    from specrag_integrations.models import user

    server = scripted(respond)
    answered(run_of(server, cache, "standard", question(0, history=(user("About the Nile."),))))
    assert "About the Nile." in text_of(server.chats[0])


def test_a_fallback_is_timed_also_where_standard_rag_has_just_asked_the_same(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """Else the times would lack just the questions on which speculation failed."""

    def abstaining(body: Json, call: int) -> Reply:
        if body.get("stream"):
            return Reply("river 0 [1]")
        return Reply("Rationale: no passage tells.\nAnswer: unknown")

    server = scripted(abstaining)
    standard, fallen = answered(run_of(server, cache, "standard,speculative", question(0)))
    assert fallen.fallback == "no_usable_draft"
    assert (standard.replayed, fallen.replayed) == (False, False)
    assert fallen.seconds
    assert sum(bool(body.get("stream")) for body in server.chats) == 2


def test_tokens_that_a_server_does_not_count_are_unknown(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """Not zero: nothing is free because nobody counted it."""
    server = scripted(lambda body, call: replace(respond(body, call), usage=None))
    (outcome,) = answered(run_of(server, cache, "standard", question(0)))
    assert (outcome.verifier.prompt, outcome.verifier.completion) == (None, None)
    assert outcome.drafter.prompt == 0


def test_a_name_stands_for_the_same_as_long_as_its_setup_does() -> None:
    """What a system does today has a hash: options, labels and calibration change it."""
    models = Models(drafter=None, verifier=None)  # type: ignore[arg-type]
    claims = question(0, kind="label", labels=("yes", "no"))
    names = ["speculative", "speculative+m2", "speculative+vote", "speculative+anchor1", "standard"]
    setups = [system_named(name).setup(models, question(0)) for name in names]
    setups.append(system_named("speculative").setup(models, claims))
    assert len(set(setups)) == len(setups)
    assert system_named("speculative").setup(models, question(5)) == setups[0]


# -------------------------------------------------------------------- going on, and stopping


def test_what_is_done_is_not_asked_again(scripted: Scripted, cache: ReplyCache) -> None:
    """A run that goes on leaves out what it has, and counts it as done."""
    server = scripted(respond)
    seen: list[Progress] = []
    done = {("rivers", "q0", "standard"), ("rivers", "q2", "standard")}
    (outcome,) = answered(run_of(server, cache, "standard"), done=done, show=seen.append)
    assert outcome.id == "q1"
    assert len(server.chats) == 1
    assert [(one.done, one.total) for one in seen] == [(2, 3)]


def test_the_time_left_is_told(scripted: Scripted, cache: ReplyCache) -> None:
    """From the second outcome on there is an estimate, which falls."""
    seen: list[Progress] = []
    server = scripted(respond, delay=0.05)
    answered(run_of(server, cache, "standard"), show=seen.append)
    left = [one.seconds_left for one in seen]
    assert left[0] is None
    assert 0.05 <= (left[2] or 0) < (left[1] or 0)


@pytest.mark.parametrize("system", ["standard", "speculative"])
def test_a_dead_endpoint_ends_the_run_and_what_was_done_is_kept(
    scripted: Scripted, cache: ReplyCache, system: str
) -> None:
    """A question that nobody could answer is no outcome, also where a fallback would hide it."""
    server = scripted(respond)
    run = run_of(server, cache, system)
    outcomes: list[Outcome] = []

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        server.respond = Fault(503)

    with pytest.raises(EndpointError, match="503"):
        portal.run(run.answer_all(keep=keep))
    assert [one.id for one in outcomes] == ["q0"]


def test_a_drafter_that_dies_is_not_papered_over_by_the_fallback(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """Standard RAG could answer, and the comparison would be with itself."""
    drafter, verifier = scripted(respond), scripted(respond)
    models = Models(
        drafter=models_of(drafter, cache).drafter, verifier=models_of(verifier, cache).verifier
    )
    drafter.respond = Fault(503)
    run = Run(questions=[question(0)], systems=parse_systems("speculative"), models=models)
    with pytest.raises(EndpointError, match="503"):
        answered(run)


def test_a_question_that_fails_is_an_outcome_with_its_reason(
    scripted: Scripted, cache: ReplyCache
) -> None:
    """A server that refuses one question does not end the run; the answer counts as wrong.

    What it took is not known.
    """
    server = scripted(
        lambda body, call: Fault(400) if "number 1" in text_of(body) else respond(body, call)
    )
    outcomes = answered(run_of(server, cache, "standard"))
    assert [one.right for one in outcomes] == [True, False, True]
    assert "400" in (outcomes[1].error or "")
    assert (outcomes[1].drafter, outcomes[1].verifier) == (
        Tokens(prompt=None, completion=None),
    ) * 2
