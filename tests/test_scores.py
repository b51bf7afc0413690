"""How far drafts deserve trust: five terms, what counts of them, and what they come to."""

from __future__ import annotations

import json
import math

import pytest

from specrag_integrations import ConfigurationError, Draft, Scoring
from specrag_integrations.scores import Verdict, score_of
from specrag_integrations.spans import SpanLogprob


def span(*probabilities):
    """Return the log-probability of a text whose tokens have these probabilities."""
    logs = [math.log(p) for p in probabilities]
    return SpanLogprob(total=sum(logs), tokens=len(logs))


DRAFT = Draft(
    rationale="as [1] says",
    answer="Paris",
    rationale_logprob=SpanLogprob(total=-4.0, tokens=4),
    answer_logprob=SpanLogprob(total=-6.0, tokens=2),
)
BARE = Draft(rationale="", answer="Paris", answer_logprob=SpanLogprob(total=-1.0, tokens=1))
BY_HAND = Draft(rationale="as [1] says", answer="Paris")
SPANS = {
    "consistency_rationale": SpanLogprob(total=-8.0, tokens=4),
    "consistency_answer": SpanLogprob(total=-5.0, tokens=2),
}
VERDICT = Verdict(
    terms={"consistency_rationale": -2.0, "consistency_answer": -2.5, "reflection": -0.5},
    spans=SPANS,
    log_yes=-0.75,
    label_mass=0.9,
)
ALL_FIVE = {
    "draft_rationale": -1.0,
    "draft_answer": -3.0,
    "consistency_rationale": -2.0,
    "consistency_answer": -2.5,
    "reflection": -0.5,
}


def scored(draft=DRAFT, verdict=VERDICT, *, tier="prompt_logprobs", comparable=True, **scoring):
    """Return a draft's score."""
    return score_of(
        draft,
        verdict,
        index=3,
        tier=tier,
        scoring=Scoring(**scoring),
        comparable_drafts=comparable,
    )


# ---------------------------------------------------------------- what can be asked for


def test_an_unknown_tier_names_the_known_ones():
    """At construction, never in the middle of a question."""
    known = "prompt_logprobs, forced_decoding, reflection, choice, draft_only, agreement"
    with pytest.raises(ConfigurationError, match=f"tier='magic' is unknown; choose one of {known}"):
        Scoring(tier="magic")


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("formula", "sum", "weighted, paper"),
        ("formula", None, "weighted, paper"),
        ("order", "answer", "rationale_first, answer_first"),
        ("evidence", "all", "passages"),
        ("evidence", True, "passages"),
        ("tier", ["reflection"], "prompt_logprobs, "),
    ],
)
def test_unknown_values_are_named_with_the_known_ones(option, value, known):
    """A typing error is found before the first question."""
    with pytest.raises(ConfigurationError, match=f"is unknown; choose one of {known}") as raised:
        Scoring(**{option: value})
    assert f"{option}={value!r}" in str(raised.value)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, "1", None, True, 1j])
def test_weights_are_finite_numbers(weight):
    """The wrong one is named with its value."""
    with pytest.raises(ConfigurationError, match="must be a finite number") as raised:
        Scoring(weights={"reflection": 1.0, "draft_answer": weight})
    assert f"weights['draft_answer']={weight!r}" in str(raised.value)


@pytest.mark.parametrize("weights", [["reflection"], "reflection", 1.0])
def test_weights_are_a_mapping(weights):
    """From a term's name to a number."""
    with pytest.raises(ConfigurationError, match="weights must be a Mapping"):
        Scoring(weights=weights)


@pytest.mark.parametrize("weights", [{}, {"reflection": 0}, {"reflection": 0.0, "draft": 0}])
def test_weights_that_are_all_0_are_refused(weights):
    """All drafts would be equal, and the first would win every time."""
    with pytest.raises(ConfigurationError, match="weights are all 0"):
        Scoring(weights=weights)


def test_weights_name_terms_that_exist():
    """The message lists them."""
    with pytest.raises(
        ConfigurationError,
        match="weights name 'consistency'; the terms are draft_rationale, draft_answer, draft, "
        "consistency_rationale, consistency_answer, reflection",
    ):
        Scoring(weights={"consistency": 1.0})


@pytest.mark.parametrize(
    ("tier", "term", "has"),
    [
        ("reflection", "consistency_answer", "draft_rationale, draft_answer, draft, reflection"),
        ("draft_only", "reflection", "draft_rationale, draft_answer, draft$"),
        ("choice", "reflection", "pick$"),
        ("agreement", "draft", "agreement$"),
    ],
)
def test_weights_name_terms_that_the_named_tier_has(tier, term, has):
    """Else the weight would count for nothing, silently."""
    with pytest.raises(ConfigurationError, match=f"the terms at tier='{tier}' are {has}"):
        Scoring(tier=tier, weights={term: 1.0})


def test_the_papers_formula_has_no_weights():
    """Its product leaves nothing to weigh."""
    with pytest.raises(ConfigurationError, match="formula='paper' has no weights; leave them out"):
        Scoring(formula="paper", weights={"reflection": 1.0})


@pytest.mark.parametrize("tier", ["reflection", "choice", "draft_only", "agreement"])
def test_the_papers_formula_needs_a_tier_with_all_five_terms(tier):
    """The message says which it lacks and which tiers have them."""
    with pytest.raises(ConfigurationError, match="needs all five terms") as raised:
        Scoring(formula="paper", tier=tier)
    assert "consistency_rationale, consistency_answer" in str(raised.value)
    assert "use tier='prompt_logprobs' (vLLM) or 'forced_decoding' (llama.cpp)" in str(raised.value)


@pytest.mark.parametrize("tier", [None, "prompt_logprobs", "forced_decoding"])
def test_the_papers_formula_can_be_had_at_two_tiers(tier):
    """Both tell the verifier's log-probabilities of a given text."""
    assert (
        Scoring(formula="paper", tier=tier).weights_at("prompt_logprobs").keys() == ALL_FIVE.keys()
    )


@pytest.mark.parametrize("tier", ["choice", "draft_only", "agreement"])
def test_evidence_is_for_tiers_that_read_one_draft_at_a_time(tier):
    """Elsewhere it would be an option without an effect."""
    with pytest.raises(
        ConfigurationError,
        match=f"evidence='passages' does nothing at tier='{tier}'.*"
        "use one of prompt_logprobs, forced_decoding, reflection",
    ):
        Scoring(tier=tier, evidence="passages")
    with pytest.raises(ConfigurationError, match="order='answer_first' does nothing"):
        Scoring(tier=tier, order="answer_first")


# ---------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("tier", "term"),
    [
        ("prompt_logprobs", "reflection"),
        ("forced_decoding", "reflection"),
        ("reflection", "reflection"),
        ("choice", "pick"),
        ("draft_only", "draft"),
        ("agreement", "agreement"),
    ],
)
def test_one_term_counts_until_weights_are_fitted(tier, term):
    """The tier's own."""
    assert Scoring().weights_at(tier) == {term: 1.0}


def test_a_tier_leaves_out_the_terms_it_does_not_have():
    """What is left is counted; where nothing is left, the tier's own term."""
    scoring = Scoring(weights={"consistency_answer": 2.0, "reflection": 0.5, "draft": 0})

    assert scoring.weights_at("prompt_logprobs") == {"consistency_answer": 2.0, "reflection": 0.5}
    assert scoring.weights_at("reflection") == {"reflection": 0.5}
    assert scoring.weights_at("draft_only") == {"draft": 1.0}
    assert scoring.weights_at("choice") == {"pick": 1.0}


@pytest.mark.parametrize(
    ("options", "compares"),
    [
        ({}, False),
        ({"tier": "reflection"}, False),
        ({"weights": {"reflection": 1.0, "draft": 0}}, False),
        ({"weights": {"reflection": 1.0, "draft_answer": 0.1}}, True),
        ({"tier": "draft_only"}, True),
        ({"formula": "paper"}, True),
    ],
)
def test_a_scoring_tells_whether_the_drafters_word_counts(options, compares):
    """Different drafting models do not share a scale."""
    assert Scoring(**options).compares_drafters is compares


# ---------------------------------------------------------------- a score


def test_all_five_terms_are_exposed_as_means_and_one_counts():
    """With the sums, the numbers of tokens and the means of those that stand for a text."""
    score = scored()

    assert score.terms == {**ALL_FIVE, "draft": -2.0}
    assert score.value == -0.5
    assert (score.draft, score.tier, score.label_mass) == (3, "prompt_logprobs", 0.9)
    assert {name: (one.total, one.tokens, one.mean) for name, one in score.spans.items()} == {
        "draft_rationale": (-4.0, 4, -1.0),
        "draft_answer": (-6.0, 2, -3.0),
        "consistency_rationale": (-8.0, 4, -2.0),
        "consistency_answer": (-5.0, 2, -2.5),
    }
    assert (score.missing, score.cannot) == (None, False)


def test_weights_times_terms_are_added_up():
    """In nats; a weight may be negative."""
    score = scored(weights={"draft": 0.5, "consistency_answer": 2.0, "reflection": -1.0})

    assert score.value == pytest.approx(0.5 * -2.0 + 2.0 * -2.5 - 1.0 * -0.5)


def test_the_draft_term_is_the_mean_of_both_means():
    """So that a long rationale does not drown the answer."""
    assert scored(verdict=Verdict(), tier="draft_only").value == (-1.0 + -3.0) / 2


def test_a_weight_of_0_needs_no_term():
    """What counts for nothing may be missing."""
    score = scored(BY_HAND, weights={"reflection": 2.0, "draft": 0.0, "draft_answer": 0})

    assert score.value == -1.0


def test_each_draft_has_its_own_drafters_terms():
    """Also where equal drafts share one verdict."""
    other = Draft(
        rationale=DRAFT.rationale,
        answer=DRAFT.answer,
        rationale_logprob=SpanLogprob(total=-1.0, tokens=1),
        answer_logprob=SpanLogprob(total=-1.0, tokens=1),
    )

    assert scored().terms["draft"] == -2.0
    assert scored(other).terms["draft"] == -1.0


def test_drafts_of_different_models_have_no_drafters_terms():
    """They could not be compared, so they are not shown as if they could."""
    score = scored(comparable=False)

    assert score.terms == VERDICT.terms
    assert score.spans == SPANS
    assert score.value == -0.5


def test_a_tier_shows_the_terms_it_has_and_no_others():
    """Whatever a verdict holds."""
    assert scored(tier="reflection").terms == {
        "draft_rationale": -1.0,
        "draft_answer": -3.0,
        "draft": -2.0,
        "reflection": -0.5,
    }
    agreed = scored(verdict=Verdict(terms={"agreement": -0.7}), tier="agreement")
    assert (agreed.terms, agreed.spans) == ({"agreement": -0.7}, {})


# ---------------------------------------------------------------- what is missing


def test_a_failed_verification_is_a_score_without_a_value():
    """What is known beside it is kept."""
    score = scored(verdict=Verdict(failed="too slow", attempts=2))

    assert (score.value, score.missing, score.cannot, score.attempts) == (
        None,
        "too slow",
        False,
        2,
    )
    assert score.terms["draft"] == -2.0
    assert scored(verdict=Verdict(failed="refused", cannot=True)).cannot


def test_a_term_that_counts_and_was_not_told_leaves_no_value():
    """Its reason is the verdict's."""
    verdict = Verdict(
        terms={"consistency_answer": -1.0}, reasons={"reflection": "neither Yes nor No"}
    )

    score = scored(verdict=verdict)
    assert (score.value, score.missing, score.cannot) == (None, "neither Yes nor No", True)
    assert scored(verdict=verdict, weights={"consistency_answer": 1.0}).value == -1.0


@pytest.mark.parametrize(
    ("term", "tier"),
    [("draft_rationale", "reflection"), ("draft", "draft_only"), ("draft", "prompt_logprobs")],
)
def test_a_draft_without_a_rationale_lacks_its_terms(term, tier):
    """It would be compared by its answer alone, which the others are not; no server is to blame."""
    verdict = Verdict(terms={"reflection": -0.5, "consistency_answer": -1.0})
    score = scored(BARE, verdict, tier=tier, weights={term: 1.0})

    assert (score.value, score.cannot) == (None, False)
    assert score.missing == f"the draft has no rationale, so no {term}"


def test_a_consistency_that_an_empty_rationale_cannot_have_is_no_servers_fault():
    """The paper's product has no value then."""
    verdict = Verdict(terms={"reflection": -0.5, "consistency_answer": -1.0})
    score = scored(BARE, verdict, weights={"consistency_rationale": 1.0})

    assert (score.value, score.cannot) == (None, False)
    assert "no rationale" in score.missing


@pytest.mark.parametrize("term", ["draft_rationale", "draft_answer", "draft"])
def test_a_drafter_without_log_probabilities_is_named(term):
    """The drafter's server is the reason, which says nothing of the verifier's."""
    score = scored(BY_HAND, weights={term: 1.0, "reflection": 1.0})

    assert (score.value, score.cannot) == (None, False)
    assert score.missing == "the drafter returned no log-probabilities"
    assert scored(BY_HAND).value == -0.5


# ---------------------------------------------------------------- the paper's formula

PAPER = Draft(
    rationale="r r",
    answer="a a",
    rationale_logprob=span(0.5, 0.4),
    answer_logprob=span(0.6, 0.5),
)
CONSISTENT = {
    "consistency_rationale": span(0.5, 0.5),
    "consistency_answer": span(0.8, 0.5),
}


def judged(spans, p_yes):
    """Return a verdict with these spans and P(Yes)."""
    terms = {name: one.mean for name, one in spans.items()}
    # P(Yes) / (P(Yes) + P(No)) is not what the paper multiplies.
    return Verdict(
        terms={**terms, "reflection": -0.01}, spans=spans, log_yes=math.log(p_yes), label_mass=0.8
    )


def test_the_papers_formula_gives_the_numbers_computed_by_hand():
    """(P(rationale) + P(answer)) · P(rationale, answer) · P(Yes), with sums instead of means."""
    score = scored(PAPER, judged(CONSISTENT, 0.7), formula="paper")

    drafted = 0.5 * 0.4 + 0.6 * 0.5  # 0.2 + 0.3 = 0.5
    consistent = (0.5 * 0.5) * (0.8 * 0.5)  # 0.25 · 0.4 = 0.1
    assert math.exp(score.value) == pytest.approx(drafted * consistent * 0.7)
    assert math.exp(score.value) == pytest.approx(0.035)


def test_the_papers_order_of_two_drafts_is_that_of_the_products():
    """The second is likelier for each reader alone, and the first wins by its product."""
    sure = Draft(rationale="r", answer="a", rationale_logprob=span(0.9), answer_logprob=span(0.9))
    one = scored(
        sure, judged({**CONSISTENT, "consistency_answer": span(0.5)}, 0.6), formula="paper"
    )
    two = scored(PAPER, judged(CONSISTENT, 0.95), formula="paper")

    assert math.exp(one.value) == pytest.approx((0.9 + 0.9) * 0.25 * 0.5 * 0.6)  # 0.135
    assert math.exp(two.value) == pytest.approx((0.2 + 0.3) * 0.25 * 0.4 * 0.95)  # 0.0475
    assert one.value > two.value


def test_the_papers_value_may_be_above_0():
    """Its first factor is a sum of two probabilities, up to 2."""
    certain = Draft(
        rationale="r", answer="a", rationale_logprob=span(1.0), answer_logprob=span(1.0)
    )
    spans = {"consistency_rationale": span(1.0), "consistency_answer": span(1.0)}

    assert scored(certain, judged(spans, 1.0), formula="paper").value == pytest.approx(math.log(2))


def test_a_longer_draft_has_a_lower_product():
    """As in the paper, which adds no mean: a known weakness of its formula."""
    longer = {**CONSISTENT, "consistency_rationale": span(0.5, 0.5, 0.5, 0.5)}

    short = scored(PAPER, judged(CONSISTENT, 0.7), formula="paper").value
    assert scored(PAPER, judged(longer, 0.7), formula="paper").value == pytest.approx(
        short + math.log(0.25)
    )


def test_sums_far_below_what_a_float_can_hold_are_still_compared():
    """e^-2000 is 0 as a float; the sum of two such probabilities has a logarithm all the same."""
    tiny = Draft(
        rationale="r",
        answer="a",
        rationale_logprob=SpanLogprob(total=-2000.0, tokens=500),
        answer_logprob=SpanLogprob(total=-2000.0, tokens=500),
    )
    spans = {
        "consistency_rationale": SpanLogprob(total=-2500.0, tokens=500),
        "consistency_answer": SpanLogprob(total=-1500.0, tokens=500),
    }
    score = scored(tiny, judged(spans, 0.5), formula="paper")

    assert score.value == pytest.approx(-2000 + math.log(2) - 2500 - 1500 + math.log(0.5))


@pytest.mark.parametrize(("rationale", "answer"), [(-1.0, -3000.0), (-3000.0, -1.0)])
def test_the_larger_of_two_very_different_probabilities_is_their_sum(rationale, answer):
    """Whichever it is."""
    lopsided = Draft(
        rationale="r",
        answer="a",
        rationale_logprob=SpanLogprob(total=rationale, tokens=1),
        answer_logprob=SpanLogprob(total=answer, tokens=1),
    )
    spans = {"consistency_rationale": span(1.0), "consistency_answer": span(1.0)}

    assert scored(lopsided, judged(spans, 1.0), formula="paper").value == pytest.approx(-1.0)


@pytest.mark.parametrize("lost", ALL_FIVE)
def test_without_one_of_the_five_the_paper_has_no_value(lost):
    """None of them is 1, and none is left out."""
    verdict = judged({k: v for k, v in CONSISTENT.items() if k != lost}, 0.7)
    if lost == "reflection":
        terms = {k: v for k, v in verdict.terms.items() if k != lost}
        verdict = Verdict(terms=terms, spans=verdict.spans)
    draft = Draft(
        rationale="r r",
        answer="a a",
        rationale_logprob=None if lost == "draft_rationale" else PAPER.rationale_logprob,
        answer_logprob=None if lost == "draft_answer" else PAPER.answer_logprob,
    )

    assert scored(draft, verdict, formula="paper").value is None


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "score",
    [
        scored(),
        scored(verdict=Verdict(failed="down")),
        scored(PAPER, judged(CONSISTENT, 0.7), formula="paper"),
        scored(verdict=Verdict(terms={"pick": 0.5}), tier="choice"),
    ],
)
def test_a_score_becomes_json(score):
    """None is null; nothing in it is NaN; sums, means and numbers of tokens are all there."""
    data = json.loads(json.dumps(score.to_dict(), allow_nan=False))

    assert (data["draft"], data["tier"], data["value"]) == (3, score.tier, score.value)
    assert data["terms"] == score.terms
    assert data["missing"] == score.missing
    for name, one in score.spans.items():
        assert data["spans"][name] == {"total": one.total, "mean": one.mean, "tokens": one.tokens}


def test_the_drafters_own_tier_cannot_do_without_its_word():
    """There it is the drafter's server that is asked, and that cannot."""
    score = scored(BY_HAND, Verdict(), tier="draft_only")

    assert (score.value, score.cannot) == (None, True)
