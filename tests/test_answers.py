"""What an answer carries: its cost, its rivals, and a form for the record."""

from __future__ import annotations

import json

import pytest

from specrag_integrations import (
    Answer,
    Draft,
    FailedDraft,
    FallbackReason,
    Passage,
    Price,
    Score,
    Selection,
    Subset,
    Trace,
    Usage,
)
from specrag_integrations.answers import dissent_from
from specrag_integrations.models import TokenCount
from specrag_integrations.usage import StepUsage


def step(role="drafter", *, attempts=1, **count):
    """Return one step's usage."""
    kind = "draft" if role == "drafter" else "verify"
    return StepUsage(
        kind=kind,
        index=0,
        role=role,
        model="m",
        seconds=1.0,
        arrived=2.0,
        count=TokenCount(**count),
        attempts=attempts,
    )


def draft(index, answer, **options):
    """Return a draft that answers."""
    passage = Passage(text=f"secret text {index}", title="secret title", id=f"p{index}")
    subset = Subset(index=index, ranks=(index,), passages=(passage,))
    return Draft(rationale=f"why {index}", answer=answer, subset=subset, **options)


def score(index, value):
    """Return its score."""
    return Score(draft=index, tier="reflection", value=value)


# ---------------------------------------------------------------- usage


def test_tokens_are_added_up_by_role():
    """Drafting and verifying have different prices, so they are counted apart."""
    usage = Usage(
        steps=(
            step(prompt=10, completion=3, cached=4),
            step(prompt=20, completion=5, attempts=3),
            step("verifier", prompt=7, completion=1),
        )
    )

    assert usage.tokens("drafter") == TokenCount(prompt=30, completion=8, cached=4)
    assert usage.tokens("verifier") == TokenCount(prompt=7, completion=1, cached=None)
    assert usage.requests == 5


def test_what_no_server_counted_is_none_and_what_is_zero_is_zero():
    """Zero tokens would be a claim."""
    assert Usage().tokens("drafter") == TokenCount()
    assert Usage(steps=(step(), step())).tokens("drafter").prompt is None
    assert Usage(steps=(step(prompt=0),)).tokens("drafter").prompt == 0
    assert Usage(steps=(step(prompt=None), step(prompt=4))).tokens("drafter").prompt == 4


def test_the_cost_is_tokens_times_prices_per_million():
    """Input and output of each role by its own price."""
    usage = Usage(
        steps=(
            step(prompt=1_000_000, completion=500_000),
            step("verifier", prompt=2_000_000, completion=1_000_000),
            step("verifier"),
        )
    )
    prices = {"drafter": Price(input=1, output=2), "verifier": Price(input=10, output=20)}

    assert usage.cost(prices) == pytest.approx(1 + 1 + 20 + 20)


def test_a_role_that_was_used_needs_a_price():
    """A forgotten price is no zero."""
    with pytest.raises(KeyError, match="verifier"):
        Usage(steps=(step("verifier", prompt=1),)).cost({"drafter": Price(input=1, output=1)})


# ---------------------------------------------------------------- dissent


def test_rival_answers_are_grouped_and_the_best_comes_first():
    """Answers equal but for case, articles and punctuation are one; the winner's own is none."""
    drafts = [
        draft(0, "Paris"),
        draft(1, "the Rome."),
        draft(2, "paris [1]"),
        draft(3, "Rome"),
        draft(4, "Oslo"),
    ]
    scores = [score(i, value) for i, value in enumerate([-1.0, -3.0, -2.0, -2.5, -0.5])]

    oslo, rome = dissent_from("Paris.", drafts, scores)

    assert (oslo.answer, oslo.value, oslo.drafts) == ("Oslo", -0.5, (4,))
    assert (rome.answer, rome.value, rome.drafts) == ("Rome", -2.5, (1, 3))
    assert [passage.id for passage in rome.passages] == ["p3"]


def test_answers_that_differ_in_a_sign_are_rivals():
    """C# is not C++, and -5 is not 5."""
    assert len(dissent_from("C#", [draft(0, "C#"), draft(1, "C++"), draft(2, "C")], [])) == 2


def test_failed_drafts_and_abstentions_are_no_rivals():
    """They answer nothing."""
    failed = FailedDraft(subset=draft(1, "x").subset, reason="down")
    drafts = [draft(0, "Paris"), failed, draft(2, "unknown", abstained=True)]

    assert dissent_from("Paris", drafts, []) == ()


def test_rivals_without_a_score_come_last_and_say_so():
    """None, not 0; ties go to the lower index."""
    drafts = [draft(0, "Rome"), draft(1, "Oslo"), draft(2, "Bonn"), draft(3, "Rome")]
    rivals = dissent_from("Paris", drafts, [score(2, -50.0), score(0, None)])

    assert [(rival.answer, rival.value) for rival in rivals] == [
        ("Bonn", -50.0),
        ("Rome", None),
        ("Oslo", None),
    ]


# ---------------------------------------------------------------- the whole answer


def whole(**options):
    """Return an answer with everything in it."""
    drafts = (draft(0, "Paris", citations=(1,)), draft(1, "Rome"))
    failed = FailedDraft(subset=draft(2, "x").subset, reason="down", text="secret reply")
    scores = (score(0, -0.5), score(1, None))
    passages = tuple(one.passages[0] for one in drafts)
    return Answer(
        text="Paris",
        rationale="secret reason",
        passages=drafts[0].passages,
        citations=(1,),
        dissent=dissent_from("Paris", drafts, scores),
        selection=Selection(winner=0, ranking=(0,)),
        tier="reflection",
        trace=Trace(
            passages=passages,
            subsets=tuple(one.subset for one in drafts),
            drafts=(*drafts, failed),
            scores=scores,
            notes=("2 of 5 drafts",),
            stages={"draft": 0.5},
            seconds=1.0,
            first_token=1.0,
        ),
        usage=Usage(steps=(step(prompt=3), step("verifier"))),
        **options,
    )


def test_an_answer_survives_strict_json():
    """Everything is in it, and nothing that JSON does not know."""
    data = json.loads(json.dumps(whole().to_dict(), allow_nan=False))

    assert data["text"] == "Paris"
    assert data["passages"][0]["id"] == "p0"
    assert data["passages"][0]["text"] == "secret text 0"
    assert data["dissent"][0]["answer"] == "Rome"
    assert data["selection"] == {
        "winner": 0,
        "ranking": [0],
        "reason": None,
        "selector": "",
        "shares": {},
    }
    assert data["confidence"] is None
    assert [one["index"] for one in data["trace"]["drafts"]] == [0, 1, 2]
    assert data["trace"]["drafts"][2]["failed"] == "down"
    assert [one["value"] for one in data["trace"]["scores"]] == [-0.5, None]
    assert data["trace"]["subsets"] == [[0], [1]]
    assert data["trace"]["notes"] == ["2 of 5 drafts"]
    assert data["usage"]["drafter"]["prompt_tokens"] == 3
    assert data["usage"]["verifier"]["prompt_tokens"] is None
    assert len(data["usage"]["steps"]) == 2


def test_a_fallback_says_why():
    """As a plain string in JSON."""
    answer = whole(fallback_reason=FallbackReason.NO_USABLE_DRAFT, abstained=True)
    data = json.loads(json.dumps(answer.to_dict()))

    assert (data["fallback_reason"], data["abstained"]) == ("no_usable_draft", True)


def test_reprs_hold_no_passage_and_no_rationale():
    """A log line with an answer in it leaks nothing that was read."""
    answer = whole()

    for value in (answer, answer.trace, answer.dissent, answer.passages, answer.usage):
        assert "secret" not in repr(value)
    assert "Rome" not in repr(answer.dissent)
    assert str(answer) == "Paris"
