"""Calibrating: P(correct) from drafts that were right or wrong, and thresholds that keep a promise.

One half of the questions fits the weights and P(correct), the other tests the thresholds. Each
question counts once: its drafts share its difficulty. What a threshold would have accepted is found
by replaying the policy as it is deployed, drafts in the order in which they came.

The test is Learn then Test (arXiv 2110.01052) with a fixed sequence: the half that fits also says
in which order thresholds are tried, the other half tests one after the other with an exact binomial
bound at the whole delta, and the first failure ends it. Where even the first fails, its own bound
is the highest precision that can be promised; both statements together still err with probability
delta at the most, since the second is only made of a threshold whose bound it is.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

import numpy as np
from numpy.typing import NDArray

from specrag_integrations.confidence import (
    Calibration,
    Fingerprint,
    Kind,
    Thresholds,
    checked_share,
    named,
)
from specrag_integrations.drafts import Draft
from specrag_integrations.errors import ConfigurationError, InputError
from specrag_integrations.evaluation.intervals import (
    CalibrationMeasures,
    Efficiency,
    PoolRights,
    calibration_measures,
    precision_bound,
    selection_efficiency,
    smallest_sample,
)
from specrag_integrations.evaluation.outcomes import DraftOutcome, Outcome
from specrag_integrations.models import ChatModel
from specrag_integrations.portal import portal
from specrag_integrations.scores import TIERS, Scoring, TierName
from specrag_integrations.selection import BestScore, Candidate, Pool, Selector, select
from specrag_integrations.subsets import Subset

LEAST_QUESTIONS = 40
"""With fewer, neither half tells anything."""
LEAST_OF_EACH = 5
"""Questions with a right draft, and with a wrong one, in the half that fits."""
LEAST_CONTESTED = 30
"""Questions with right and wrong drafts, below which no weights are fitted."""
GRID = (*(n / 20 for n in range(1, 20)), 0.99)
"""The confidences that may become thresholds."""

_FOLDS = 5
_LEAST_P = 1e-12  # 0 has no logarithm
_COMMON = 0.9  # of the drafts have a term, or it is not used
_ROUNDING = 1e-9  # a spread below it, beside the size of what is spread, tells nothing
_NOBODY = cast("ChatModel", None)  # no selector that can be calibrated asks a model
_UNFITTED = {"draft"}  # the mean of two other terms

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """A calibration, and what was found out on the way to it."""

    calibration: Calibration
    current_efficiency: Efficiency | None
    """Of the score the drafts came with, in the half that fits."""
    fitted_efficiency: Efficiency | None
    """Of fitted weights, cross-validated by question; None: too few questions to fit any."""
    before: CalibrationMeasures | None
    """Of exp(score) as a probability of the winners, in the half that was not fitted on."""
    after: CalibrationMeasures | None
    """Of the confidence of the same winners."""
    asked: float
    """The precision asked for."""
    bound: float | None
    """The lower bound of the thresholds' precision, at confidence 1 - delta."""
    precision: float | None
    """The share of right ones among the accepted, in the half that tests."""
    coverage: float
    """The share of questions that is accepted there."""
    early: float
    """The share that is accepted before all drafts are there."""
    needed: int | None
    """About how many accepted questions would attain what was asked for, at this precision; None
    where it is attained, or where the precision itself is too low."""
    notes: tuple[str, ...] = ()

    @property
    def attained(self) -> bool:
        """Whether the thresholds attain what was asked for."""
        found = self.calibration.thresholds
        return found is not None and found.attained


def calibrate(
    outcomes: Sequence[Outcome],
    *,
    fingerprint: Fingerprint,
    target_precision: float = 0.9,
    delta: float = 0.1,
    selector: Selector | None = None,
    seed: int = 0,
    demonstration: bool = False,
) -> CalibrationReport:
    """Calibrate one system from what it made of questions with known answers.

    Args:
        outcomes: Of one system, one for each question, with its drafts: no early stop, no deadline.
        fingerprint: The set-up they were made in. Weights that it has are its own, and stay; none
            are fitted then.
        target_precision: The share of accepted answers that are to be right.
        delta: How likely the promise may fail, over the choice of the questions.
        selector: The system's, which must read scores and ask no model; the best score by default.
        seed: Of the split into halves and folds.
        demonstration: Whether the calibration is to be marked as one.

    Raises:
        InputError: outcomes that cannot be calibrated, or too few.
        ConfigurationError: a target or delta that is no probability, or another selector than the
            fingerprint's.
    """
    for name, value in (("target_precision", target_precision), ("delta", delta)):
        if checked_share(name, value) == 1:
            raise ConfigurationError(f"{name} must be below 1: nothing is certain")
    selector = _replayable(selector)
    if fingerprint.selector not in {None, named(selector)}:
        raise ConfigurationError(
            f"the fingerprint is of the selector {fingerprint.selector}, not of {named(selector)}"
        )
    tier = _tier_of(outcomes, fingerprint)
    questions = _questions(outcomes, tier)
    fitting, testing = _halves(questions, np.random.default_rng(seed))
    terms = _terms(fitting, tier)
    _check_telling(fitting, terms)
    weighed = fingerprint.formula == "paper" or fingerprint.weights
    weighing = _weigh(fitting, () if weighed else terms, seed)
    if weighing.weights:
        fitting, testing = (_rescored(half, weighing.weights) for half in (fitting, testing))
        fingerprint = replace(fingerprint, weights=weighing.weights)
    fingerprint = replace(fingerprint, tier=tier, selector=named(selector))
    fitted = _fitted(fitting, terms, fingerprint, seed)
    winners = [_winners(half, selector) for half in (fitting, testing)]
    learning = Replay.of(fitting, winners[0], fitted)
    tested = Replay.of(testing, winners[1], fitted)
    found = find_thresholds(
        learning,
        tested,
        target=target_precision,
        delta=delta,
        early_stops=fingerprint.formula != "paper",  # which compares all drafts
    )
    judged = [
        draft for draft in winners[1] if draft and fitted.probability(draft.terms) is not None
    ]
    right = [draft.right for draft in judged]
    after = calibration_measures([_confidence(fitted, draft) for draft in judged], right)
    share = fmean(draft.right for draft in winners[0] if draft)
    return CalibrationReport(
        calibration=replace(
            fitted,
            thresholds=found.thresholds,
            questions=len(fitting),
            demonstration=demonstration,
        ),
        current_efficiency=weighing.current,
        fitted_efficiency=weighing.fitted,
        before=calibration_measures([_raw(draft) for draft in judged], right),
        after=after,
        asked=target_precision,
        bound=found.bound,
        precision=found.precision,
        coverage=found.accepted / len(testing),
        early=found.early / len(testing),
        needed=found.needed,
        notes=(
            *weighing.notes,
            *_worthless(after, calibration_measures([share] * len(right), right)),
        ),
    )


def _worthless(
    found: CalibrationMeasures | None, constant: CalibrationMeasures | None
) -> Iterator[str]:
    """Say so where a confidence tells no more than the share of right answers, the same for all."""
    if found and constant and found.log_loss >= constant.log_loss:
        yield (
            f"the confidence (log loss {found.log_loss:.3f}) tells no more than the "
            f"share of right answers does ({constant.log_loss:.3f}): do not rely "
            "on it, and calibrate on more questions"
        )


def check_calibratable(
    *, questions: int, selector: Selector | None = None, tier: TierName | None = None
) -> None:
    """Refuse what `calibrate` would refuse of outcomes, before any model is asked for them.

    Args:
        questions: How many there are to ask whose answers can be judged.
        selector: The system's.
        tier: The one that it forces; None: the best that works.

    Raises:
        InputError: too few questions, or a system that has no confidence.
    """
    _check_enough(questions)
    _replayable(selector)
    _check_tier(tier)


def _check_enough(questions: int) -> None:
    if questions < LEAST_QUESTIONS:
        raise InputError(
            f"calibrating needs at least {LEAST_QUESTIONS} questions with a scored draft, and "
            f"several hundred to promise much; there are {questions}. Those with long answers, "
            "which no rule judges, and those whose drafts all failed, abstained or could not be "
            "scored do not count"
        )


def _replayable(selector: Selector | None) -> Selector:
    selector = selector or BestScore()
    if not selector.reads_scores or selector.requests:
        raise InputError(f"{type(selector).__name__} cannot be replayed: it asks a model")
    return selector


def _check_tier(tier: TierName | None) -> None:
    if tier in {"choice", "agreement"}:
        raise InputError(
            f"at the tier {tier} drafts have no score of their own, and no confidence; the "
            "verifier's server must return log-probabilities"
        )


# -------------------------------------------------------------------- what was observed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One question with the drafts that may be selected, by index."""

    dataset: str
    drafts: tuple[DraftOutcome, ...]

    @property
    def is_contested(self) -> bool:
        """Whether some drafts are right and some wrong."""
        return len({draft.right for draft in self.drafts}) > 1

    @property
    def by_arrival(self) -> list[DraftOutcome]:
        """The drafts in the order in which their scores came.

        Where replies were replayed, as fast as each of them was when it was made.
        """
        known = all(draft.arrived is not None for draft in self.drafts)

        def when(draft: DraftOutcome) -> tuple[float, int]:
            arrived = draft.arrived if known else None
            if arrived is None:
                arrived = draft.draft_seconds + draft.verify_seconds
            return arrived, draft.index

        return sorted(self.drafts, key=when)


def _tier_of(outcomes: Sequence[Outcome], fingerprint: Fingerprint) -> TierName:
    """Return the tier to calibrate: the one that is named, else the most frequent one.

    Raises:
        InputError: its scores are none of single drafts.
    """
    tiers = Counter(outcome.tier for outcome in outcomes if outcome.tier)
    tier = fingerprint.tier or cast("TierName", next(iter(dict(tiers.most_common(1))), None))
    if tier is None:
        raise InputError("no outcome has scored drafts: nothing can be calibrated")
    _check_tier(tier)
    return tier


def _questions(outcomes: Sequence[Outcome], tier: TierName) -> list[_Question]:
    """Return the questions, those without a usable draft as well: nothing is accepted there.

    Raises:
        InputError: several systems, a question twice, or too few questions.
    """
    if len({outcome.system for outcome in outcomes}) > 1:
        raise InputError("outcomes of several systems: one is calibrated at a time")
    twice = [key for key, times in Counter(o.key for o in outcomes).items() if times > 1]
    if twice:
        raise InputError(f"the question {twice[0][1]} of {twice[0][0]} is there twice")
    judged = [o for o in outcomes if o.grades is None or o.grades.right is not None]
    questions = [
        _Question(dataset=outcome.dataset, drafts=_selectable(outcome, tier)) for outcome in judged
    ]
    _check_enough(sum(bool(question.drafts) for question in questions))
    return questions


def _selectable(outcome: Outcome, tier: TierName) -> tuple[DraftOutcome, ...]:
    if outcome.tier != tier:
        return ()  # scored by other terms, so that there is no confidence
    drafts = [draft for draft in outcome.drafts if draft.usable and draft.value is not None]
    return tuple(sorted(drafts, key=lambda draft: draft.index))


def _halves(
    questions: Sequence[_Question], rng: np.random.Generator
) -> tuple[list[_Question], list[_Question]]:
    """Split at random, each data set in half."""
    shuffled = [questions[place] for place in rng.permutation(len(questions))]
    shuffled.sort(key=lambda question: question.dataset)
    return shuffled[::2], shuffled[1::2]


def _check_telling(questions: Sequence[_Question], terms: Sequence[str]) -> None:
    """Refuse drafts to fit on that are nearly all right, or nearly all wrong.

    Raises:
        InputError: nothing tells right from wrong.
    """
    for right, named_ in ((True, "right"), (False, "wrong")):
        have = sum(
            any(draft.right is right and _has(draft, terms) for draft in question.drafts)
            for question in questions
        )
        if have < LEAST_OF_EACH:
            raise InputError(
                f"{have} of {len(questions)} questions have a {named_} draft with "
                f"{', '.join(terms)}, and at least {LEAST_OF_EACH} must, to tell right from wrong "
                "by their scores; calibrate on other questions"
            )


def _terms(questions: Sequence[_Question], tier: TierName) -> tuple[str, ...]:
    """Return the terms that nearly all drafts have."""
    drafts = [draft for question in questions for draft in question.drafts]
    counts = Counter(term for draft in drafts for term in draft.terms)
    return tuple(
        term
        for term in TIERS[tier].terms
        if term not in _UNFITTED and counts[term] >= _COMMON * len(drafts)
    )


def _matrix(drafts: Sequence[DraftOutcome], terms: Sequence[str]) -> Floats:
    return np.array([[draft.terms[term] for term in terms] for draft in drafts], dtype=float)


def _has(draft: DraftOutcome, terms: Sequence[str]) -> bool:
    return all(term in draft.terms for term in terms)


def _folds(questions: Sequence[_Question], terms: Sequence[str], seed: int) -> list[list[int]]:
    """Return the places of the questions of each fold, right drafts to fit on spread evenly."""

    def rights(place: int) -> int:
        return sum(draft.right and _has(draft, terms) for draft in questions[place].drafts)

    rng = np.random.default_rng(seed)
    places = [int(place) for place in rng.permutation(len(questions))]
    places.sort(key=rights)
    return [places[first::_FOLDS] for first in range(_FOLDS)]


def _apart(
    questions: Sequence[_Question], fold: Sequence[int]
) -> tuple[list[_Question], list[_Question]]:
    """Return the questions outside a fold, and those in it."""
    held = set(fold)
    outside = [question for place, question in enumerate(questions) if place not in held]
    return outside, [questions[place] for place in fold]


# -------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighing:
    """Weights for `Scoring`, and how well they choose."""

    weights: Mapping[str, float] | None
    """None: the score stays as it is."""
    current: Efficiency | None
    fitted: Efficiency | None
    notes: tuple[str, ...] = ()


def _weigh(questions: Sequence[_Question], terms: Sequence[str], seed: int) -> _Weighing:
    """Fit weights, and keep them where they choose better on questions they were not fitted on."""
    contested = [question for question in questions if question.is_contested]
    current = _efficiency([(question, _values(question)) for question in contested])
    as_it_is = _Weighing(weights=None, current=current, fitted=None)
    if len(terms) < 2:  # noqa: PLR2004 - one term has no weight
        return as_it_is
    if len(contested) < LEAST_CONTESTED:
        told = f"{len(contested)} questions with right and wrong drafts"
        note = f"no weights fitted: {told} in the half that fits, {LEAST_CONTESTED} are needed"
        return replace(as_it_is, notes=(note,))
    held_out: list[tuple[_Question, Mapping[int, float]]] = []
    for fold in _folds(contested, terms, seed):
        outside, inside = _apart(contested, fold)
        found = _choice_weights(outside, terms)
        held_out += [(question, _values(question, found)) for question in inside]
    fitted = _efficiency(held_out)
    weights = {term: weight for term, weight in _choice_weights(contested, terms).items() if weight}
    gain = (fitted.interval.value if fitted else 0.0) - (current.interval.value if current else 0.0)
    if not weights or gain <= 0:
        note = "the fitted weights choose no better than the score as it is, which stays"
        return replace(as_it_is, fitted=fitted, notes=(note,))
    return _Weighing(weights=weights, current=current, fitted=fitted)


def _choice_weights(questions: Sequence[_Question], terms: Sequence[str]) -> dict[str, float]:
    """Fit a conditional logit: how well the terms tell the right drafts of a question.

    The weights' absolute values add up to 1, so that the score stays a mean in nats.
    """
    from scipy.optimize import minimize

    pools = []
    for question in questions:
        drafts = [draft for draft in question.drafts if _has(draft, terms)]
        right = np.array([draft.right for draft in drafts])
        if right.any() and not right.all():
            pools.append((_matrix(drafts, terms), right))
    if not pools:
        return {}
    middle = np.concatenate([matrix for matrix, _ in pools]).mean(axis=0)
    scale = _scale(np.concatenate([matrix - matrix.mean(axis=0) for matrix, _ in pools]), middle)

    def loss(weights: Floats) -> float:
        total = 0.5 * float(weights @ weights)
        for matrix, right in pools:
            values = (matrix / scale) @ weights
            total += float(np.logaddexp.reduce(values) - np.logaddexp.reduce(values[right]))
        return total

    found = minimize(loss, np.zeros(len(terms)), method="L-BFGS-B").x / scale
    size = float(np.abs(found).sum())
    if not size:
        return {}
    return {t: round(float(w) / size, 4) for t, w in zip(terms, found, strict=True)}


def _values(question: _Question, weights: Mapping[str, float] | None = None) -> dict[int, float]:
    """Return each draft's score: with weights where it has their terms, else as it came."""
    if not weights:
        return {draft.index: draft.value for draft in question.drafts if draft.value is not None}
    return {
        draft.index: sum(weight * draft.terms[term] for term, weight in weights.items())
        for draft in question.drafts
        if _has(draft, tuple(weights))
    }


def _efficiency(scored: Sequence[tuple[_Question, Mapping[int, float]]]) -> Efficiency | None:
    pools = []
    for question, values in scored:
        drafts = {draft.index: draft for draft in question.drafts}
        order = sorted(values, key=lambda one: (drafts[one].truncated, -values[one], one))
        selected = drafts[order[0]].right if order else None
        rights = tuple(draft.right for draft in question.drafts)
        pools.append(PoolRights(rights=rights, selected=selected))
    return selection_efficiency(pools)


def _rescored(questions: Sequence[_Question], weights: Mapping[str, float]) -> list[_Question]:
    """Give the drafts the score they would have; one without a term cannot be selected."""
    found = []
    for question in questions:
        values = _values(question, weights)
        drafts = tuple(
            replace(draft, value=values[draft.index])
            for draft in question.drafts
            if draft.index in values
        )
        found.append(replace(question, drafts=drafts))
    return found


def _scale(matrix: Floats, middle: Floats) -> Floats:
    """Return what to divide each term by; infinity, which leaves 0, where it is constant."""
    deviation = matrix.std(axis=0)
    varies = deviation > _ROUNDING * np.maximum(1.0, np.abs(middle))
    return np.where(varies, deviation, np.inf)


# -------------------------------------------------------------------- the probability


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Drafts to fit on; those of one question count as one together."""

    drafts: Sequence[DraftOutcome]
    right: Bools
    weights: Floats


def _sample(questions: Sequence[_Question], terms: Sequence[str]) -> _Sample:
    drafts, weights = [], []
    for question in questions:
        whole = [draft for draft in question.drafts if _has(draft, terms)]
        drafts += whole
        weights += [1 / len(whole) for _ in whole]
    right = np.array([draft.right for draft in drafts], dtype=bool)
    return _Sample(drafts=drafts, right=right, weights=np.array(weights))


def _fitted(
    questions: Sequence[_Question], terms: Sequence[str], fingerprint: Fingerprint, seed: int
) -> Calibration:
    """Fit P(correct) in the way that loses less on questions it was not fitted on."""
    makers: dict[Kind, Callable[[Sequence[_Question]], Calibration]] = {
        "logistic": lambda some: _logistic(some, terms, fingerprint)
    }
    if fingerprint.formula != "paper":  # whose product is no sum of terms
        makers["isotonic"] = lambda some: _isotonic(some, fingerprint)
    folds = _folds(questions, terms, seed)
    losses = {kind: _cross_validated(questions, folds, fit) for kind, fit in makers.items()}
    return makers[min(losses, key=lambda kind: losses[kind])](questions)


def _cross_validated(
    questions: Sequence[_Question],
    folds: Sequence[Sequence[int]],
    fit: Callable[[Sequence[_Question]], Calibration],
) -> float:
    """Return the mean log loss of drafts, each by a fit without its question."""
    losses, weights = [], []
    for fold in folds:
        outside, inside = _apart(questions, fold)
        fitted = fit(outside)
        for question in inside:
            for draft in question.drafts:
                if (p := fitted.probability(draft.terms)) is not None:
                    losses.append(-math.log(max(p if draft.right else 1 - p, _LEAST_P)))
                    weights.append(1 / len(question.drafts))
    return float(np.average(losses, weights=weights))


def _logistic(
    questions: Sequence[_Question], terms: Sequence[str], fingerprint: Fingerprint
) -> Calibration:
    from sklearn.linear_model import LogisticRegression

    sample = _sample(questions, terms)
    matrix = _matrix(sample.drafts, terms)
    middle = matrix.mean(axis=0)
    scale = _scale(matrix, middle)
    model = LogisticRegression(max_iter=1000)
    model.fit((matrix - middle) / scale, sample.right, sample_weight=sample.weights)
    coefficients = model.coef_[0] / scale
    return Calibration(
        fingerprint=fingerprint,
        kind="logistic",
        coefficients={term: float(c) for term, c in zip(terms, coefficients, strict=True)},
        intercept=float(model.intercept_[0] - coefficients @ middle),
    )


def _isotonic(questions: Sequence[_Question], fingerprint: Fingerprint) -> Calibration:
    from sklearn.isotonic import IsotonicRegression

    scoring = Scoring(weights=fingerprint.weights or None)
    weights = scoring.weights_at(cast("TierName", fingerprint.tier))
    sample = _sample(questions, tuple(weights))
    values = [sum(w * draft.terms[t] for t, w in weights.items()) for draft in sample.drafts]
    # No number of right drafts makes the next one certain.
    edge = 1 / (len(questions) + 2)
    model = IsotonicRegression(y_min=edge, y_max=1 - edge)
    model.fit(values, sample.right, sample_weight=sample.weights)
    knots = zip(model.X_thresholds_, model.y_thresholds_, strict=True)
    return Calibration(
        fingerprint=fingerprint,
        kind="isotonic",
        coefficients=weights,
        knots=tuple((float(at), float(p)) for at, p in knots),
    )


def _raw(draft: DraftOutcome) -> float:
    """Return what a score would say if it were the logarithm of a probability."""
    return math.exp(min(draft.terms.get("reflection", draft.value or 0.0), 0.0))


# -------------------------------------------------------------------- the policy, replayed


def _winners(questions: Sequence[_Question], selector: Selector) -> list[DraftOutcome | None]:
    """Return the draft that the engine's own selector takes from all drafts of each question."""

    async def selected(question: _Question) -> DraftOutcome | None:
        candidates = tuple(
            Candidate(draft=_draft(draft), value=draft.value or 0.0) for draft in question.drafts
        )
        if not candidates:
            return None
        selection = await select(Pool(question="", candidates=candidates, model=_NOBODY), selector)
        return next((d for d in question.drafts if d.index == selection.winner), None)

    async def all_selected() -> list[DraftOutcome | None]:
        return [await selected(question) for question in questions]

    return portal.run(all_selected())


def _draft(outcome: DraftOutcome) -> Draft:
    return Draft(
        rationale="",
        answer=f"answer {outcome.group}",
        subset=Subset(index=outcome.index, ranks=outcome.ranks, passages=()),
        truncated=outcome.truncated,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What happens to n questions, whatever the thresholds are."""

    best: Floats
    """(n,) the confidence of the draft selected from all; -1 where there is none."""
    best_right: Bools
    """(n,)"""
    early: Bools
    """(thresholds, n) whether some draft has a confidence of the threshold at least."""
    early_right: Bools
    """(thresholds, n) whether the first of these to come is right."""

    @classmethod
    def of(
        cls,
        questions: Sequence[_Question],
        winners: Sequence[DraftOutcome | None],
        calibration: Calibration,
    ) -> Replay:
        """Replay questions with their drafts in the order in which they came."""
        arrivals, best = [], []
        for question, winner in zip(questions, winners, strict=True):
            confidences = {d.index: _confidence(calibration, d) for d in question.drafts}
            arrivals.append(
                [(confidences[d.index], d.right) for d in question.by_arrival if not d.truncated]
            )
            best.append((confidences[winner.index], winner.right) if winner else (-1.0, False))
        return cls.of_confidences(best, arrivals)

    @classmethod
    def of_confidences(
        cls,
        best: Sequence[tuple[float, bool]],
        arrivals: Sequence[Sequence[tuple[float, bool]]],
    ) -> Replay:
        """Replay (confidence, right) of each question's winner, and of its drafts as they came."""
        first = [
            [next((right for p, right in drafts if p >= threshold), None) for drafts in arrivals]
            for threshold in GRID
        ]
        return cls(
            best=np.array([p for p, _ in best], dtype=float),
            best_right=np.array([right for _, right in best], dtype=bool),
            early=np.array([[right is not None for right in row] for row in first], dtype=bool),
            early_right=np.array([[bool(right) for right in row] for row in first], dtype=bool),
        )

    def accepted(self, pair: Pair) -> tuple[int, int]:
        """Return how many answers the thresholds accept, and how many of these are right."""
        accepted, right = self.best >= pair.least, self.best_right
        if pair.enough is not None:
            early = self.early[GRID.index(pair.enough)]
            accepted = accepted | early
            right = np.where(early, self.early_right[GRID.index(pair.enough)], right)
        return int(accepted.sum()), int((accepted & right).sum())

    def stopped(self, pair: Pair) -> int:
        """Return how many questions end early."""
        return 0 if pair.enough is None else int(self.early[GRID.index(pair.enough)].sum())

    def bound(self, pair: Pair, delta: float) -> float:
        """Return the lower bound of the precision, also where `enough` is left out."""
        alone = replace(pair, enough=None)
        return min(_bound(*self.accepted(one), delta) for one in (pair, alone))


def _confidence(calibration: Calibration, draft: DraftOutcome) -> float:
    found = calibration.probability(draft.terms)
    return -1.0 if found is None else found


# -------------------------------------------------------------------- thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Thresholds that are deployed together."""

    least: float
    enough: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a search for thresholds."""

    thresholds: Thresholds | None
    bound: float | None
    accepted: int
    right: int
    early: int
    needed: int | None

    @property
    def precision(self) -> float | None:
        """The share of right ones among the accepted."""
        return self.right / self.accepted if self.accepted else None


def find_thresholds(
    learning: Replay, testing: Replay, *, target: float, delta: float, early_stops: bool = True
) -> Found:
    """Find thresholds whose accepted answers are right as often as `target`, but for `delta`.

    `learning` says in which order pairs are tested, and which of those that pass is taken: the one
    with the most answers accepted, and accepted early. Without `early_stops` all drafts are
    awaited.
    """
    sequence = _sequence(learning, target, delta, early_stops=early_stops)
    passed: list[Pair] = []
    for pair in sequence:
        if testing.bound(pair, delta) < target:
            break
        passed.append(pair)
    taken = max(
        passed or sequence[:1], key=lambda one: learning.accepted(one)[0] + learning.stopped(one)
    )
    bound = testing.bound(taken, delta)
    alone = testing.accepted(replace(taken, enough=None))
    accepted, right = testing.accepted(taken)
    attained = target if passed else math.floor(100 * bound) / 100
    thresholds = None
    if attained > 0:
        thresholds = Thresholds(
            min_confidence=taken.least,
            accept_confidence=taken.enough,
            target=attained,
            asked=target,
            delta=delta,
            questions=len(testing.best),
            accepted=alone[0],
            right=alone[1],
        )
    return Found(
        thresholds=thresholds,
        bound=bound if accepted else None,
        accepted=accepted,
        right=right,
        early=testing.stopped(taken),
        needed=None if passed else _needed([(accepted, right), alone], target, delta),
    )


def _sequence(learning: Replay, target: float, delta: float, *, early_stops: bool) -> list[Pair]:
    """Return all pairs, those first that are most likely to pass the test.

    Where none has much of a chance, those come first that promise the highest precision.
    """
    pairs = [
        Pair(least=least, enough=enough)
        for least in GRID
        for enough in (*(one for one in GRID if early_stops and one >= least), None)
    ]

    def order(pair: Pair) -> tuple[float, ...]:
        alone = replace(pair, enough=None)
        chance = min(_chance(*learning.accepted(one), target, delta) for one in (pair, alone))
        promise = learning.bound(pair, delta)
        return -round(chance, 2), -promise, -pair.least, pair.enough or math.inf

    return sorted(pairs, key=order)


@functools.lru_cache(maxsize=4096)
def _chance(accepted: int, right: int, target: float, delta: float) -> float:
    """Return how likely a pair passes in the other half, from what it did in this one.

    Taken to accept fewer there, by a standard deviation: too few fail however right they are.
    """
    from scipy.stats import betabinom

    number = accepted - math.isqrt(accepted)
    passing = bisect_left(range(number + 1), target, key=lambda r: _bound(number, r, delta))
    return float(betabinom.sf(passing - 1, number, right + 1, accepted - right + 1))


@functools.lru_cache(maxsize=4096)
def _bound(accepted: int, right: int, delta: float) -> float:
    return precision_bound(right, accepted, delta=delta)


def _needed(policies: Sequence[tuple[int, int]], target: float, delta: float) -> int | None:
    """Return about how many accepted questions would attain the target at the same precision.

    Of all policies, by how many they accept and how many of these are right: the worst decides.
    """
    if any(not accepted or right / accepted <= target for accepted, right in policies):
        return None
    return max(_needed_of(*one, target, delta) for one in policies)


def _needed_of(accepted: int, right: int, target: float, delta: float) -> int:
    if right == accepted:
        return smallest_sample(target, delta=delta)
    number = accepted
    while _bound(number, number * right // accepted, delta) < target:
        number = math.ceil(number * 1.02)
    return number
