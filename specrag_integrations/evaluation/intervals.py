"""Intervals: how far a number measured on a few questions may be from the truth.

All intervals are two-sided at 95 %, the question is the unit, and a seed fixes every resampling.

A bootstrap knows only what it has seen: two systems that tie on ten questions would differ by
exactly nothing. So where the greatest possible value is known, one observation of either extreme is
added before the questions are weighted at random (the Bayesian bootstrap): no difference in n
questions then means no more than about 3/n, the rule of three, and by fifty questions the two
observations hardly matter. Over wins and losses of up to 60 % each, the intervals of 5 to 60
questions hold the true difference in 91 % of samples at worst and in 96 % on average; those of the
plain bootstrap, which never draws a loss it has not seen, in 22 % and 90 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000
_TAILS = (0.025, 0.975)
_Floats = npt.NDArray[np.float64]
Verdict = Literal["better", "worse", "as_good", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A measured value and the interval it stands for."""

    value: float
    low: float
    high: float
    """Infinite, as `low` may be, where so few questions tell nothing."""
    n: int
    """The questions it was measured on."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form: an open end is None."""
        found = asdict(self)
        return {key: item if math.isfinite(item) else None for key, item in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Ours minus theirs, over the same questions."""

    interval: Interval
    """Of the mean difference."""
    wins: int
    """Questions on which ours is the greater value."""
    losses: int
    ties: int
    p: float
    """Of the exact two-sided sign test over wins and losses; 1 without any."""
    deviation: float
    """The standard deviation of the differences, the added observations included."""

    def verdict(self, margin: float) -> Verdict:
        """Say what the interval allows to say, where greater is better.

        "better" and "worse" have 0 outside, however little; "as_good" loses less than `margin` at
        worst (0.03 is three points), which trials call non-inferior; all else is "inconclusive".
        """
        if self.interval.low > 0:
            return "better"
        if self.interval.high < 0:
            return "worse"
        return "as_good" if self.interval.low > -margin else "inconclusive"

    def questions_needed(self, margin: float, *, power: float = 0.8) -> int:
        """Return about how many questions would settle whether ours is as good, if it is.

        The usual sample size of a non-inferiority trial: with so many questions, and no difference
        in truth, the lower end is above -margin in a share `power` of all runs.
        """
        from scipy.stats import norm

        reach = norm.ppf(_TAILS[1]) + norm.ppf(power)
        return max(1, math.ceil(float(reach * self.deviation / margin) ** 2))


def share_interval(successes: int, n: int) -> Interval | None:
    """Return a share with Wilson's interval, which is not [0, 0] for 0 of 20; None if n is 0."""
    if not n:
        return None
    from scipy.stats import binomtest

    ends = binomtest(successes, n).proportion_ci(method="wilson")
    return Interval(value=successes / n, low=float(ends.low), high=float(ends.high), n=n)


def mean_interval(
    values: Sequence[float], *, bounds: tuple[float, float] | None = (0.0, 1.0), seed: int = 0
) -> Interval | None:
    """Return a mean with its bootstrap interval; where all are 0 or 1, a share with Wilson's.

    Args:
        values: One for each question.
        bounds: The least and the greatest possible value, each of which is added once: 0 and 1 for
            rightness and F1. None for seconds and tokens: then one value alone has an interval
            without ends, and values that are all equal one of no width, since nothing tells how far
            another could lie.
        seed: Of the resampling.

    Returns:
        None where there is no value.

    Raises:
        ValueError: a value is out of bounds.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        return None
    if bounds is not None and not ((sample >= bounds[0]) & (sample <= bounds[1])).all():
        raise ValueError(f"a value is not from {bounds[0]} to {bounds[1]}: set bounds")
    if bounds == (0, 1) and np.isin(sample, (0, 1)).all():
        return share_interval(int(sample.sum()), sample.size)
    return _of_mean(sample, bounds or (), seed)


def paired_difference(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    bound: float | None = 1.0,
    seed: int = 0,
) -> Difference | None:
    """Return by how much ours exceeds theirs on average, with its paired bootstrap interval.

    Args:
        ours: One value for each question: bools or floats.
        theirs: The other system's, for the same questions in the same order.
        bound: How far two values can be apart: 1 for rightness and F1. One win and one loss of that
            size are added. None for seconds and tokens, which have no greatest difference.
        seed: Of the resampling.

    Returns:
        None where there is no question.

    Raises:
        ValueError: the two are not equally long, or two values are further apart than `bound`.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"not pairs: {len(ours)} values of ours and {len(theirs)} of theirs")
    if not len(ours):
        return None
    differences = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    if bound is not None and (abs(differences) > bound).any():
        raise ValueError(f"two values are more than {bound} apart: set bound")
    added = () if bound is None else (bound, -bound)
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    return Difference(
        interval=_of_mean(differences, added, seed),
        wins=wins,
        losses=losses,
        ties=differences.size - wins - losses,
        p=_sign_test(wins, losses),
        deviation=float(np.append(differences, added).std()),
    )


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Return the median of paired ratios, a speed-up, with its interval from their order.

    The interval is exact whatever the ratios are like, so nothing is resampled: its ends are those
    two of the ratios between which the median lies with 95 %. Below six pairs there are none such.

    Returns:
        None where there is no pair.

    Raises:
        ValueError: the two are not equally long, or a value is not above 0.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"not pairs: {len(numerators)} and {len(denominators)} values")
    if not len(numerators):
        return None
    above = np.asarray(numerators, dtype=np.float64)
    below = np.asarray(denominators, dtype=np.float64)
    if not (above > 0).all() or not (below > 0).all():
        raise ValueError("a ratio needs values above 0")
    from scipy.stats import binom

    ratios = np.sort(above / below)
    outside = int(binom.ppf(_TAILS[0], ratios.size, 0.5))
    low, high = (ratios[outside - 1], ratios[-outside]) if outside else (0.0, math.inf)
    return Interval(value=float(np.median(ratios)), low=float(low), high=float(high), n=ratios.size)


def percentile(values: Sequence[float], q: float) -> float | None:
    """Return a percentile, q from 0 to 100, between the two nearest values; None of nothing."""
    return float(np.percentile(values, q)) if len(values) else None


# ------------------------------------------------------------------ how good a selector is


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRights:
    """The usable drafts of one question, right or wrong, and what a selector made of them."""

    rights: tuple[bool, ...]
    selected: bool | None
    """Whether the selected draft is right; None if none was selected."""

    @property
    def contested(self) -> bool:
        """Whether the choice matters: some drafts are right and some are wrong."""
        return any(self.rights) and not all(self.rights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of what selection can gain over a random draft was gained.

    1 is an oracle, 0 a draft drawn at random, and less is worse than that.
    """

    interval: Interval
    contested: int
    """The questions it is measured on: contested, and some draft was selected."""
    mean: float
    """On how many of them a random draft is right, on average."""
    oracle: int
    """On how many some draft is right: all of them."""
    selected: int
    """On how many the selected draft is right."""
    unselected: int
    """Contested questions left out, since no draft was selected."""


def selection_efficiency(pools: Sequence[PoolRights], *, seed: int = 0) -> Efficiency | None:
    """Return Σ(selected - mean) / Σ(oracle - mean) over contested questions.

    The bootstrap draws questions. One question as the others are on average is added with its right
    draft selected and one with a wrong one, so that three of three are no certainty.

    Returns:
        None where no contested question has a selected draft.
    """
    contested = [pool for pool in pools if pool.contested]
    counted = [pool for pool in contested if pool.selected is not None]
    if not counted:
        return None
    means = np.asarray([np.mean(pool.rights) for pool in counted])
    selected = np.asarray([float(bool(pool.selected)) for pool in counted])
    usual = means.mean()
    gained = np.append(selected - means, (1 - usual, -usual))
    possible = np.append(1 - means, (1 - usual, 1 - usual))
    value = float((selected - means).sum() / (1 - means).sum())
    return Efficiency(
        interval=_bootstrapped(value, len(counted), gained, possible, seed),
        contested=len(counted),
        mean=float(means.sum()),
        oracle=len(counted),
        selected=int(selected.sum()),
        unselected=len(contested) - len(counted),
    )


# ------------------------------------------------------------------ what a confidence is worth


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskPoint:
    """What happens if only answers at or above a threshold are given."""

    coverage: float
    """The share of the questions that are answered."""
    risk: float
    """The share of those answers that are wrong."""
    threshold: float


def risk_coverage(confidences: Sequence[float], rights: Sequence[bool]) -> list[RiskPoint]:
    """Return the risk at every coverage, from the most confident answers to all of them.

    Equal confidences are one step, since no threshold tells them apart.
    """
    confidence, right = _graded(confidences, rights)
    order = np.argsort(-confidence, kind="stable")
    confidence, wrong = confidence[order], np.cumsum(1 - right[order])
    ends = np.flatnonzero(np.append(np.diff(confidence) != 0, [True] * bool(confidence.size)))
    return [
        RiskPoint(
            coverage=float((end + 1) / confidence.size),
            risk=float(wrong[end] / (end + 1)),
            threshold=float(confidence[end]),
        )
        for end in ends
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Answers of about the same confidence."""

    confidence: float
    """Their mean confidence."""
    right: Interval
    """The share of them that are right."""


def reliability(
    confidences: Sequence[float], rights: Sequence[bool], *, bins: int = 10
) -> list[ReliabilityBin]:
    """Return a reliability diagram's bins, of about equally many answers each.

    They are scikit-learn's `calibration_curve(…, strategy="quantile")`: equal confidences share a
    bin, and there are fewer bins where there are few different confidences.
    """
    confidence, right = _graded(confidences, rights)
    if not confidence.size:
        return []
    edges = np.percentile(confidence, np.linspace(0, 1, bins + 1) * 100)
    places = np.searchsorted(edges[1:-1], confidence)
    found = []
    for place in np.unique(places):
        inside = places == place
        share = share_interval(int(right[inside].sum()), int(inside.sum()))
        if share is not None:
            found.append(ReliabilityBin(confidence=float(confidence[inside].mean()), right=share))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationMeasures:
    """How far confidences are from the shares of right answers; less is better."""

    brier: float
    """The mean squared error."""
    log_loss: float
    """In nats."""
    ece: float
    """The expected calibration error: the mean distance of the reliability bins from the
    diagonal, by the answers in them."""
    n: int


def calibration_measures(
    confidences: Sequence[float], rights: Sequence[bool], *, bins: int = 10
) -> CalibrationMeasures | None:
    """Return Brier score, log loss and expected calibration error; None of no answers.

    Raises:
        ValueError: a confidence is no probability.
    """
    confidence, right = _graded(confidences, rights)
    if not confidence.size:
        return None
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("a confidence must be between 0 and 1")
    from sklearn.metrics import log_loss

    distances = (
        group.right.n * abs(group.confidence - group.right.value)
        for group in reliability(confidences, rights, bins=bins)
    )
    return CalibrationMeasures(
        brier=float(np.mean((confidence - right) ** 2)),
        log_loss=float(log_loss(right, confidence, labels=[0.0, 1.0])),
        ece=sum(distances) / confidence.size,
        n=confidence.size,
    )


def precision_bound(right: int, accepted: int, *, delta: float) -> float:
    """Return the precision exceeded with probability 1 - delta: Clopper and Pearson's, one-sided.

    It is exact: over samples, it lies above the true precision no more often than delta. 0 where
    nothing is accepted.
    """
    if not accepted:
        return 0.0
    from scipy.stats import binomtest

    test = binomtest(right, accepted, alternative="greater")
    return float(test.proportion_ci(confidence_level=1 - delta, method="exact").low)


def smallest_sample(target: float, *, delta: float) -> int:
    """Return how many accepted answers without an error attain a precision, target < 1."""
    # Rounded, since the quotient of two logarithms of powers may end just above a whole number.
    return math.ceil(round(math.log(delta) / math.log(target), 9))


# ------------------------------------------------------------------ inside


def _of_mean(sample: _Floats, added: Sequence[float], seed: int) -> Interval:
    mean, widened = float(sample.mean()), np.append(sample, added)
    if widened.size == 1:
        return Interval(value=mean, low=-math.inf, high=math.inf, n=1)
    return _bootstrapped(mean, sample.size, widened, np.ones_like(widened), seed)


def _bootstrapped(
    value: float, n: int, numerators: _Floats, denominators: _Floats, seed: int
) -> Interval:
    """Weight observations at random, and return the interval of the ratio of their sums."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_exponential((_RESAMPLES, numerators.size))
    low, high = np.quantile((weights @ numerators) / (weights @ denominators), _TAILS)
    # The added observations draw the interval to the middle, away from a value at the edge.
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value), n=n)


def _sign_test(wins: int, losses: int) -> float:
    if not wins + losses:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue)


def _graded(confidences: Sequence[float], rights: Sequence[bool]) -> tuple[_Floats, _Floats]:
    if len(confidences) != len(rights):
        raise ValueError(f"not pairs: {len(confidences)} confidences and {len(rights)} rights")
    return np.asarray(confidences, dtype=np.float64), np.asarray(rights, dtype=np.float64)
