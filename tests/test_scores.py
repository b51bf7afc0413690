"""How far drafts deserve trust: P(Yes) from one token, or the drafter's own word."""

from __future__ import annotations

import asyncio
import json
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import ScriptedModel

from specrag_integrations import ConfigurationError, Draft, Scoring
from specrag_integrations.errors import EndpointTimeoutError
from specrag_integrations.models import ChatReply, Token
from specrag_integrations.scores import Score, Verifier, read_labels
from specrag_integrations.spans import SpanLogprob

DRAFT = Draft(
    rationale="as [1] says",
    answer="Paris",
    rationale_logprob=SpanLogprob(total=-4.0, tokens=4),
    answer_logprob=SpanLogprob(total=-6.0, tokens=2),
)


def token(text, **alternatives):
    """Return a token by its alternatives' probabilities; keys may be anything."""
    return judged(text, alternatives)


def judged(text, shares):
    """Return a token with alternatives of these probabilities."""
    logs = {word: math.log(share) for word, share in shares.items()}
    return Token(
        text=text,
        data=text.encode(),
        logprob=logs.get(text, -20.0),
        alternatives=tuple(logs.items()),
    )


def share(text, shares):
    """Return P(Yes) of the labels."""
    return math.exp(read_labels(judged(text, shares)).log_share)


def verified(reply, draft=DRAFT, **options):
    """Score one draft at the first tier."""
    model = ScriptedModel([reply])
    verifier = Verifier(model, **options)
    return asyncio.run(verifier.tiers[0].score("Which city?", draft)), model


# ---------------------------------------------------------------- Yes and No


def test_p_yes_is_the_share_of_yes_among_both_labels():
    """A verifier that puts half its mass elsewhere does not doubt the draft."""
    labels = read_labels(judged("Maybe", {"Yes": 0.3, "No": 0.1, "Maybe": 0.6}))

    assert math.exp(labels.log_share) == pytest.approx(0.75)
    assert labels.mass == pytest.approx(0.4)


def test_all_spellings_are_summed():
    """No single spelling holds the probability of the label."""
    spellings = {"Yes": 0.2, " yes": 0.1, "YES": 0.1, "\u2581Yes": 0.1, "\u0120Yes": 0.05}
    spellings |= {"Yes.": 0.05, "**Yes": 0.05, '"Yes"': 0.05, "yes\n": 0.05, " no": 0.1, "No": 0.15}

    assert share("Yes", spellings) == pytest.approx(0.75)


def test_the_order_of_the_alternatives_does_not_matter():
    """Neither the first spelling nor the written token is preferred."""
    shares = {" yes": 0.1, "Yes": 0.5, "No": 0.4}
    turned = dict(reversed(shares.items()))

    assert share("No", shares) == share("Yes", turned) == pytest.approx(0.6)


@pytest.mark.parametrize("word", ["eyes", "Yesterday", "yess", "Ye", "know", "Nope", "None", "Not"])
def test_words_that_hold_a_label_are_none(word):
    """A verdict by substring would count them."""
    labels = read_labels(judged("Yes", {"Yes": 0.2, "No": 0.2, word: 0.6}))

    assert math.exp(labels.log_share) == pytest.approx(0.5)
    assert labels.mass == pytest.approx(0.4)


def test_a_label_that_is_not_listed_is_bounded_by_the_smallest_that_is():
    """It is at most that likely; log 0 would outweigh everything, and a half would be a lie."""
    assert share("Yes", {"Yes": 0.8, "Maybe": 0.15, "So": 0.05}) == pytest.approx(0.8 / 0.85)
    assert share("No", {"No": 0.8, "Maybe": 0.15, "So": 0.05}) == pytest.approx(0.05 / 0.85)


def test_neither_label_is_no_verdict():
    """Not 0, and not 0.5."""
    labels = read_labels(judged("Paris", {"Paris": 0.9, "Rome": 0.1}))

    assert labels.log_share is None
    assert labels.mass == 0.0


@pytest.mark.parametrize("listed", [{}, {"Yes": 0.9}])
def test_without_alternatives_nothing_can_be_read(listed):
    """The written token alone says nothing of the other label."""
    assert read_labels(judged("Yes", listed)) is None


def test_the_written_token_counts_once_whether_it_is_listed_or_not():
    """Some servers leave it out of the alternatives, others list it twice."""
    yes, no = math.log(0.6), math.log(0.2)
    without = Token(text="Yes", data=b"Yes", logprob=yes, alternatives=(("No", no),))
    twice = Token(
        text="Yes", data=b"Yes", logprob=yes, alternatives=(("Yes", yes), ("No", no), ("Yes", yes))
    )

    for one in (without, twice):
        assert math.exp(read_labels(one).log_share) == pytest.approx(0.75)


@pytest.mark.parametrize("never", [-9999.0, -math.inf, -800.0])
def test_never_is_a_small_number_and_no_crash(never):
    """Servers write -9999 or -inf; the logarithm of their exponential does not exist."""
    low = Token(text="No", data=b"No", logprob=-0.1, alternatives=(("Yes", never), ("No", -0.1)))
    labels = read_labels(low)

    assert math.isfinite(labels.log_share)
    assert labels.log_share <= -99


def test_nan_is_left_out():
    """It says nothing, and would make everything it is added to say nothing."""
    odd = Token(
        text="Yes",
        data=b"Yes",
        logprob=math.log(0.6),
        alternatives=(("YES", math.nan), ("No", math.log(0.2))),
    )

    assert math.exp(read_labels(odd).log_share) == pytest.approx(0.75)


WORDS = st.sampled_from(["Yes", " yes", "YES.", "No", " no", "eyes", "Maybe", "the"])


@given(st.dictionaries(WORDS, st.floats(-200, 0), min_size=2))
def test_a_share_is_always_a_probability(logs):
    """Whatever a server returns: never NaN, never above 1, never log 0."""
    text, value = next(iter(logs.items()))
    labels = read_labels(
        Token(text=text, data=text.encode(), logprob=value, alternatives=tuple(logs.items()))
    )

    assert 0.0 <= labels.mass <= 1.0
    if labels.log_share is not None:
        assert math.isfinite(labels.log_share)
        assert labels.log_share <= 0.0


# ---------------------------------------------------------------- reflection


def test_reflection_asks_for_one_token_and_its_alternatives():
    """The verifier reads question, rationale and answer, and no passage."""
    score, model = verified(ChatReply(text="Yes", tokens=(token("Yes", Yes=0.75, No=0.25),)))
    request, step = model.asked[0]

    assert math.exp(score.value) == pytest.approx(0.75)
    assert score.terms == {"reflection": score.value}
    assert (score.tier, score.draft, score.missing) == ("reflection", 0, None)
    assert score.label_mass == pytest.approx(1.0)
    assert (request.max_tokens, request.top_logprobs, request.temperature) == (1, 20, 0.0)
    assert str(step) == "verify_0"
    assert [message.role for message in request.messages] == ["user", "assistant", "user"]
    assert request.messages[0].content == "Which city?"
    assert request.messages[1].content == "Rationale: as [1] says\nAnswer: Paris"


@pytest.mark.parametrize("text", ["Yes", "No", "Yes.", "Maybe", "", "**Yes"])
def test_the_text_of_the_verdict_does_not_matter(text):
    """Only the probabilities do: "No" at P(Yes) = 0.49 is no certain no."""
    tokens = (judged("Maybe", {"Yes": 0.49, "No": 0.01, "Maybe": 0.5}),)
    score, _ = verified(ChatReply(text=text, tokens=tokens))

    assert math.exp(score.value) == pytest.approx(0.98)


@pytest.mark.parametrize(
    ("reply", "missing", "cannot"),
    [
        (ChatReply(text="Yes"), "no log-probabilities", True),
        (ChatReply(text="Yes", tokens=()), "no log-probabilities", True),
        (ChatReply(text="Yes", tokens=(token("Yes"),)), "no alternatives", True),
        (ChatReply(text="Hm", tokens=(token("Hm", Hm=0.9, So=0.1),)), "neither Yes nor No", False),
    ],
)
def test_a_reply_without_a_verdict_is_a_score_without_a_value(reply, missing, cannot):
    """The text "Yes" alone is worth nothing: what is missing is said, not made up."""
    score, _ = verified(reply)

    assert score.value is None
    assert score.terms == {}
    assert missing in score.missing
    assert score.cannot is cannot


def test_a_failed_verification_is_a_score_without_a_value():
    """One that failed, as opposed to one that cannot be had."""
    error = EndpointTimeoutError("too slow")
    error.attempts = 2
    score, _ = verified(error)

    assert (score.value, score.missing, score.cannot, score.attempts) == (
        None,
        "too slow",
        False,
        2,
    )


def test_a_score_becomes_json():
    """None is null; nothing in it is NaN."""
    for reply in ("Yes", ChatReply(text="No", tokens=(token("No", Yes=0.25, No=0.75),))):
        score, _ = verified(reply)
        data = json.loads(json.dumps(score.to_dict(), allow_nan=False))
        assert data["value"] == score.value


# ---------------------------------------------------------------- the drafter's own word


def test_draft_only_is_the_mean_of_both_spans_and_costs_nothing():
    """Each a mean per token, so that a long rationale does not drown the answer."""
    score, model = verified("unused", scoring=Scoring(tier="draft_only"))

    assert score.terms == {"draft_rationale": -1.0, "draft_answer": -3.0, "draft": -2.0}
    assert score.value == -2.0
    assert model.asked == []


def test_a_draft_without_a_rationale_has_no_draft_term():
    """It would be compared by the answer alone, which others are not."""
    bare = Draft(rationale="", answer="Paris", answer_logprob=SpanLogprob(total=-1.0, tokens=1))
    score, _ = verified("unused", bare, scoring=Scoring(tier="draft_only"))

    assert (score.value, score.cannot) == (None, False)
    assert "no rationale" in score.missing


def test_a_drafter_without_log_probabilities_cannot():
    """The server is the reason, not the draft."""
    score, _ = verified("x", Draft(rationale="r", answer="a"), scoring=Scoring(tier="draft_only"))

    assert (score.value, score.cannot) == (None, True)
    assert "no log-probabilities" in score.missing


# ---------------------------------------------------------------- tiers


def names(verifier):
    """Return the names of the tiers in use."""
    return [tier.name for tier in verifier.tiers]


def of(*, cannot):
    """Return a score with or without a verdict."""
    return Score(draft=0, tier="reflection", value=None if cannot else -1.0, cannot=cannot)


CANNOT, CAN = of(cannot=True), of(cannot=False)


def test_all_tiers_are_tried_the_best_first():
    """And their requests are counted."""
    verifier = Verifier(ScriptedModel([]))

    assert names(verifier) == ["reflection", "draft_only"]
    assert verifier.requests_per_draft == 1


@pytest.mark.parametrize(("tier", "requests"), [("reflection", 1), ("draft_only", 0)])
def test_a_named_tier_is_the_only_one(tier, requests):
    """Nothing else is tried behind the caller's back."""
    verifier = Verifier(ScriptedModel([]), scoring=Scoring(tier=tier))

    assert names(verifier) == [tier]
    assert verifier.requests_per_draft == requests


def test_an_unknown_tier_names_the_known_ones():
    """At construction, never in the middle of a question."""
    with pytest.raises(ConfigurationError, match="choose one of reflection, draft_only"):
        Scoring(tier="magic")


def test_different_drafters_are_not_compared_by_their_own_word():
    """Log-probabilities of different models have different scales."""
    assert names(Verifier(ScriptedModel([]), comparable_drafts=False)) == ["reflection"]
    with pytest.raises(ConfigurationError, match="different drafting models"):
        Verifier(ScriptedModel([]), scoring=Scoring(tier="draft_only"), comparable_drafts=False)


def test_three_questions_in_a_row_move_the_tier(caplog):
    """One may be bad luck; three are a server. It is logged once."""
    verifier = Verifier(ScriptedModel([]))
    with caplog.at_level(logging.WARNING):
        for expected in ("reflection", "reflection", "draft_only", "draft_only", "draft_only"):
            verifier.remember([CANNOT, CANNOT])
            assert names(verifier)[0] == expected

    assert len(caplog.records) == 1
    assert "reflection did not work for 3 questions in a row" in caplog.text


@pytest.mark.parametrize("between", [[CAN], [CAN, CANNOT], [CANNOT, CAN]])
def test_a_question_that_worked_starts_the_count_anew(between):
    """One draft that could be scored is enough."""
    verifier = Verifier(ScriptedModel([]))
    for scores in ([CANNOT], [CANNOT], between, [CANNOT], [CANNOT]):
        verifier.remember(scores)

    assert names(verifier)[0] == "reflection"


def test_a_question_without_scores_teaches_nothing():
    """All drafts failed, which says nothing of the verifier."""
    verifier = Verifier(ScriptedModel([]))
    for scores in ([CANNOT], [CANNOT], [], [CANNOT]):
        verifier.remember(scores)

    assert names(verifier)[0] == "draft_only"


def test_a_forced_tier_is_never_given_up():
    """There is nothing to descend to."""
    verifier = Verifier(ScriptedModel([]), scoring=Scoring(tier="reflection"))
    for _ in range(5):
        verifier.remember([CANNOT])

    assert names(verifier) == ["reflection"]
