"""The summary of a run, its recommendation, and the folder it is kept in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations import ConfigurationError, InputError, Passage, Price
from specrag_integrations.errors import EvaluationError
from specrag_integrations.evaluation.folder import Manifest, RunFolder, held
from specrag_integrations.evaluation.outcomes import (
    DraftOutcome,
    Grades,
    Outcome,
    Tokens,
    read_outcomes,
    write_outcomes,
)
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.sittings import Sitting, shared_prompts
from specrag_integrations.evaluation.summary import HourPrice, compared, summarised
from specrag_integrations.evaluation.systems import parse_systems

Json = dict[str, Any]
MODELS = {
    role: {"name": f"{role}-model", "identity": role, "server": "llama.cpp b1", "where": "here"}
    for role in ("drafter", "verifier")
}


def question(number: int, **fields: Any) -> Question:
    return Question(
        **{
            "id": f"q{number}",
            "dataset": "rivers",
            "question": f"Which river is number {number}?",
            "answers": ("river 0",),
            "passages": (Passage(text="A fact.", id="p0"), Passage(text="Another.", id="p1")),
            **fields,
        }
    )


def grades(right: bool | None) -> Grades:
    return Grades(right=right, contained=bool(right), exact=False, f1=float(bool(right)), words=2)


def drafts(rights: Sequence[bool]) -> tuple[DraftOutcome, ...]:
    return tuple(
        DraftOutcome(index=index, ranks=(index,), answer=f"answer {index}", right=right)
        for index, right in enumerate(rights)
    )


def outcome(system: str, number: int, right: bool | None, **fields: Any) -> Outcome:
    return Outcome(
        **{
            "dataset": "rivers",
            "id": f"q{number}",
            "system": system,
            "grades": grades(right),
            "seconds": 2.0,
            "first_token": 1.0,
            **fields,
        }
    )


def trusting(one: Outcome, confidence: float) -> Outcome:
    """Return an outcome whose first draft is that likely to be right."""
    (draft,) = one.drafts
    return replace(one, confidence=confidence, drafts=(replace(draft, confidence=confidence),))


def summary_of(outcomes: Sequence[Outcome], names: str, count: int, **options: Any) -> Json:
    fields = options.pop("fields", {})
    questions = [question(number, **fields) for number in range(count)]
    run = compared(questions, parse_systems(names), outcomes)
    return summarised(run, **options)


def side_by_side(
    ours: Sequence[bool], theirs: Sequence[bool], *, seconds: float | None = 1.0, **fields: Any
) -> Json:
    """Return the summary of two systems, of which standard RAG takes two seconds."""
    outcomes = [
        outcome("speculative", number, right, seconds=seconds, drafts=drafts([right]), winner=0)
        for number, right in enumerate(ours)
    ]
    outcomes += [
        outcome("standard", number, right, **fields) for number, right in enumerate(theirs)
    ]
    return summary_of(outcomes, "speculative,standard", len(ours))


def row(summary: Json, system: str) -> Json:
    (found,) = [one for one in summary["systems"] if one["name"] == system]
    return found


# -------------------------------------------------------------------- figures


def test_only_questions_that_all_systems_answered_are_compared() -> None:
    """A run that was stopped compares like with like."""
    outcomes = [outcome("standard", n, True) for n in range(4)]
    outcomes += [outcome("drafter_only", n, False) for n in range(2)]
    summary = summary_of(outcomes, "standard,drafter_only", 4)
    assert [one["questions"] for one in summary["systems"]] == [2, 2]
    assert summary["datasets"][0]["questions"] == 2


def test_the_difference_is_paired_by_question() -> None:
    """Wins, losses and ties are counted against standard RAG, and tested."""
    against = row(
        side_by_side([True, True, True, False, False], [True, False, False, True, False]),
        "speculative",
    )["against_standard"]
    assert (against["wins"], against["losses"], against["ties"]) == (2, 1, 2)
    assert against["difference"]["value"] == pytest.approx(0.2)
    assert against["p"] == pytest.approx(1.0)


def test_times_come_from_the_questions_that_were_timed() -> None:
    """Replayed outcomes count for accuracy, and for nothing else."""
    outcomes = [outcome("standard", 0, True, seconds=4.0, stages={"answer": 4.0})]
    outcomes += [outcome("standard", 1, True, seconds=None, first_token=None, replayed=True)]
    (found,) = summary_of(outcomes, "standard", 2)["systems"]
    assert found["total"] == {"p50": 4.0, "p95": 4.0, "n": 1}
    assert found["stages"] == {"answer": 4.0}
    assert found["accuracy"]["n"] == 2


def test_the_verifiers_work_and_the_speed_are_told_against_standard_rag() -> None:
    """Below 1 is less work than standard RAG's, above 1 is faster."""
    outcomes = [outcome("standard", 0, True, verifier=Tokens(prompt=90, completion=10))]
    outcomes += [
        outcome("drafter_only", 0, True, seconds=0.5, verifier=Tokens(prompt=20, completion=5))
    ]
    against = row(summary_of(outcomes, "standard,drafter_only", 1), "drafter_only")[
        "against_standard"
    ]
    assert against["verifier_tokens"] == pytest.approx(0.25)
    assert against["speedup"]["value"] == pytest.approx(4.0)


def test_data_sets_are_told_apart() -> None:
    """Each has its own accuracy, and its own difference to standard RAG."""
    questions = [question(0), question(0, dataset="lakes"), question(1, dataset="lakes")]
    rights = {"standard": (True, False, False), "drafter_only": (False, False, True)}
    outcomes = [
        outcome(name, int(one.id[1:]), right, dataset=one.dataset)
        for name, found in rights.items()
        for one, right in zip(questions, found, strict=True)
    ]
    systems = parse_systems("standard,drafter_only")
    found = row(summarised(compared(questions, systems, outcomes)), "drafter_only")["by_dataset"]
    assert [(one["dataset"], one["accuracy"]["value"], one["accuracy"]["n"]) for one in found] == [
        ("rivers", 0.0, 1),
        ("lakes", 0.5, 2),
    ]
    assert [one["difference"]["value"] for one in found] == [-1.0, 0.5]


def test_selection_is_measured_over_contested_questions_only() -> None:
    """One question where the choice mattered and was right, one where it was wrong."""
    pools = {0: ([True, True], 0), 1: ([False, True], 1), 2: ([False, True], 0), 3: ([False], 0)}
    outcomes = [
        outcome("speculative", n, rights[winner], drafts=drafts(rights), winner=winner)
        for n, (rights, winner) in pools.items()
    ]
    (found,) = summary_of(outcomes, "speculative", 4)["selection"]
    assert (found["contested"], found["questions"]) == (2, 4)
    assert found["mean"] == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)
    assert found["selected"] == pytest.approx(2 / 4)
    assert found["oracle"] == pytest.approx(3 / 4)
    assert found["efficiency"]["value"] == pytest.approx(0.0)


def test_drafts_that_failed_are_no_choice() -> None:
    """A failed or abstaining draft could not have been selected."""
    some = (*drafts([True]), replace(drafts([False, False])[1], usable=False))
    (found,) = summary_of(
        [outcome("speculative", 0, True, drafts=some, winner=0)], "speculative", 1
    )["selection"]
    assert (found["contested"], found["mean"]) == (0, 1.0)


def test_questions_without_an_answer_are_no_matter_of_selection() -> None:
    """All drafts abstain rightly there, and none is the one to find."""
    outcomes = [
        outcome("speculative", 0, True, drafts=drafts([True]), winner=0),
        outcome("speculative", 1, True, drafts=(replace(drafts([True])[0], usable=False),)),
    ]
    questions = [question(0), question(1, answers=())]
    run = compared(questions, parse_systems("speculative"), outcomes)
    (found,) = summarised(run)["selection"]
    assert (found["questions"], found["oracle"]) == (1, 1.0)


def test_the_bounds_of_selection_are_systems_of_their_own() -> None:
    """The oracle is right where any draft is, a random draft by chance; neither has a time."""
    outcomes = [
        outcome("speculative", n, False, drafts=drafts([False, True, False]), winner=0)
        for n in range(30)
    ]
    outcomes += [outcome("standard", n, n % 2 == 0) for n in range(30)]
    summary = summary_of(outcomes, "standard,speculative", 30)
    oracle, chance = row(summary, "oracle"), row(summary, "random_draft")
    assert oracle["accuracy"]["value"] == 1.0
    assert oracle["against_standard"]["wins"] == 15
    assert 0 < chance["accuracy"]["value"] < 1
    assert (oracle["total"], oracle["cost"], oracle["tokens"]["drafter"]["prompt"]) == (None,) * 3
    assert "oracle" not in summary["recommendation"]
    assert [one["name"] for one in summary_of(outcomes, "standard", 30)["systems"]] == ["standard"]


@pytest.mark.parametrize(
    ("rights", "oracle", "chance"),
    [
        pytest.param([False, False], 0.0, 0.0, id="all invent an answer"),
        pytest.param([True, True], 1.0, 1.0, id="all abstain"),
        pytest.param([True, False], 1.0, None, id="one abstains"),
    ],
)
def test_where_nothing_answers_the_right_draft_is_one_that_abstains(
    rights: list[bool], oracle: float, chance: float | None
) -> None:
    """The bounds count an abstention as what it is there: right."""
    some = tuple(replace(draft, usable=not draft.right) for draft in drafts(rights))
    outcomes = [outcome("speculative", n, False, drafts=some) for n in range(20)]
    found = summary_of(outcomes, "speculative", 20, fields={"answers": ()})
    assert row(found, "oracle")["accuracy"]["value"] == oracle
    drawn = row(found, "random_draft")["accuracy"]["value"]
    assert drawn == chance if chance is not None else 0 < drawn < 1


def test_half_a_character_in_an_id_is_no_obstacle() -> None:
    """A file name that is not UTF-8 is read as such, and what was answered is told."""
    one = outcome("speculative", 0, True, id="q\ud800", drafts=drafts([True]), winner=0)
    run = compared([question(0, id="q\ud800")], parse_systems("speculative"), [one])
    assert row(summarised(run), "random_draft")["accuracy"]["value"] == 1.0


def test_every_grade_has_its_difference_and_its_test() -> None:
    """Containment is not all: where longer answers hold the reference, F1 and exact match tell."""
    brief, long = (
        Grades(right=True, contained=True, exact=exact, f1=f1, words=words)
        for exact, f1, words in ((True, 1.0, 1), (False, 0.4, 4))
    )
    outcomes = [outcome("speculative", n, True, grades=long) for n in range(30)]
    outcomes += [outcome("standard", n, True, grades=brief) for n in range(30)]
    found = summary_of(outcomes, "speculative,standard", 30)
    against = row(found, "speculative")["against_standard"]
    assert (against["wins"], against["losses"]) == (0, 0)
    assert against["f1"]["value"] == pytest.approx(-0.6)
    assert against["f1"]["high"] < 0
    assert (against["f1"]["losses"], against["exact"]["losses"]) == (30, 30)
    assert against["f1"]["p"] < 0.001
    assert against["words"]["value"] == 3
    assert against["citation_precision"] is None
    assert "In F1 it is worse: -60.0 points (95 %: " in found["recommendation"]

    swapped = [
        replace(one, system={"speculative": "standard", "standard": "speculative"}[one.system])
        for one in outcomes
    ]
    told = summary_of(swapped, "speculative,standard", 30)["recommendation"]
    assert "In F1 it is better: +60.0 points (95 %: " in told


def test_abstentions_are_told_by_whether_they_are_right() -> None:
    """Silence is right where nothing answers, and a loss elsewhere."""
    outcomes = [outcome("standard", n, n < 6, abstained=n in {0, 1, 2, 9}) for n in range(10)]
    questions = [question(n, **({"answers": ()} if n < 4 else {})) for n in range(10)]
    run = compared(questions, parse_systems("standard"), outcomes)
    (found,) = summarised(run)["systems"]
    assert found["abstained"] == pytest.approx(0.4)
    assert (found["abstained_rightly"]["value"], found["abstained_rightly"]["n"]) == (0.75, 4)
    assert found["abstained_wrongly"]["value"] == pytest.approx(1 / 6)

    (found,) = summary_of(outcomes, "standard", 10)["systems"]
    assert found["abstained_rightly"] is found["abstained_wrongly"] is None


def test_sets_of_labels_are_kept_apart() -> None:
    """With two labels, a random draft is right half of the time."""
    claims = {"kind": "label", "labels": ("yes", "no"), "answers": ("yes",)}
    one = outcome("speculative", 0, True, drafts=drafts([True, False]), winner=0)
    (found,) = summary_of([one], "speculative", 1, fields=claims)["selection"]
    assert found["labels"]


def test_long_answers_are_judged_by_no_rule() -> None:
    """No accuracy is made up; F1 remains."""
    (found,) = summary_of([outcome("standard", 0, None)], "standard", 1, fields={"kind": "long"})[
        "systems"
    ]
    assert found["accuracy"] is None
    assert found["f1"]["n"] == 1


def test_cost_by_tokens_and_by_the_hour() -> None:
    """Tokens cost what the table says; hardware costs the time it was busy."""
    one = outcome(
        "speculative",
        0,
        True,
        drafter=Tokens(prompt=1000, completion=100, busy=3.6),
        verifier=Tokens(prompt=500, completion=10, busy=1.0),
    )
    prices = {"verifier": Price(input=2.0, output=4.0), "drafter": HourPrice(hour=1.0)}
    found = row(summary_of([one], "speculative", 1, prices=prices), "speculative")
    assert found["cost"]["value"] == pytest.approx(1000 * (0.001 + 0.00104))
    free = row(summary_of([one], "speculative", 1), "speculative")
    assert free["cost"] is None
    assert found["decoded_by_drafter"] == pytest.approx(100 / 110)


def test_a_price_that_lacks_is_no_cost_of_zero() -> None:
    """Without the drafter's price there is no sum, and none by the hour without a time."""
    one = outcome("speculative", 0, True, drafter=Tokens(prompt=9), verifier=Tokens(prompt=9))
    only = {"verifier": Price(input=1.0, output=1.0)}
    assert summary_of([one], "speculative", 1, prices=only)["systems"][0]["cost"] is None
    hourly = {"verifier": HourPrice(hour=1.0), "drafter": HourPrice(hour=1.0)}
    assert summary_of([one], "speculative", 1, prices=hourly)["systems"][0]["cost"] is None


@pytest.mark.parametrize("unknown", [None, 0])  # folders of older releases hold zeros
def test_a_system_that_fails_looks_no_cheaper(unknown: int | None) -> None:
    """Tokens and costs are those of its answers, and compared with standard RAG's on the same."""
    asked, easy = Tokens(prompt=9000, completion=90), Tokens(prompt=1000, completion=10)
    nothing = Tokens(prompt=unknown, completion=unknown)
    outcomes = [outcome("standard", n, True, verifier=one) for n, one in enumerate((easy, asked))]
    outcomes += [
        outcome("speculative", 0, True, drafter=easy, verifier=easy),
        outcome("speculative", 1, False, drafter=nothing, verifier=nothing, error="400"),
        *(outcome("drafter_only", n, False, drafter=nothing, error="400") for n in range(2)),
    ]
    prices = {"drafter": Price(input=1.0, output=0.0), "verifier": Price(input=1.0, output=0.0)}
    summary = summary_of(outcomes, "standard,speculative,drafter_only", 2, prices=prices)
    found, failed = row(summary, "speculative"), row(summary, "drafter_only")

    assert found["tokens"]["verifier"] == {"prompt": 1000.0, "completion": 10.0}
    assert (found["cost"]["value"], found["cost"]["n"]) == (pytest.approx(2.0), 1)
    assert found["decoded_by_drafter"] == 0.5
    assert found["against_standard"]["verifier_tokens"] == 1.0
    assert failed["tokens"]["drafter"] == {"prompt": None, "completion": None}
    assert (failed["cost"], failed["against_standard"]["verifier_tokens"]) == (None, None)


def test_sweeps_hold_systems_that_differ_in_one_number() -> None:
    """The number of drafts is swept by +m1, +m2; nothing else may differ."""
    names = "speculative+m2,speculative+m1,speculative+m1+k4,speculative+k3"
    outcomes = [outcome(name, 0, True) for name in names.split(",")]
    sweeps = summary_of(outcomes, names, 1)["sweeps"]
    assert [point["value"] for point in sweeps["m"]] == [1, 2]
    assert [point["value"] for point in sweeps["k"]] == [3]


def test_the_failures_say_what_went_wrong() -> None:
    """A right draft that lost comes before drafts that were all wrong; successes are left out."""
    outcomes = [outcome("standard", n, True) for n in range(3)]
    outcomes += [
        outcome("speculative", 0, False, drafts=drafts([False, False]), winner=0),
        outcome("speculative", 1, False, drafts=drafts([False, True]), winner=0),
        outcome("speculative", 2, True, drafts=drafts([True]), winner=0),
        outcome("speculative", 3, True, drafts=drafts([False]), fallback="no_usable_draft"),
    ]
    outcomes += [outcome("standard", 3, True)]
    failures = summary_of(outcomes, "standard,speculative", 4)["failures"]
    assert [(one["id"], one["why"]) for one in failures] == [
        ("q1", "a right draft was there, and another was selected"),
        ("q0", "no draft was right, and standard RAG was"),
    ]
    assert [draft["selected"] for draft in failures[0]["drafts"]] == [True, False]


def test_a_confident_mistake_is_the_first_to_read() -> None:
    """From 0.8 on an answer counts as sure."""
    outcomes = [
        outcome("speculative", n, False, drafts=drafts([True]), winner=0, confidence=confidence)
        for n, confidence in enumerate((0.79, 0.8))
    ]
    failures = summary_of(outcomes, "speculative", 2)["failures"]
    assert [(one["id"], one["why"]) for one in failures] == [
        ("q1", "sure, and wrong"),
        ("q0", "a right draft was there, and another was selected"),
    ]


def test_curves_need_a_confidence() -> None:
    """Without a calibration there is no risk-coverage curve; with one there is."""
    plain = [
        outcome("speculative", n, n % 2 == 0, drafts=drafts([n % 2 == 0]), winner=0)
        for n in range(12)
    ]
    assert not summary_of(plain, "speculative", 12)["risk_coverage"]
    sure = [trusting(one, 0.9 if one.right else 0.2) for one in plain]
    (curve,) = summary_of(sure, "speculative", 12)["risk_coverage"]
    assert curve["points"][-1] == {"coverage": 1.0, "risk": 0.5}
    assert summary_of(sure, "speculative", 12)["reliability"][0]["bins"]
    assert summary_of(sure[:10], "speculative", 10)["risk_coverage"]
    assert not summary_of(sure[:9], "speculative", 9)["risk_coverage"]  # too few to say anything


def test_curves_cover_the_questions_that_fell_back() -> None:
    """What was not trusted is what the curve is about: the draft counts, not who answered."""
    right, wrong = (
        outcome("speculative", 0, True, drafts=drafts([right]), winner=0) for right in (True, False)
    )
    kept = [replace(trusting(right, 0.9), id=f"q{n}") for n in range(6)]
    fallen = [
        replace(trusting(wrong, 0.2), id=f"q{n}", fallback="low_confidence", confidence=None)
        for n in range(6, 12)
    ]
    (curve,) = summary_of([*kept, *fallen], "speculative", 12)["risk_coverage"]
    assert (curve["n"], curve["questions"]) == (12, 12)
    assert curve["points"] == [{"coverage": 0.5, "risk": 0.0}, {"coverage": 1.0, "risk": 0.5}]

    silent = [outcome("speculative", n, False) for n in range(12, 24)]
    (curve,) = summary_of([*kept, *fallen, *silent], "speculative", 24)["risk_coverage"]
    assert (curve["n"], curve["questions"]) == (12, 24)
    assert [point["coverage"] for point in curve["points"]] == [0.25, 0.5]


# -------------------------------------------------------------------- recommendation


def test_better_is_recommended_with_its_interval() -> None:
    """A clear win names the system, the points, the interval and the speed."""
    told = side_by_side([True] * 40, [True] * 20 + [False] * 20)["recommendation"]
    assert told.startswith("Use speculative: speculative +50.0 points (95 %: ")
    assert "on 40 questions, 2.00 times" in told


def test_as_good_and_slower_means_standard_rag() -> None:
    """Nobody should pay for what changes nothing."""
    many = [True] * 300
    told = side_by_side(many, many, seconds=3.0)["recommendation"]
    assert told.startswith("Standard RAG is as good here; use it")


def test_as_good_and_faster_is_recommended() -> None:
    """The whole point."""
    many = [True] * 300
    assert side_by_side(many, many)["recommendation"].startswith("Use speculative: as good")


def test_worse_means_standard_rag() -> None:
    """However fast it is."""
    told = side_by_side([False] * 30, [True] * 30, seconds=0.1)["recommendation"]
    assert told.startswith("Standard RAG is better here; use it")


def test_as_good_without_a_time_is_no_reason_to_change() -> None:
    """Replayed outcomes say nothing of speed, and the advice says how to find out."""
    many = [True] * 300
    told = side_by_side(many, many, seconds=None)["recommendation"]
    assert told.startswith("As good, and nobody knows how fast")
    assert "--fresh" in told


def test_the_best_of_several_is_to_be_confirmed() -> None:
    """Whoever tries many will find one that looks good."""
    names = "standard,speculative,speculative+vote"
    outcomes = [outcome(name, n, True) for name in names.split(",") for n in range(3)]
    assert summary_of(outcomes, names, 3)["recommendation"].endswith(
        "It is the best of 2: confirm it on others."
    )


def test_the_best_is_as_good_as_standard_rag_and_faster() -> None:
    """A gain that may be chance does not outweigh a system that is as good and surely faster."""
    seconds = {"standard": 2.0, "speculative": 1.0, "speculative+vote": 3.0}
    outcomes = [
        outcome(name, n, n > 0 or name == "speculative+vote", seconds=time)
        for name, time in seconds.items()
        for n in range(300)
    ]
    told = summary_of(outcomes, ",".join(seconds), 300)["recommendation"]
    assert told.startswith("Use speculative: as good and faster")


def test_a_speed_up_that_may_be_chance_is_none() -> None:
    """Faster on most questions and slower on nearly as many: the interval decides."""
    names = ("standard", "speculative")
    outcomes = [
        outcome(name, n, True, seconds=2.0 if name == "standard" else 1.0 + 2.0 * (n % 20 < 9))
        for name in names
        for n in range(300)
    ]
    summary = summary_of(outcomes, ",".join(names), 300)
    speed = row(summary, "speculative")["against_standard"]["speedup"]
    assert speed["low"] < 1 < speed["value"]
    assert summary["recommendation"].startswith("Standard RAG is as good here")


def test_too_few_questions_are_inconclusive_and_say_how_many_would_do() -> None:
    """A small sample proves nothing, and the tool says so."""
    told = side_by_side([True, False, True], [True, True, False], seconds=4.0)["recommendation"]
    assert told.startswith("Inconclusive: ")
    assert told.endswith(
        "; too few questions to say how many would settle it: ask at least 20. "
        "Meanwhile use standard RAG."
    )
    few = row(side_by_side([True, False, True], [True, True, False]), "speculative")
    assert few["against_standard"]["questions_needed"] is None  # for the report
    half = [True, False] * 15
    found = side_by_side(half, half[1:] + half[:1], seconds=4.0)
    assert row(found, "speculative")["against_standard"]["questions_needed"] > 30
    told = found["recommendation"]
    assert "questions would settle whether it is as good within 3 points. Until then" in told


def test_more_questions_than_a_trial_takes_may_settle_nothing() -> None:
    """Then no number is named, and the advice does not refer to one."""
    won, lost, tied = 30, 41, 729
    ours = [True] * won + [False] * lost + [True] * tied
    theirs = [False] * won + [True] * lost + [True] * tied
    found = side_by_side(ours, theirs, seconds=4.0)
    assert row(found, "speculative")["against_standard"]["questions_needed"] is None
    told = found["recommendation"]
    assert told.startswith("Inconclusive: ")
    assert told.endswith(
        "; nobody can say how many more questions would settle it. Meanwhile use standard RAG."
    )


def test_standard_rag_alone_is_compared_with_nothing() -> None:
    """Which rule judges answers is not what lacks."""
    outcomes = [outcome("standard", n, True) for n in range(30)]
    told = summary_of(outcomes, "standard", 30)["recommendation"]
    assert (
        told == "No recommendation: no form of Speculative RAG is among the systems asked so far."
    )


def test_a_system_that_always_fell_back_is_not_recommended() -> None:
    """It is standard RAG by another name."""
    outcomes = [outcome("standard", n, True) for n in range(30)]
    outcomes += [outcome("speculative", n, True, fallback="no_usable_draft") for n in range(30)]
    told = summary_of(outcomes, "standard,speculative", 30)["recommendation"]
    assert told == (
        "No recommendation: Speculative RAG fell back to standard RAG on every question."
    )


def test_without_a_baseline_nothing_is_recommended() -> None:
    """A system alone is no comparison."""
    told = summary_of([outcome("speculative", 0, True)], "speculative", 1)["recommendation"]
    assert "standard is not among the systems" in told


# -------------------------------------------------------------------- the folder


def sitting(**fields: Any) -> Sitting:
    servers = {role: model["server"] for role, model in MODELS.items()}
    return Sitting(**{"seed": 0, "servers": servers, **fields})


def manifest(**fields: Any) -> Manifest:
    return Manifest(**{"models": MODELS, "prompts": "abc", "sittings": [sitting()], **fields})


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Outcomes of an earlier run are there, and new ones are added to them."""
    for number in range(2):
        with RunFolder(tmp_path / "run", manifest()) as folder:
            assert len(folder.outcomes) == number
            folder.add_questions([question(n) for n in range(number + 1)])
            folder.keep(outcome("standard", number, True))
    with RunFolder(tmp_path / "run") as folder:
        assert [one.id for one in folder.outcomes] == ["q0", "q1"]
        assert folder.questions == [question(0), question(1)]


def test_an_outcome_is_on_the_disk_when_it_is_kept(tmp_path: Path) -> None:
    """Whatever ends the process next, it is not lost."""
    with RunFolder(tmp_path, manifest()) as folder:
        for number in range(2):
            folder.keep(outcome("standard", number, True))
            assert len(read_outcomes(tmp_path / "outcomes.jsonl")) == number + 1


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x0bd", "half a character: \ud83d"])
def test_any_text_can_be_kept(tmp_path: Path, text: str) -> None:
    """Data may hold other ends of lines, and JSON half a character."""
    asked = question(0, question=text, passages=(Passage(text=text, id=text),))
    answer = outcome("standard", 0, False, text=text)
    for _ in range(2):
        with RunFolder(tmp_path, manifest()) as folder:
            folder.add_questions([asked])
            if not folder.outcomes:
                folder.keep(answer)
            folder.summarise(folder.questions, parse_systems("standard"))
    with RunFolder(tmp_path) as folder:
        assert (folder.questions, folder.outcomes) == ([asked], [answer])
    write_outcomes(tmp_path / "features.jsonl", [answer])
    assert read_outcomes(tmp_path / "features.jsonl") == [answer]


def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    """A stopped run leaves half a line at most, which spoils nothing that comes after it."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.keep(outcome("standard", 0, True))
    path = tmp_path / "outcomes.jsonl"
    path.write_text(path.read_text() + '{"dataset": "riv')
    with RunFolder(tmp_path, manifest()) as folder:
        assert len(folder.outcomes) == 1
        folder.keep(outcome("standard", 1, True))
    assert [one.id for one in read_outcomes(path)] == ["q0", "q1"]


def test_badly_cut_text_is_kept_as_it_is(tmp_path: Path) -> None:
    """Half a surrogate pair neither ends a run nor makes its file unreadable."""
    cut = outcome("standard", 0, True, text="half \ud83d")
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0, question="What is \ud83d?")])
        folder.keep(cut)
        folder.summarise(folder.questions, parse_systems("standard"))
    with RunFolder(tmp_path) as folder:
        assert folder.outcomes == [cut]
        assert folder.questions == [question(0, question="What is \ud83d?")]


def test_a_line_that_is_no_outcome_is_named(tmp_path: Path) -> None:
    """Anything else in the file is an error with its place."""
    path = tmp_path / "outcomes.jsonl"
    path.write_text('{"dataset": "rivers"}\n{}\n')
    told = r"outcomes\.jsonl:1: not an outcome.*; delete that line, and run the same specrag eval"
    with pytest.raises(InputError, match=told):
        read_outcomes(path)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"models": {**MODELS, "drafter": {"name": "new", "identity": "new"}}}, "drafter-model"),
        ({"prompts": "xyz"}, "prompts have changed"),
    ],
)
def test_runs_of_something_else_are_not_mixed(tmp_path: Path, other: Json, told: str) -> None:
    """Other models or prompts need another folder."""
    with RunFolder(tmp_path, manifest()):
        pass
    with pytest.raises(ConfigurationError, match=f"{told}.*name another --out"):
        RunFolder(tmp_path, manifest(**other))


def test_a_question_that_has_changed_is_not_mixed_in(tmp_path: Path) -> None:
    """The same id with another text is another question."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        with pytest.raises(ConfigurationError, match="'q0' of rivers is another one now"):
            folder.add_questions([question(0, answers=("river 1",))])


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    """Nothing to report about."""
    with pytest.raises(InputError, match="holds no run of specrag eval"):
        RunFolder(tmp_path)
    (tmp_path / "outcomes.jsonl").write_text("")
    told = r"without run\.json; restore that file from a copy, or run specrag eval with another"
    with pytest.raises(InputError, match=told):
        RunFolder(tmp_path, manifest())


def test_the_report_is_remade_from_the_folder_alone(tmp_path: Path) -> None:
    """Summary and report are the same again, without data and without models."""
    systems = parse_systems("standard,speculative")
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        folder.keep(outcome("standard", 0, True))
        folder.keep(outcome("speculative", 0, False, drafts=drafts([False]), winner=0))
        first = folder.summarise([question(0)], systems)
    page = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    with RunFolder(tmp_path) as folder:
        assert folder.summarise(folder.questions, systems) == first
    assert (tmp_path / "report.html").read_text() == page
    assert json.loads((tmp_path / "summary.json").read_text()) == first
    assert first["recommendation"] in page


@pytest.mark.parametrize("name", ["questions.jsonl", "outcomes.jsonl"])
def test_a_folder_that_lost_a_file_is_not_reported_on(tmp_path: Path, name: str) -> None:
    """The error names what is missing and how it comes back; running again brings it back."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        folder.keep(outcome("standard", 0, True))
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing; restore it, or run .* --out"):
        RunFolder(tmp_path)
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        if not folder.outcomes:
            folder.keep(outcome("standard", 0, True))
    assert RunFolder(tmp_path).questions == [question(0)]


def test_outcomes_without_their_questions_are_not_reported_on(tmp_path: Path) -> None:
    """A report that silently left them out would be one of other questions."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        for number in range(3):
            folder.keep(outcome("standard", number, True))
    with pytest.raises(InputError, match=r"questions\.jsonl: lacks 2 of 3 questions that"):
        RunFolder(tmp_path)


def test_a_run_in_memory_writes_nothing() -> None:
    """Without a folder, everything but the files is the same."""
    with RunFolder(None, manifest()) as folder:
        folder.add_questions([question(0)])
        folder.keep(outcome("standard", 0, True))
        summary = folder.summarise([question(0)], parse_systems("standard"))
    assert folder.report is None
    assert summary["systems"][0]["accuracy"]["value"] == 1.0


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    """A run stopped just before the line break has its outcome, and the next one its own line."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.keep(outcome("standard", 0, True))
    path = tmp_path / "outcomes.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    with RunFolder(tmp_path, manifest()) as folder:
        assert [one.id for one in folder.outcomes] == ["q0"]
        folder.keep(outcome("standard", 1, True))
    assert [one.id for one in read_outcomes(path)] == ["q0", "q1"]


def test_a_line_may_be_cut_within_a_character(tmp_path: Path) -> None:
    """A run stopped there loses this line alone, and goes on."""
    with RunFolder(tmp_path, manifest()) as folder:
        for number in range(2):
            folder.keep(outcome("standard", number, True, text="Fluß"))
    path = tmp_path / "outcomes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex("ß".encode()) + 1])
    with RunFolder(tmp_path, manifest()) as folder:
        assert [one.id for one in folder.outcomes] == ["q0"]
        folder.keep(outcome("standard", 1, True, text="Fluß"))
    assert path.read_bytes().replace(b'"sitting": 1', b'"sitting": 0') == whole


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"models": 1, "prompts": "", "seed": 0}',
        '{"models": {"drafter": {}}, "prompts": "", "seed": 0}',
        '{"models": {"drafter": {"name": 1, "identity": 2}}, "prompts": "", "seed": 0}',
        '{"models": {}, "prompts": "", "seed": 0, "judge": 5}',
        '{"models": {}, "prompts": "", "seed": 0, "setups": 5}',
        '{"models": {}, "prompts": "", "sittings": []}',
        '{"models": {}, "prompts": "", "sittings": 5}',
        '{"models": {}, "prompts": "", "sittings": [{"seed": 0, "machine": 5}]}',
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    """A damaged run.json is an error with its path, for a run and for a report."""
    (tmp_path / "run.json").write_text(text)
    for given in (None, manifest()):
        told = r"run\.json: not the manifest of a run.*; restore that file .* with another --out"
        with pytest.raises(InputError, match=told):
            RunFolder(tmp_path, given)


def test_names_of_another_set_up_are_not_mixed(tmp_path: Path) -> None:
    """What a name stood for is kept; more names may come, and none may change."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_setups({"standard on rivers": "a"})
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_setups({"speculative on rivers": "b"})
        with pytest.raises(ConfigurationError, match="speculative on rivers is set up otherwise"):
            folder.add_setups({"speculative on rivers": "c", "standard on rivers": "a"})
    with RunFolder(tmp_path, manifest()) as folder:
        assert folder.manifest.setups == {"standard on rivers": "a", "speculative on rivers": "b"}


FAST = {"cpu": "Fast", "cores": 64}
SLOW = {"cpu": "Slow", "cores": 2}


def answered_in(path: Path, *sittings: Sitting, **fields: Any) -> Json:
    """Have each sitting answer a question; return the summary."""
    for number, one in enumerate(sittings):
        with RunFolder(path, manifest(sittings=[one])) as folder:
            folder.add_questions([question(number)])
            folder.keep(outcome("standard", number, True, **fields))
    with RunFolder(path) as folder:
        return folder.summarise(folder.questions, parse_systems("standard"))


def test_every_sitting_of_a_run_is_told(tmp_path: Path) -> None:
    """Another seed, machine, server or commit is in the summary, which is of all of them."""
    first = sitting(commit="aaa", machine=FAST)
    later = sitting(seed=7, commit="bbb", machine=SLOW, servers={"drafter": "llama.cpp b2"})
    summary = answered_in(tmp_path, first, later)

    assert summary["sittings"] == [asdict(first), asdict(later)]
    assert (summary["seed"], summary["commit"], summary["machine"]) == (0, "aaa", FAST)
    assert [one.sitting for one in read_outcomes(tmp_path / "outcomes.jsonl")] == [0, 1]
    page = (tmp_path / "report.html").read_text()
    assert "Slow, 2 cores; drafter llama.cpp b2" in page
    assert f"seed 7; specrag-integrations {later.version}, commit bbb" in page


@pytest.mark.parametrize(
    ("later", "told"),
    [
        ({"machine": SLOW}, "2 machines (Fast, 64 cores; Slow, 2 cores)"),
        (
            {"servers": {"drafter": "llama.cpp b1", "verifier": "llama.cpp b2"}},
            "2 servers of the verifier (llama.cpp b1; llama.cpp b2)",
        ),
        ({"seed": 7, "commit": "bbb"}, None),
    ],
)
def test_times_of_unlike_sittings_are_not_put_together_in_silence(
    tmp_path: Path, later: Json, told: str | None
) -> None:
    """The summary and the report say which machines and servers the times come from."""
    both = sitting(machine=FAST), sitting(**{"machine": FAST, **later})
    mixed = answered_in(tmp_path, *both)["mixed_times"]

    assert (mixed is None) if told is None else (f"The times come from {told}: measure" in mixed)
    assert ("The times come from" in (tmp_path / "report.html").read_text()) is bool(told)


def test_replayed_answers_have_no_times_to_mix(tmp_path: Path) -> None:
    """Rightness is the same on any machine."""
    both = sitting(machine=FAST), sitting(machine=SLOW)
    assert answered_in(tmp_path, *both, seconds=None)["mixed_times"] is None


@pytest.mark.parametrize(
    ("identities", "timed", "told"),
    [
        (("a", "a"), ("standard", "drafter_only"), True),
        (("a", "a"), ("standard", "speculative"), False),
        (("a", "b"), ("standard", "drafter_only"), False),
    ],
)
def test_one_model_in_both_roles_meets_its_own_prompts(
    identities: tuple[str, str], timed: tuple[str, ...], *, told: bool
) -> None:
    """The drafter alone is then standard RAG, and the second of them is served from the cache."""
    roles = zip(("drafter", "verifier"), identities, strict=True)
    models = {role: {"identity": identity} for role, identity in roles}
    assert bool(shared_prompts(models, timed)) is told


def test_a_sitting_that_answered_nothing_leaves_nothing(tmp_path: Path) -> None:
    """Neither one that was stopped before the first answer nor one that had nothing to ask."""
    for one in (sitting(machine=SLOW), sitting(machine=FAST)):
        with RunFolder(tmp_path, manifest(sittings=[one])) as folder:
            pass
    with RunFolder(tmp_path, manifest(sittings=[sitting(machine=FAST)])) as folder:
        folder.keep(outcome("standard", 0, True))
    with RunFolder(tmp_path, manifest(sittings=[sitting(machine=SLOW)])):
        pass
    with RunFolder(tmp_path, manifest()) as folder:
        assert [one.machine for one in folder.manifest.sittings] == [FAST]


def test_a_folder_of_an_older_release_goes_on(tmp_path: Path) -> None:
    """Its manifest tells of one sitting, beside the rest; its outcomes are of that one."""
    with RunFolder(tmp_path, manifest(sittings=[sitting(machine=FAST)])) as folder:
        folder.add_setups({"standard on rivers": "a"})
        folder.add_questions([question(0)])
        folder.keep(outcome("standard", 0, True))
    new = json.loads((tmp_path / "run.json").read_text())
    (one,) = new.pop("sittings")
    servers = one.pop("servers")
    (tmp_path / "run.json").write_text(json.dumps({**new, **one}))
    lines = json.loads((tmp_path / "outcomes.jsonl").read_text())
    del lines["sitting"]
    (tmp_path / "outcomes.jsonl").write_text(json.dumps(lines) + "\n")

    summary = RunFolder(tmp_path).summarise([question(0)], parse_systems("standard"))
    assert summary["sittings"] == [{**one, "servers": servers}]
    assert summary["setups"] == {"standard on rivers": "a"}
    with RunFolder(tmp_path, manifest(sittings=[sitting(machine=SLOW)])) as folder:
        folder.add_questions([question(1)])
        folder.keep(outcome("standard", 1, True))
    assert [one.machine for one in RunFolder(tmp_path).manifest.sittings] == [FAST, SLOW]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error is one of ours with the file's path; what was kept is still there."""
    (tmp_path / "summary.json").mkdir()
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        folder.keep(outcome("standard", 0, True))
        with pytest.raises(EvaluationError, match=r"summary\.json cannot be used"):
            folder.summarise(folder.questions, parse_systems("standard"))
    with RunFolder(tmp_path) as folder:
        assert len(folder.outcomes) == 1


def test_a_folder_is_held_by_one_run(tmp_path: Path) -> None:
    """While one holds it no other does; after it another may."""
    path = tmp_path / "deep" / "run"
    for _ in range(2):
        with held(path):
            other = held(path)
            with pytest.raises(EvaluationError, match=f"another run of .* writing into {path}"):
                other.__enter__()


def test_without_texts_no_label_is_left() -> None:
    """The label an answer gives is a word of the data, as the answer is; the repr has neither."""
    grades = Grades(right=True, contained=True, exact=True, f1=1.0, words=1, label="refuted")
    one = outcome("standard", 0, True, grades=grades, text="refuted", error="refuted by the server")
    assert "refuted" in str(one.to_dict())
    assert "refuted" not in str(one.to_dict(texts=False))
    assert "refuted" not in repr(one)
    assert Outcome.from_dict(one.to_dict(texts=False)).right


@pytest.mark.parametrize("error", [None, "400 from the server"])
def test_without_texts_a_failure_is_still_one(error: str | None) -> None:
    """Else it would count as an answer that took nothing."""
    bare = outcome("standard", 0, False, error=error).to_dict(texts=False)
    assert Outcome.from_dict(bare).failed is bool(error)
