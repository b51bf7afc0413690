"""How far a number measured on a few questions may be from the truth."""

from __future__ import annotations

import json
import math
import time
import warnings
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss

from specrag_integrations.evaluation.intervals import (
    PoolRights,
    RiskPoint,
    calibration_measures,
    mean_interval,
    paired_difference,
    percentile,
    precision_bound,
    ratio_interval,
    reliability,
    risk_coverage,
    selection_efficiency,
    share_interval,
    smallest_sample,
)

unhurried = settings(max_examples=50, deadline=None)  # the first call imports
confident = st.lists(
    st.tuples(st.floats(0.001, 0.999) | st.sampled_from([0.25, 0.5]), st.booleans()),
    min_size=1,
    max_size=60,
)


def unzipped(graded):
    """Return confidences and rights."""
    confidences, rights = zip(*graded, strict=True)
    return list(confidences), list(rights)


# ---------------------------------------------------------------- shares and means


def test_a_share_of_nothing_found_is_not_known_to_be_nothing():
    """0 of 20 is compatible with one in seven; Wilson's interval says so."""
    interval = share_interval(0, 20)

    assert (interval.value, interval.low, interval.n) == (0.0, 0.0, 20)
    assert interval.high == pytest.approx(1.959964**2 / (20 + 1.959964**2), abs=1e-6)
    assert interval.low <= 0.1 <= interval.high
    assert not interval.low <= 0.2 <= interval.high


@unhurried
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_the_mean_of_right_and_wrong_is_a_share(rights):
    """Bools and their floats have Wilson's interval, with no seed in it."""
    expected = share_interval(sum(rights), len(rights))

    assert mean_interval(rights) == mean_interval([float(r) for r in rights], seed=1) == expected


def test_of_nothing_there_is_no_interval():
    """No question, no claim."""
    assert mean_interval([]) is None
    assert share_interval(0, 0) is None
    assert paired_difference([], []) is None
    assert ratio_interval([], []) is None
    assert percentile([], 50) is None
    assert calibration_measures([], []) is None
    assert risk_coverage([], []) == reliability([], []) == []


def test_equal_scores_do_not_make_a_certainty():
    """Three answers with an F1 of a half leave room on both sides."""
    few = mean_interval([0.5, 0.5, 0.5])
    many = mean_interval([0.5] * 300)

    assert few.low <= 0.4 <= few.high
    assert few.low <= 0.6 <= few.high
    assert many.low < 0.5 < many.high
    assert many.high - many.low < 0.05


def test_one_value_without_bounds_tells_nothing_of_others():
    """The seconds of one question have an interval without ends, which JSON has no number for."""
    one = mean_interval([3.0], bounds=None)

    assert (one.low, one.high) == (-math.inf, math.inf)
    assert json.dumps(one.to_dict()) == '{"value": 3.0, "low": null, "high": null, "n": 1}'


def test_equal_values_without_bounds_have_no_width():
    """Each question took six requests: nothing tells how far another could lie."""
    interval = mean_interval([6.0] * 4, bounds=None)

    assert (interval.low, interval.value, interval.high) == pytest.approx((6.0, 6.0, 6.0))


def test_a_bootstrap_of_many_values_agrees_with_the_normal_theory():
    """The mean of 400 values is about normal, whatever they are."""
    values = np.random.default_rng(3).gamma(2.0, 1.5, 400)
    interval = mean_interval(list(values), bounds=None)
    margin = 1.96 * values.std(ddof=1) / math.sqrt(400)

    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - margin, abs=margin / 10)
    assert interval.high == pytest.approx(values.mean() + margin, abs=margin / 10)


def test_values_out_of_bounds_are_refused():
    """Seconds given as shares would be pulled towards 1."""
    with pytest.raises(ValueError, match="set bounds"):
        mean_interval([0.5, 2.0])
    with pytest.raises(ValueError, match="set bound"):
        paired_difference([0.5, 2.0], [0.5, 0.5])


def test_the_seed_fixes_an_interval():
    """The same seed gives the same interval, another one about the same."""
    values = [0.1, 0.9, 0.4, 0.6, 0.3]

    assert mean_interval(values, seed=7) == mean_interval(values, seed=7)
    assert mean_interval(values, seed=7) != mean_interval(values, seed=8)
    assert mean_interval(values, seed=7).low == pytest.approx(
        mean_interval(values, seed=8).low, abs=0.03
    )


@unhurried
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
    st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
def test_an_interval_holds_what_was_measured(ours, theirs):
    """Also at the edge of what is possible, from which the added observations draw away."""
    theirs = theirs[: len(ours)]
    mean, difference = mean_interval(ours), paired_difference(ours, theirs).interval

    assert mean.low <= mean.value <= mean.high
    assert mean.value == pytest.approx(np.mean(ours))
    assert difference.low <= difference.value <= difference.high
    assert difference.value == pytest.approx(np.mean(ours) - np.mean(theirs))


# ---------------------------------------------------------------- differences


def test_wins_losses_and_ties_are_counted_and_tested():
    """8 wins and 1 loss: P is that of 9 coins, both sides."""
    ours = [True] * 8 + [False] + [True] * 3
    theirs = [False] * 8 + [True] + [True] * 3
    difference = paired_difference(ours, theirs)

    assert (difference.wins, difference.losses, difference.ties) == (8, 1, 3)
    assert difference.interval.value == pytest.approx(7 / 12)
    assert difference.p == pytest.approx(2 * (1 + 9) / 2**9)
    assert difference.verdict(0.03) == "better"


def test_ties_alone_do_not_make_systems_equal():
    """No difference in n questions may still be one of about 3/n, as in the rule of three."""
    for n in (10, 30, 100):
        difference = paired_difference([True] * n, [True] * n)

        assert (difference.p, difference.ties, difference.interval.value) == (1.0, n, 0.0)
        assert 2 / n < difference.interval.high < 3.2 / n
        assert -3.2 / n < difference.interval.low < -2 / n


def test_one_win_and_many_ties_do_not_rule_out_a_loss():
    """A plain bootstrap of one win in 15 would never draw below 0, and call it as good."""
    difference = paired_difference([True] * 15, [False] + [True] * 14)

    assert difference.interval.low < -0.05
    assert difference.verdict(0.03) == "inconclusive"


@pytest.mark.parametrize("n", [8, 20])
@pytest.mark.parametrize(
    ("winning", "losing"), [(0.05, 0.05), (0.15, 0.15), (0.0, 0.05), (0.3, 0.1), (0.1, 0.2)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(n, winning, losing):
    """Over every possible outcome of n questions, by its probability."""
    held = 0.0
    for wins, losses in product(range(n + 1), repeat=2):
        chance = float(
            stats.multinomial.pmf(
                [wins, losses, n - wins - losses], n, [winning, losing, 1 - winning - losing]
            )
        )
        if wins + losses <= n and chance > 1e-4:
            ours = [True] * wins + [False] * (n - wins)
            theirs = [False] * wins + [True] * losses + [False] * (n - wins - losses)
            interval = paired_difference(ours, theirs).interval
            held += chance * (interval.low <= winning - losing <= interval.high)

    assert held >= 0.94


@pytest.mark.parametrize(
    ("wins", "losses", "ties", "verdict"),
    [
        (60, 10, 130, "better"),
        (10, 60, 130, "worse"),
        (30, 30, 9940, "as_good"),
        (30, 30, 140, "inconclusive"),
        (0, 0, 20, "inconclusive"),
        (0, 0, 500, "as_good"),
    ],
)
def test_the_verdict_goes_by_the_interval(wins, losses, ties, verdict):
    """With a margin of three points; few questions settle nothing."""
    ours = [1] * wins + [0] * losses + [1] * ties
    theirs = [0] * wins + [1] * losses + [1] * ties

    assert paired_difference(ours, theirs).verdict(0.03) == verdict


def test_a_small_loss_is_a_loss():
    """Within the margin, but below 0 with all of its interval: that is not "as good"."""
    ours = [1] * 9900 + [0] * 100

    assert paired_difference(ours, [1] * 10_000).verdict(0.03) == "worse"
    assert paired_difference([1] * 10_000, ours).verdict(0.03) == "better"


def test_the_number_of_questions_that_would_settle_it_settles_it():
    """A tenth won and a tenth lost: so many are enough to see it, and a quarter of them is not."""

    def seen(n):
        won, lost = [1] * (n // 10), [0] * (n // 10)
        tied = [1] * (n - 2 * (n // 10))
        return paired_difference([*won, *lost, *tied], [*lost, *won, *tied])

    needed = seen(50).questions_needed(0.03)

    assert needed == pytest.approx((1.96 + 0.84) ** 2 * 12 / 52 / 0.03**2, rel=0.01)
    assert seen(needed).verdict(0.03) == "as_good"
    assert seen(needed // 4).verdict(0.03) == "inconclusive"
    assert seen(50).questions_needed(0.06) == pytest.approx(needed / 4, abs=1)
    assert seen(50).questions_needed(0.03, power=0.5) < needed


def test_ties_alone_still_ask_for_more_questions():
    """No variance was seen, and yet one question does not settle it."""
    assert paired_difference([1] * 8, [1] * 8).questions_needed(0.03) > 100


def test_differences_of_seconds_have_no_bound():
    """Nothing is added, so that the interval is that of the differences seen."""
    difference = paired_difference([5.0, 7.0, 6.0], [2.0, 3.0, 2.5], bound=None)

    assert difference.interval.value == pytest.approx(3.5)
    assert 3.0 <= difference.interval.low < 3.5 < difference.interval.high <= 4.0
    assert difference.wins == 3
    assert paired_difference([5.0], [2.0], bound=None).interval.low == -math.inf


@pytest.mark.parametrize("compare", [paired_difference, ratio_interval, risk_coverage])
def test_what_is_no_pair_is_refused(compare):
    """Two runs over different questions cannot be compared question by question."""
    with pytest.raises(ValueError, match="not pairs"):
        compare([1.0, 0.5], [1.0])


# ---------------------------------------------------------------- ratios and percentiles


@unhurried
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_the_interval_of_a_median_ratio_is_that_of_its_order(ratios):
    """SciPy's quantile test has the same ends, and none where the pairs are too few."""
    interval = ratio_interval(ratios, [1.0] * len(ratios))
    theirs = stats.quantile_test(ratios, p=0.5).confidence_interval(0.95)
    expected = 0.0 if math.isnan(theirs.low) else theirs.low

    assert interval.value == pytest.approx(np.median(ratios))
    assert interval.low == pytest.approx(expected)
    assert interval.high == pytest.approx(math.inf if math.isnan(theirs.high) else theirs.high)
    assert (len(ratios) < 6) == (interval.high == math.inf)


def test_ratios_are_paired():
    """Twice as fast on every question is twice as fast, however the questions differ."""
    interval = ratio_interval([2.0, 20.0, 4.0, 8.0, 6.0, 1.0], [1.0, 10.0, 2.0, 4.0, 3.0, 0.5])

    assert (interval.low, interval.value, interval.high, interval.n) == (2.0, 2.0, 2.0, 6)


@pytest.mark.parametrize("pair", [([1.0], [0.0]), ([0.0], [1.0]), ([-1.0], [1.0])])
def test_a_ratio_of_no_time_is_refused(pair):
    """A question that took no time was not measured."""
    with pytest.raises(ValueError, match="above 0"):
        ratio_interval(*pair)


def test_percentiles_lie_between_the_nearest_values():
    """The median of four is between the two in the middle."""
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([4.0, 1.0, 2.0, 3.0], 100) == 4.0
    assert percentile(range(101), 95) == pytest.approx(95.0)


# ---------------------------------------------------------------- selection


def pool(rights, selected):
    """Return a pool from a string of + and -."""
    return PoolRights(rights=tuple(sign == "+" for sign in rights), selected=selected)


def test_efficiency_is_the_share_of_what_could_be_gained():
    """Of 3/4 + 1/2 that an oracle gains over chance, one question gains and one loses."""
    pools = [pool("+---", True), pool("+-", False), pool("++", True), pool("--", False)]
    efficiency = selection_efficiency(pools)

    assert efficiency.interval.value == pytest.approx((0.75 - 0.5) / (0.75 + 0.5))
    assert (efficiency.contested, efficiency.unselected) == (2, 0)
    assert efficiency.mean == pytest.approx(0.75)
    assert (efficiency.oracle, efficiency.selected) == (2, 1)


@unhurried
@given(
    st.lists(
        st.tuples(st.lists(st.booleans(), min_size=2, max_size=5), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_an_oracle_has_efficiency_one_and_the_worst_a_negative_one(drawn):
    """Whatever the pools; and a selector that is as often right as the drafts are has 0."""
    contested = [rights for rights, _ in drawn if any(rights) and not all(rights)]
    best = selection_efficiency([PoolRights(rights=tuple(r), selected=True) for r in contested])
    worst = selection_efficiency([PoolRights(rights=tuple(r), selected=False) for r in contested])

    assert (best is None) == (worst is None) == (not contested)
    if best and worst:
        assert best.interval.value == pytest.approx(1.0)
        assert worst.interval.value < 0
        assert best.interval.low <= 1.0 <= best.interval.high


def test_a_random_selector_has_efficiency_zero():
    """Right on one of two, with half of the drafts right."""
    efficiency = selection_efficiency([pool("+-", True), pool("+-", False)] * 40)

    assert efficiency.interval.value == 0.0
    assert -0.4 < efficiency.interval.low < 0 < efficiency.interval.high < 0.4


def test_three_of_three_are_no_certainty():
    """The interval of a perfect selector on few questions reaches far down."""
    few = selection_efficiency([pool("+-", True)] * 3)
    many = selection_efficiency([pool("+-", True)] * 200)

    assert few.interval.low < 0.3
    assert many.interval.low > 0.9


def test_questions_without_a_selection_are_reported_and_not_counted():
    """A draft that no score could be had for was not chosen against."""
    efficiency = selection_efficiency([pool("+-", True), pool("+-", None), pool("--", None)])

    assert (efficiency.contested, efficiency.unselected) == (1, 1)
    assert efficiency.interval.value == 1.0
    assert efficiency.interval.n == 1


def test_without_a_contested_question_selection_cannot_be_judged():
    """Any choice among drafts that are all right, or all wrong, is as good."""
    assert selection_efficiency([]) is None
    assert selection_efficiency([pool("++", True), pool("--", False), pool("", None)]) is None
    assert selection_efficiency([pool("+-", None)]) is None


# ---------------------------------------------------------------- confidence


def test_the_risk_falls_with_the_coverage_of_a_good_confidence():
    """Worked by hand: the wrong answer is the third of four."""
    points = risk_coverage([0.9, 0.2, 0.8, 0.5], [True, True, True, False])

    assert points == [
        RiskPoint(coverage=0.25, risk=0.0, threshold=0.9),
        RiskPoint(coverage=0.5, risk=0.0, threshold=0.8),
        RiskPoint(coverage=0.75, risk=pytest.approx(1 / 3), threshold=0.5),
        RiskPoint(coverage=1.0, risk=0.25, threshold=0.2),
    ]


def test_equal_confidences_are_one_step():
    """No threshold accepts the one and not the other, whichever stands first."""
    for rights in ([True, False, True], [False, True, True]):
        points = risk_coverage([0.7, 0.7, 0.1], rights)

        assert [point.coverage for point in points] == pytest.approx([2 / 3, 1.0])
        assert [point.risk for point in points] == pytest.approx([0.5, 1 / 3])


@unhurried
@given(confident)
def test_every_point_of_the_curve_is_what_its_threshold_does(graded):
    """Accepting by the threshold gives its coverage and its risk."""
    confidences, rights = unzipped(graded)
    points = risk_coverage(confidences, rights)

    assert [p.threshold for p in points] == sorted(set(confidences), reverse=True)
    for point in points:
        accepted = [r for c, r in graded if c >= point.threshold]
        assert point.coverage == pytest.approx(len(accepted) / len(graded))
        assert point.risk == pytest.approx(1 - sum(accepted) / len(accepted))


@unhurried
@given(confident, st.integers(1, 12))
def test_reliability_bins_are_those_of_scikit_learn(graded, bins):
    """The same means and shares; ours know their sizes besides."""
    confidences, rights = unzipped(graded)
    found = reliability(confidences, rights, bins=bins)
    shares, means = calibration_curve(
        np.asarray(rights, dtype=int),
        confidences,
        n_bins=bins,
        strategy="quantile",
        pos_label=1,
    )

    assert [group.right.value for group in found] == pytest.approx(list(shares))
    assert [group.confidence for group in found] == pytest.approx(list(means))
    assert sum(group.right.n for group in found) == len(graded)


@unhurried
@given(confident)
def test_calibration_measures_are_those_of_scikit_learn(graded):
    """Brier score and log loss; the error is the bins' distance from the diagonal by their size."""
    confidences, rights = unzipped(graded)
    measures = calibration_measures(confidences, rights, bins=5)
    bins = reliability(confidences, rights, bins=5)
    distances = [abs(group.confidence - group.right.value) for group in bins]

    assert measures.brier == pytest.approx(brier_score_loss(rights, confidences, labels=[0, 1]))
    assert measures.log_loss == pytest.approx(log_loss(rights, confidences, labels=[0, 1]))
    assert measures.ece == pytest.approx(
        np.average(distances, weights=[group.right.n for group in bins])
    )
    assert measures.n == len(graded)


def test_a_calibrated_confidence_has_no_calibration_error():
    """Of ten answers at 0.8, eight are right."""
    measures = calibration_measures([0.8] * 10, [True] * 8 + [False] * 2)

    assert measures.ece == pytest.approx(0.0)
    assert measures.brier == pytest.approx(0.16)


def test_a_certain_and_wrong_confidence_is_a_number():
    """The log of 0 is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measures = calibration_measures([1.0, 0.0], [False, True])

    assert math.isfinite(measures.log_loss)
    assert (measures.brier, measures.ece) == (1.0, 1.0)


def test_a_confidence_beyond_one_is_refused():
    """A score is no probability."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibration_measures([1.5], [True])


# ---------------------------------------------------------------- bounds


def test_twenty_two_right_answers_attain_nine_in_ten():
    """At delta = 0.1; twenty-one do not, and 22 with one error do not either."""
    assert precision_bound(22, 22, delta=0.1) >= 0.9
    assert precision_bound(21, 21, delta=0.1) < 0.9
    assert precision_bound(21, 22, delta=0.1) < 0.9
    assert smallest_sample(0.9, delta=0.1) == 22


@unhurried
@given(st.floats(0.05, 0.99), st.floats(0.01, 0.5))
def test_the_smallest_sample_attains_its_target_and_one_less_does_not(target, delta):
    """Whatever the target."""
    n = smallest_sample(target, delta=delta)

    assert precision_bound(n, n, delta=delta) >= target - 1e-8
    assert precision_bound(n - 1, n - 1, delta=delta) < target + 1e-8


@pytest.mark.parametrize("delta", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_the_bound_is_too_high_no_more_often_than_delta(n, delta):
    """Over every outcome by its probability, for true precisions from 0.02 to 0.98."""
    bounds = [precision_bound(right, n, delta=delta) for right in range(n + 1)]
    for true in np.linspace(0.02, 0.98, 25):
        violated = sum(
            stats.binom.pmf(right, n, true) for right, bound in enumerate(bounds) if bound > true
        )
        assert violated <= delta + 1e-9


def test_accepting_nothing_bounds_nothing():
    """No answer, no precision."""
    assert precision_bound(0, 0, delta=0.1) == 0.0
    assert precision_bound(0, 5, delta=0.1) == 0.0


def test_five_hundred_questions_are_resampled_in_no_time():
    """A report has some dozens of intervals."""
    rng = np.random.default_rng(0)
    ours, theirs = rng.random(500), rng.random(500)
    paired_difference(ours, theirs)  # the first call imports
    start = time.perf_counter()
    paired_difference(ours, theirs)

    assert time.perf_counter() - start < 2.0  # 0.02 s on two quiet cores
