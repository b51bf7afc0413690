"""Calibrating: P(correct) that is one, and thresholds that keep their promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import Reply, ScriptedServer, is_verification
from sklearn.isotonic import IsotonicRegression

from specrag_integrations import (
    AnswerVote,
    Calibration,
    ConfigurationError,
    Disjoint,
    Endpoint,
    InputError,
    Listwise,
    Passage,
    SpeculativeRAG,
)
from specrag_integrations.confidence import Fingerprint
from specrag_integrations.evaluation import calibrating
from specrag_integrations.evaluation.cache import CachedModel, ReplyCache
from specrag_integrations.evaluation.calibrating import (
    GRID,
    LEAST_QUESTIONS,
    Pair,
    Replay,
    calibrate,
    find_thresholds,
)
from specrag_integrations.evaluation.outcomes import DraftOutcome, Grades, Outcome
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.runs import Run
from specrag_integrations.evaluation.systems import Models, system_named

Rng = np.random.Generator
Seen = tuple[float, bool]

GRADES = Grades(right=True, contained=True, exact=True, f1=1.0, words=1)


def logistic(x: float) -> float:
    """Return the logistic function."""
    return 1 / (1 + math.exp(-x))


def draft(index: int, *, right: bool, reflection: float, **changes: Any) -> DraftOutcome:
    """Return a scored draft with an answer of its own."""
    terms = {"reflection": reflection, **changes.pop("terms", {})}
    made = DraftOutcome(
        index=index, ranks=(index,), right=right, group=index, terms=terms, value=reflection
    )
    return replace(made, **changes)


def outcome(number: int, drafts: Sequence[DraftOutcome], **changes: Any) -> Outcome:
    """Return what a system made of a question."""
    made = Outcome(
        dataset="rivers",
        id=str(number),
        system="speculative",
        tier="reflection",
        grades=GRADES,
        drafts=tuple(drafts),
    )
    return replace(made, **changes)


def world(
    rng: Rng,
    questions: int,
    *,
    p_right: Callable[[float], float] = lambda x: logistic(1.0 + 1.5 * x),
    noise: bool = False,
    alone: bool = False,
) -> list[Outcome]:
    """Return questions of unlike difficulty whose drafts are right with a known probability.

    `p_right` is of `reflection`, or with `noise` of a term beside it, reflection telling nothing;
    `alone`, there is no other term.
    """
    made = []
    for number in range(questions):
        hard = rng.normal()
        drafts = []
        for index in range(4):
            x = -abs(0.7 * hard + rng.normal())
            right = bool(rng.random() < p_right(x))
            terms = {"draft_answer": x} if noise else {"draft_answer": -rng.random()}
            reflection = -rng.random() if noise else x
            terms = {} if alone else terms
            drafts.append(
                draft(
                    index,
                    right=right,
                    reflection=reflection,
                    terms=terms,
                    draft_seconds=float(rng.random()),
                )
            )
        made.append(outcome(number, drafts))
    return made


# ---------------------------------------------------------------- the promise


def population(rng: Rng, questions: int) -> Replay:
    """Return a replay of questions whose confidences are too high, and blind to how hard they are.

    The first draft to come is less often right than the best of all.
    """
    hard = rng.normal(size=(questions, 1)) * 1.2
    strength = 0.8 + hard + rng.normal(size=(questions, 4)) * 1.2
    right = rng.random((questions, 4)) < 1 / (1 + np.exp(-1.6 * strength))
    noisy = 1.6 * strength + rng.normal(size=(questions, 4)) * 0.8 + 0.3
    confidence = 1 / (1 + np.exp(-noisy))
    best = confidence.argmax(axis=1)
    rows = np.arange(questions)
    return Replay.of_confidences(
        list(zip(confidence[rows, best].tolist(), right[rows, best].tolist(), strict=True)),
        [
            list(zip(confidence[row].tolist(), right[row].tolist(), strict=True))
            for row in range(questions)
        ],
    )


def precision(replay: Replay, pair: Pair) -> float:
    """Return the share of right answers among the accepted."""
    accepted, right = replay.accepted(pair)
    return right / accepted if accepted else 1.0


def naive_thresholds(testing: Replay, target: float) -> Pair:
    """Return the lowest threshold that looks precise enough, used for both."""
    pairs = [Pair(least=at, enough=at) for at in GRID]
    return next((pair for pair in pairs if precision(testing, pair) >= target), pairs[-1])


def test_the_promise_is_broken_no_more_often_than_delta() -> None:
    """Over 300 samples, for both thresholds together and for `min_confidence` alone.

    Thresholds that only look precise enough on their sample break it about every other time.
    """
    rng = np.random.default_rng(7)
    truth = population(rng, 30_000)
    samples, target, delta = 300, 0.9, 0.2
    broken = naive = attained = early = 0
    for _ in range(samples):
        learning, testing = population(rng, 60), population(rng, 60)
        found = find_thresholds(learning, testing, target=target, delta=delta).thresholds
        if found is not None:
            both = Pair(least=found.min_confidence, enough=found.accept_confidence)
            real = min(precision(truth, pair) for pair in (both, replace(both, enough=None)))
            broken += real < found.target
            attained += found.attained
            early += found.accept_confidence is not None
        naive += precision(truth, naive_thresholds(testing, target)) < target

    slack = 2 * math.sqrt(delta * (1 - delta) / samples)
    assert broken / samples <= delta + slack
    assert naive / samples > delta + slack
    assert attained / samples > 0.3  # it is not kept by promising nothing
    assert early / samples > 0.3


@pytest.mark.parametrize(("accepted", "attained"), [(22, True), (21, False)])
def test_nine_of_ten_at_a_tenth_takes_22_without_an_error(accepted: int, attained: bool) -> None:
    """With fewer, the highest precision that they do promise is named, and how many it takes."""
    best: list[Seen] = [(0.9, True)] * accepted + [(0.1, False)] * 30
    replay = Replay.of_confidences(best, [[one] for one in best])
    found = find_thresholds(replay, replay, target=0.9, delta=0.1)

    assert found.thresholds is not None
    assert found.thresholds.attained is attained
    assert found.thresholds.target == (0.9 if attained else 0.89)
    assert (found.thresholds.asked, found.needed) == (0.9, None if attained else 22)
    assert found.bound == pytest.approx(0.1 ** (1 / accepted))
    assert 0.1 < found.thresholds.min_confidence <= 0.9
    assert (found.accepted, found.right, found.precision) == (accepted, accepted, 1.0)


def test_more_questions_do_not_help_where_the_drafts_are_wrong() -> None:
    """And where not one accepted answer is right, there are no thresholds at all."""
    half: list[Seen] = [(0.9, True), (0.9, False)] * 30
    none: list[Seen] = [(0.9, False)] * 60
    found = [
        find_thresholds(replay, replay, target=0.9, delta=0.1)
        for replay in (
            Replay.of_confidences(seen, [[one] for one in seen]) for seen in (half, none)
        )
    ]

    assert [one.needed for one in found] == [None, None]
    assert found[0].thresholds is not None
    assert 0.3 < found[0].thresholds.target < 0.5
    assert (found[1].thresholds, found[1].bound) == (None, None)


def test_early_stops_that_are_right_do_not_hide_winners_that_are_wrong() -> None:
    """Both policies must attain the target: more questions do not help where one never will."""
    best: list[Seen] = [(0.9, True), (0.9, False)] * 30
    replay = Replay.of_confidences(best, [[(0.9, True)]] * 60)
    found = find_thresholds(replay, replay, target=0.9, delta=0.1)

    assert (found.accepted, found.right, found.early) == (60, 60, 60)
    assert found.thresholds is not None
    assert (found.thresholds.attained, found.needed) == (False, None)


def test_how_many_it_takes_grows_with_the_errors() -> None:
    """At the precision that was seen."""
    seen: list[Seen] = [(0.9, True)] * 38 + [(0.9, False)] * 2
    replay = Replay.of_confidences(seen, [[one] for one in seen])
    found = find_thresholds(replay, replay, target=0.9, delta=0.1)

    assert found.needed is not None
    assert 60 < found.needed < 160


def test_nothing_is_learnt_from_the_half_that_tests() -> None:
    """The order of the tests and the choice among what passed are those of the other half."""
    low: list[Seen] = [(0.3, True)] * 60
    high: list[Seen] = [(0.8, True)] * 40 + [(0.3, False)] * 20
    learning, testing = (Replay.of_confidences(seen, [[s] for s in seen]) for seen in (low, high))
    found = find_thresholds(learning, testing, target=0.9, delta=0.1)

    # All below 0.3 look best at first, and what comes first fails: nothing above is tried then.
    assert found.thresholds is not None
    assert found.thresholds.min_confidence <= 0.3
    assert not found.thresholds.attained


def test_both_policies_are_tested() -> None:
    """Thresholds promise as much for `min_confidence` alone as for both together."""
    # The first draft is right and accepted early; the winner among all is wrong.
    best: list[Seen] = [(0.9, False)] * 60
    replay = Replay.of_confidences(best, [[(0.9, True)]] * 60)

    assert replay.accepted(Pair(least=0.5, enough=0.5)) == (60, 60)
    assert replay.accepted(Pair(least=0.5, enough=None)) == (60, 0)
    assert find_thresholds(replay, replay, target=0.9, delta=0.1).thresholds is None


def test_without_early_stops_all_drafts_are_awaited() -> None:
    """No threshold ends the work then, although all first drafts would be right."""
    seen: list[Seen] = [(0.9, True)] * 60
    replay = Replay.of_confidences(seen, [[one] for one in seen])
    either = [
        find_thresholds(replay, replay, target=0.9, delta=0.1, early_stops=allowed)
        for allowed in (True, False)
    ]

    assert [one.early for one in either] == [60, 0]
    assert [one.thresholds and one.thresholds.attained for one in either] == [True, True]
    assert either[1].thresholds is not None
    assert either[1].thresholds.accept_confidence is None


# ---------------------------------------------------------------- the policy


def as_told() -> Calibration:
    """Return a calibration that takes P(Yes) at its word, in hundredths."""
    return Calibration(
        fingerprint=Fingerprint(),
        kind="isotonic",
        coefficients={"reflection": 1.0},
        knots=tuple((math.log(n / 100), n / 100) for n in range(1, 100)),
    )


def replayed(drafts: Sequence[DraftOutcome]) -> Replay:
    """Replay one question."""
    question = calibrating._Question(dataset="d", drafts=tuple(drafts))
    winners = calibrating._winners([question], calibrating.BestScore())
    return Replay.of([question], winners, as_told())


def test_the_first_to_arrive_is_accepted() -> None:
    """By the measured arrival where all are known, else by the seconds that each draft took."""
    one = draft(0, right=False, reflection=math.log(0.8), draft_seconds=1.0, verify_seconds=1.0)
    other = draft(1, right=True, reflection=math.log(0.9), draft_seconds=0.5, verify_seconds=1.0)
    pair = Pair(least=0.6, enough=0.75)

    assert replayed([one, other]).accepted(pair) == (1, 1)
    one, other = replace(one, arrived=1.0), replace(other, arrived=2.0)
    assert replayed([one, other]).accepted(pair) == (1, 0)
    assert replayed([one, replace(other, arrived=None)]).accepted(pair) == (1, 1)
    assert replayed([one, other]).accepted(replace(pair, enough=0.85)) == (1, 1)
    assert replayed([one, other]).accepted(replace(pair, enough=None)) == (1, 1)
    assert replayed([one, other]).accepted(Pair(least=0.95, enough=None)) == (0, 0)


def test_a_draft_that_was_cut_off_is_not_accepted_early_in_a_replay_either() -> None:
    """It ranks below the whole ones, too."""
    cut = draft(0, right=True, reflection=math.log(0.9), truncated=True)
    whole = draft(1, right=False, reflection=math.log(0.7), draft_seconds=1.0)
    replay = replayed([cut, whole])

    assert replay.stopped(Pair(least=0.6, enough=0.75)) == 0
    assert replay.accepted(Pair(least=0.6, enough=0.75)) == (1, 0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize(
    "p_yes", [(0.5, 0.7, 0.9, 0.85), (0.1, 0.7, 0.6, 0.3), (0.5, 0.2, 0.4, 0.1)]
)
def test_what_is_replayed_is_what_the_engine_does(
    scripted: Callable[..., ScriptedServer], p_yes: tuple[float, ...], order: tuple[int, ...]
) -> None:
    """The same draft is accepted, or none, for the same scores in the same order of arrival."""

    def respond(body: dict[str, Any], _: int) -> Reply:
        if body.get("stream"):
            return Reply("standard")
        n = int(str(body["messages"]).split("river ")[1][0])
        if is_verification(body):
            labels = {"Yes": math.log(p_yes[n]), "No": math.log(1 - p_yes[n])}
            return Reply("Yes", alternatives=labels)
        text = f"Rationale: [1] says so.\nAnswer: river {n}"
        return Reply(text, delay=0.25 * order.index(n))

    endpoint = Endpoint(scripted(respond).base_url, "scripted")
    thresholds = {"least": 0.6, "enough": 0.8}
    with SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=4,
        passages_per_draft=1,
        partitioner=Disjoint(),
        calibration=as_told(),
        min_confidence=thresholds["least"],
        accept_confidence=thresholds["enough"],
    ) as rag:
        passages = [Passage(text=f"Fact {n} tells of river {n}.") for n in range(4)]
        answer = rag.ask("Which river?", passages)

    assert answer.selection is not None
    winner = answer.selection.winner
    for right in range(4):
        drafts = [
            draft(n, right=n == right, reflection=math.log(p), arrived=float(order.index(n)))
            for n, p in enumerate(p_yes)
        ]
        replay = replayed(drafts)
        assert replay.accepted(Pair(**thresholds)) == (winner is not None, winner == right)


# ---------------------------------------------------------------- the probability


def test_a_confidence_is_the_probability_of_being_right() -> None:
    """On many questions the truth is found again, in the terms that tell it."""
    report = calibrate(world(np.random.default_rng(1), 2000), fingerprint=Fingerprint())
    found = report.calibration

    for x in (-3.0, -1.0, -0.5, -0.1):
        p = found.probability({"reflection": x, "draft_answer": -0.5})
        assert p == pytest.approx(logistic(1.0 + 1.5 * x), abs=0.06)
    assert report.before is not None
    assert report.after is not None
    assert report.after.ece < 0.06
    assert report.after.log_loss < report.before.log_loss
    assert report.after.n == 1000
    assert (found.questions, found.fingerprint.tier) == (1000, "reflection")
    assert found.thresholds is not None
    assert found.thresholds.questions == 1000


def steps(x: float) -> float:
    """Return a probability that no logistic function has."""
    return 0.95 if x > -0.3 else 0.3


def test_what_is_not_logistic_is_fitted_by_steps() -> None:
    """Whichever loses less on questions it was not fitted on."""
    rng = np.random.default_rng(2)
    bent = calibrate(world(rng, 600, p_right=steps, alone=True), fingerprint=Fingerprint())
    smooth = calibrate(world(rng, 600, alone=True), fingerprint=Fingerprint())

    assert bent.calibration.kind == "isotonic"
    assert bent.calibration.probability({"reflection": -0.1}) == pytest.approx(0.95, abs=0.05)
    assert bent.calibration.probability({"reflection": -1.5}) == pytest.approx(0.3, abs=0.08)
    assert smooth.calibration.kind == "logistic"


def test_the_file_says_what_scikit_learn_would() -> None:
    """Its knots are read by straight lines, as those of its isotonic regression are."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=200)
    fitted = IsotonicRegression(y_min=0.01, y_max=0.99, out_of_bounds="clip")
    fitted.fit(x, rng.random(200) < 1 / (1 + np.exp(-2 * x)))
    knots = zip(fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist(), strict=True)
    mine = replace(as_told(), knots=tuple(knots))

    for at in np.linspace(-5, 5, 101):
        expected = float(fitted.predict([at])[0])
        assert mine.probability({"reflection": float(at)}) == pytest.approx(expected, abs=1e-12)


def test_a_question_counts_once() -> None:
    """However many drafts it has: each has its share of the question's weight."""
    rng = np.random.default_rng(4)
    made = []
    for number in range(300):
        many = number % 2 == 0
        # Where there are many drafts, all are wrong.
        drafts = [
            draft(index, right=not many and bool(rng.random() < 0.8), reflection=-rng.random())
            for index in range(8 if many else 1)
        ]
        made.append(outcome(number, drafts))
    found = calibrate(made, fingerprint=Fingerprint()).calibration

    assert found.probability({"reflection": -0.5}) == pytest.approx(0.4, abs=0.1)


# ---------------------------------------------------------------- weights


def test_weights_are_fitted_where_they_choose_better() -> None:
    """On questions they were not fitted on; the scores and thresholds are theirs then."""
    made = world(np.random.default_rng(5), 400, noise=True)
    report = calibrate(made, fingerprint=Fingerprint(weights={}))
    weights = report.calibration.weights

    assert weights["draft_answer"] > 0.8
    assert sum(map(abs, weights.values())) == pytest.approx(1.0, abs=1e-3)
    assert report.current_efficiency is not None
    assert report.fitted_efficiency is not None
    assert report.fitted_efficiency.interval.value > report.current_efficiency.interval.value + 0.2
    assert report.notes == ()


def test_weights_that_the_system_sets_are_kept() -> None:
    """Whatever would choose better: it is deployed with its own, and the file must go with them."""
    made = world(np.random.default_rng(5), 400, noise=True)
    own = {"reflection": 1.0, "draft_answer": 1.0}
    report = calibrate(made, fingerprint=Fingerprint(weights=own))

    assert report.calibration.weights == own
    assert report.fitted_efficiency is None
    assert report.notes == ()


@pytest.mark.parametrize(
    "options",
    ["", "+answer_first", "+evidence", "+reflection", "+with_draft", "+only_draft_answer"],
)
def test_a_file_goes_with_the_system_it_was_made_of(
    server: ScriptedServer, tmp_path: Path, options: str
) -> None:
    """Under the same name: whatever its scoring asks, and wherever its weights are from."""
    with closing(ReplyCache(tmp_path / "replies")) as cache:
        model = CachedModel(Endpoint(server.base_url, "scripted"), cache=cache, identity="scripted")
        models, system = Models(drafter=model, verifier=model), f"speculative{options}"
        run = Run(questions=[ASKED], systems=[system_named(system)], models=models)
        setup = run.fingerprint()
        made = [
            replace(one, drafts=tuple(with_draft_term(draft) for draft in one.drafts))
            for one in world(np.random.default_rng(5), 400, noise=True)
        ]
        found = calibrate(made, fingerprint=replace(setup, tier="reflection")).calibration
        system_named(f"{system}+calibrated").engine(replace(models, calibration=found), ASKED)

    own = setup.weights
    assert found.weights == own if own else found.weights["draft_answer"] > 0.8


ASKED = Question(
    id="1", dataset="d", question="Q?", answers=("a",), passages=(Passage(text="t", id="1"),)
)


def with_draft_term(draft: DraftOutcome) -> DraftOutcome:
    """Return the same with the term that is the mean of the drafter's two."""
    return replace(draft, terms={**draft.terms, "draft": draft.terms["draft_answer"]})


@pytest.mark.parametrize("size", [0.1, 1e6])
def test_a_spread_of_nothing_but_rounding_is_none(size: float) -> None:
    """A term that is constant up to rounding has no coefficient, as one that is exactly so."""
    rng = np.random.default_rng(8)

    def calibrated(jitter: float) -> Calibration:
        made = [
            replace(one, drafts=tuple(constant(draft, jitter) for draft in one.drafts))
            for one in world(np.random.default_rng(8), 200)
        ]
        return calibrate(made, fingerprint=Fingerprint(formula="paper")).calibration

    def constant(draft: DraftOutcome, jitter: float) -> DraftOutcome:
        value = -size * (1 + jitter * float(rng.normal()))
        return replace(draft, terms={**draft.terms, "draft_answer": value})

    for found in (calibrated(0.0), calibrated(1e-13)):
        assert found.coefficients["draft_answer"] == 0.0
        assert found.coefficients["reflection"] == pytest.approx(1.5, abs=0.6)


def test_weights_that_choose_no_better_are_left_out() -> None:
    """The score is the one the drafts came with."""
    report = calibrate(world(np.random.default_rng(9), 400), fingerprint=Fingerprint(weights={}))

    assert not report.calibration.weights
    assert report.current_efficiency is not None
    assert report.fitted_efficiency is not None
    assert report.fitted_efficiency.interval.value < report.current_efficiency.interval.value
    assert "choose no better" in report.notes[0]


def test_the_papers_product_has_no_weights() -> None:
    """And no steps on a sum: its probability is a function of the terms."""
    made = world(np.random.default_rng(5), 400, noise=True)
    report = calibrate(made, fingerprint=Fingerprint(formula="paper"))

    assert report.calibration.weights == {}
    assert report.calibration.kind == "logistic"
    assert report.notes == ()


def test_the_papers_product_is_calibrated_without_an_early_stop() -> None:
    """It compares all drafts, so that its engine takes no `accept_confidence`."""
    made = world(np.random.default_rng(5), 400, p_right=lambda x: 0.97 if x > -1.5 else 0.5)
    found = {
        formula: calibrate(made, fingerprint=Fingerprint(formula=formula)).calibration.thresholds
        for formula in ("weighted", "paper")
    }

    assert all(one is not None and one.attained for one in found.values())
    assert {formula: bool(one and one.accept_confidence) for formula, one in found.items()} == {
        "weighted": True,
        "paper": False,
    }


def test_few_contested_questions_give_no_weights() -> None:
    """The note says how many there were, and how many it takes."""
    report = calibrate(world(np.random.default_rng(7), 60), fingerprint=Fingerprint())

    assert report.calibration.weights == {}
    assert report.fitted_efficiency is None
    assert "30 are needed" in report.notes[0]


def test_scores_that_tell_nothing_are_told_of() -> None:
    """The confidence is compared with the share of right answers, the same for every question."""
    blind = world(np.random.default_rng(1), 200, p_right=lambda _: 0.5)
    told = calibrate(world(np.random.default_rng(3), 200), fingerprint=Fingerprint())

    report = calibrate(blind, fingerprint=Fingerprint())

    assert report.after is not None
    assert any("tells no more than the share of right answers" in note for note in report.notes)
    assert not any("tells no more" in note for note in told.notes)


# ---------------------------------------------------------------- what goes in, what comes out


def test_the_same_outcomes_give_the_same_calibration() -> None:
    """In any order of their systems' files; another seed splits them otherwise."""
    made = world(np.random.default_rng(8), 120)
    first, again, other = (
        calibrate(made, fingerprint=Fingerprint(), seed=seed, demonstration=True)
        for seed in (0, 0, 1)
    )

    assert first == again
    assert first.calibration != other.calibration
    assert first.calibration.demonstration
    assert first.calibration.fingerprint.selector == "BestScore()"


def test_the_engines_own_selector_is_replayed() -> None:
    """A vote takes another winner than the best score, and stands in the fingerprint."""
    rng = np.random.default_rng(9)
    made = []
    for number in range(100):
        good = bool(rng.random() < 0.7)
        pair = [draft(n, right=good, reflection=-0.6 - 0.1 * rng.random(), group=0) for n in (0, 1)]
        made.append(outcome(number, [*pair, draft(2, right=not good, reflection=-0.5, group=1)]))
    best = calibrate(made, fingerprint=Fingerprint())
    voted = calibrate(made, fingerprint=Fingerprint(), selector=AnswerVote())
    question = calibrating._Question(dataset="d", drafts=made[0].drafts)

    assert voted.calibration.fingerprint.selector == "AnswerVote(temperature=1.0)"
    assert best.calibration.fingerprint.selector == "BestScore()"
    assert calibrating._winners([question], AnswerVote()) == [made[0].drafts[0]]
    assert calibrating._winners([question], calibrating.BestScore()) == [made[0].drafts[2]]


def test_what_could_not_be_scored_is_not_accepted() -> None:
    """Questions without a usable draft, or scored at another tier, still count as questions."""
    made = world(np.random.default_rng(10), 200)
    unusable = [replace(one, usable=False) for one in made[0].drafts]
    lost = [
        outcome(1000, ()),
        outcome(1001, unusable),
        outcome(1002, made[0].drafts, tier="draft_only"),
        outcome(1003, [replace(one, value=None) for one in made[0].drafts]),
    ]
    unjudged = outcome(1004, made[0].drafts, grades=replace(GRADES, right=None))
    found = calibrate([*made, *lost, unjudged], fingerprint=Fingerprint()).calibration

    assert found.thresholds is not None
    assert found.questions + found.thresholds.questions == 204


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda made: made[: LEAST_QUESTIONS - 1], "at least 40 questions"),
        (lambda made: [*made[1:], replace(made[0], system="other")], "several systems"),
        (lambda made: [*made, made[3]], "question 3 of rivers is there twice"),
        (lambda made: [replace(one, tier="choice") for one in made], "at the tier choice"),
        (lambda made: [replace(one, tier=None) for one in made], "no outcome has scored drafts"),
        (lambda made: [all_of(one, right=True) for one in made], "have a wrong draft"),
        (lambda made: [all_of(one, right=False) for one in made], "have a right draft"),
        (
            lambda made: [right_ones_lack_a_term(one) for one in made],
            "0 of 40 questions have a right draft with draft_answer, reflection",
        ),
    ],
)
def test_outcomes_that_tell_nothing_are_refused(
    change: Callable[[list[Outcome]], list[Outcome]], told: str
) -> None:
    """The error says what is missing."""
    made = change(world(np.random.default_rng(11), 80))

    with pytest.raises(InputError, match=told):
        calibrate(made, fingerprint=Fingerprint())


def all_of(one: Outcome, *, right: bool) -> Outcome:
    """Return the same with all drafts right, or wrong."""
    return replace(one, drafts=tuple(replace(draft, right=right) for draft in one.drafts))


def right_ones_lack_a_term(one: Outcome) -> Outcome:
    """Return the same with a right draft in one question of five, which lacks a term."""
    first, *others = (replace(draft, right=False) for draft in one.drafts)
    if int(one.id) % 5 == 0:
        terms = {"reflection": first.terms["reflection"]}
        first = replace(first, right=True, terms=terms)
    return replace(one, drafts=(first, *others))


def test_every_fold_has_right_drafts_to_fit_on() -> None:
    """However many lack a term beside them: a fit without any would have one class only."""
    lacking = draft(0, right=True, reflection=-0.1)
    whole = draft(0, right=True, reflection=-0.1, terms={"draft_answer": -0.1})
    questions = [
        calibrating._Question(dataset="d", drafts=(one,)) for one in [lacking] * 30 + [whole] * 5
    ]
    for seed in range(5):
        folds = calibrating._folds(questions, ("reflection", "draft_answer"), seed)
        assert all(any(questions[place].drafts == (whole,) for place in fold) for fold in folds)


def test_options_that_promise_nothing_are_refused() -> None:
    """Certainty, and a selector that would have to ask a model."""
    made = world(np.random.default_rng(12), 80)

    for options in ({"target_precision": 1.0}, {"delta": 1}, {"delta": 0.0}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            calibrate(made, fingerprint=Fingerprint(), **options)
    with pytest.raises(InputError, match="Listwise cannot be replayed"):
        calibrate(made, fingerprint=Fingerprint(), selector=Listwise())
    with pytest.raises(ConfigurationError, match="of the selector AnswerVote"):
        calibrate(made, fingerprint=Fingerprint(selector="AnswerVote(temperature=1.0)"))
