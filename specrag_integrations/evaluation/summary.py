"""The summary of a run: every figure of the report, each with its interval and its count."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from specrag_integrations.evaluation.intervals import (
    Difference,
    Interval,
    PoolRights,
    calibration_measures,
    mean_interval,
    paired_difference,
    percentile,
    ratio_interval,
    reliability,
    risk_coverage,
    selection_efficiency,
    share_interval,
)
from specrag_integrations.evaluation.metrics import majority
from specrag_integrations.evaluation.outcomes import (
    DraftOutcome,
    Grades,
    Outcome,
    Tokens,
    summed,
)
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.ragas import Judgement
from specrag_integrations.evaluation.runs import Key
from specrag_integrations.evaluation.systems import System
from specrag_integrations.usage import ModelRole, Price

Json = dict[str, Any]
BASELINE = "standard"
MARGIN = 0.03
"""As good as standard RAG: no more than 3 points below it, as far as the interval tells."""
_ENOUGH = 20
"""Questions below which the spread that a sample size is figured from is a guess."""
_SHOWN_FAILURES = 30
_JUDGED = ("faithfulness", "factual_correctness")
_GRADED = ("exact", "f1", "citation_precision", "words")
"""What each answer has a number for, besides being right or wrong."""
_UNKNOWN_OF_BOUNDS = (
    *("exact", "words", "abstained", "abstained_rightly", "abstained_wrongly"),
    *("fallback", "decoded_by_drafter"),
)
"""What nobody knows of a draft that was not the answer."""
_CURVE_QUESTIONS = 10
"""Fewer questions with a confidence draw no curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HourPrice:
    """What an hour of the hardware costs that a model runs on."""

    hour: float


Prices = Mapping[ModelRole, Price | HourPrice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The outcomes of a run by system, over the questions that all systems have answered."""

    questions: Sequence[Question]
    systems: Sequence[System]
    by_system: Mapping[str, Mapping[tuple[str, str], Outcome]]
    judgements: Mapping[Key, Judgement] = field(default_factory=dict)

    def of(self, system: str) -> list[Outcome]:
        """Return a system's outcomes in the order of the questions."""
        found = self.by_system[system]
        return [found[one.dataset, one.id] for one in self.questions]


def compared(
    questions: Sequence[Question],
    systems: Sequence[System],
    outcomes: Iterable[Outcome],
    judgements: Mapping[Key, Judgement] | None = None,
) -> Compared:
    """Keep the questions that every system has answered: only those can be compared."""
    by_system: dict[str, dict[tuple[str, str], Outcome]] = {one.name: {} for one in systems}
    for outcome in outcomes:
        if outcome.system in by_system:
            by_system[outcome.system][outcome.dataset, outcome.id] = outcome
    answered = [
        one
        for one in questions
        if all((one.dataset, one.id) in found for found in by_system.values())
    ]
    return Compared(
        questions=answered, systems=systems, by_system=by_system, judgements=judgements or {}
    )


def summarised(run: Compared, *, prices: Prices | None = None) -> Json:
    """Return the figures of a run as JSON-able values; see docs/evaluation.md for each."""
    rows = [_system(run, system, prices) for system in run.systems]
    rows += _bounds(run)
    found = {
        "datasets": _datasets(run.questions),
        "systems": rows,
        "selection": [
            line for system in run.systems if system.drafts for line in _selections(run, system)
        ],
        "risk_coverage": _curves(run, _risk_curve),
        "reliability": _curves(run, _reliability),
        "sweeps": {name: _sweep(name, rows) for name in ("m", "k")},
        "failures": _failures(run),
    }
    found["recommendation"] = recommendation(found)
    return found


# -------------------------------------------------------------------- systems


def _system(run: Compared, system: System, prices: Prices | None) -> Json:
    outcomes = run.of(system.name)
    judged = [one for one in outcomes if _is_judged(one)]
    timed = [one for one in outcomes if one.seconds is not None]
    graded = [one.grades for one in outcomes if one.grades]
    cited = [g.citation_precision for g in graded if g.citation_precision is not None]
    return {
        "name": system.name,
        "description": system.description,
        "bound": False,
        "questions": len(outcomes),
        "errors": sum(one.error is not None for one in outcomes),
        "first_error": next((one.error for one in outcomes if one.error is not None), None),
        "accuracy": _dict(_share(one.right for one in judged)),
        "exact": _dict(_share(grades.exact for grades in graded)),
        "f1": _dict(mean_interval([grades.f1 for grades in graded])),
        "words": fmean([grades.words for grades in graded]) if graded else None,
        "abstained": fmean([one.abstained for one in outcomes]) if outcomes else None,
        "abstained_rightly": _dict(_abstained(run, outcomes, answerable=False)),
        "abstained_wrongly": _dict(_abstained(run, outcomes, answerable=True)),
        "fallback": fmean([one.fallback is not None for one in outcomes])
        if outcomes and system.drafts
        else None,
        "citation_precision": _dict(mean_interval(cited)),
        **{
            name: _dict(mean_interval(list(_judged(run, system.name, name).values())))
            for name in _JUDGED
        },
        "first_token": _percentiles([one.first_token for one in timed]),
        "total": _percentiles([one.seconds for one in timed]),
        "stages": _stages(timed),
        "tokens": {
            "drafter": _tokens([one.drafter for one in outcomes if not one.failed]),
            "verifier": _tokens([one.verifier for one in outcomes if not one.failed]),
        },
        "decoded_by_drafter": _decoded_by_drafter(outcomes) if system.drafts else None,
        "cost": _cost(outcomes, prices),
        "against_standard": _against_standard(run, system),
        "by_dataset": [
            _on(run, system, name) for name in dict.fromkeys(one.dataset for one in run.questions)
        ],
    }


def _against_standard(run: Compared, system: System) -> Json | None:
    if system.name == BASELINE or BASELINE not in run.by_system:
        return None
    pairs = list(zip(run.of(system.name), run.of(BASELINE), strict=True))
    difference = _difference(pairs)
    needed = difference.questions_needed(MARGIN) if difference else 0
    timed = [(ours.seconds, theirs.seconds) for ours, theirs in pairs]
    both = [(a, b) for a, b in timed if a and b]
    return {
        "difference": _dict(difference.interval) if difference else None,
        "wins": difference.wins if difference else 0,
        "losses": difference.losses if difference else 0,
        "ties": difference.ties if difference else 0,
        "p": difference.p if difference else None,
        "verdict": difference.verdict(MARGIN) if difference else None,
        "questions_needed": needed if difference and _can_be_named(needed, difference) else None,
        "speedup": _dict(ratio_interval([b for _, b in both], [a for a, _ in both])),
        "verifier_tokens": _verifier_tokens(pairs),
        **{name: _graded_difference(pairs, name) for name in _GRADED},
        **{name: _judged_difference(run, system, name) for name in _JUDGED},
    }


def _can_be_named(needed: int, difference: Difference) -> bool:
    """Whether a number of questions says something: not from a guess, nor if it was reached."""
    return _ENOUGH <= difference.interval.n < needed


def _abstained(run: Compared, outcomes: Sequence[Outcome], *, answerable: bool) -> Interval | None:
    """Return how often a system said that the passages do not tell, where that is right or wrong.

    None where no question has no answer: then nothing shows whether it knows the difference.
    """
    kinds = {one.answerable for one in run.questions}
    asked = zip(run.questions, outcomes, strict=True)
    said = [outcome.abstained for one, outcome in asked if one.answerable == answerable]
    return _share(said) if False in kinds else None


def _is_judged(outcome: Outcome) -> bool:
    return outcome.grades is not None and outcome.grades.right is not None


def _difference(pairs: Sequence[tuple[Outcome, Outcome]]) -> Difference | None:
    judged = [(a, b) for a, b in pairs if _is_judged(b)]
    if not judged:
        return None
    return paired_difference([a.right for a, _ in judged], [b.right for _, b in judged])


def _graded_difference(pairs: Sequence[tuple[Outcome, Outcome]], name: str) -> Json | None:
    graded = [(a.grades, b.grades) for a, b in pairs if a.grades and b.grades]
    values = [(getattr(a, name), getattr(b, name)) for a, b in graded]
    return _known_difference(values, bound=None if name == "words" else 1.0)


def _known_difference(
    values: Iterable[tuple[float | None, float | None]], *, bound: float | None = 1.0
) -> Json | None:
    """Return the difference to standard RAG over the questions where both answers have a number."""
    both = [(ours, theirs) for ours, theirs in values if ours is not None and theirs is not None]
    ours, theirs = [one for one, _ in both], [other for _, other in both]
    return _tested(paired_difference(ours, theirs, bound=bound))


def _judged(run: Compared, system: str, name: str) -> dict[tuple[str, str], float]:
    """Return what the judge gave each of a system's answers, where it gave a number."""
    found = {}
    for outcome in run.of(system):
        judgement = run.judgements.get(outcome.key)
        value: float | None = getattr(judgement, name) if judgement else None
        if value is not None:
            found[outcome.dataset, outcome.id] = value
    return found


def _judged_difference(run: Compared, system: System, name: str) -> Json | None:
    ours, theirs = _judged(run, system.name, name), _judged(run, BASELINE, name)
    return _known_difference((value, theirs.get(question)) for question, value in ours.items())


def _on(run: Compared, system: System, dataset: str) -> Json:
    outcomes = [one for one in run.of(system.name) if one.dataset == dataset]
    judged = [one for one in outcomes if _is_judged(one)]
    difference = None
    if system.name != BASELINE and BASELINE in run.by_system:
        theirs = [one for one in run.of(BASELINE) if one.dataset == dataset]
        difference = _difference(list(zip(outcomes, theirs, strict=True)))
    return {
        "dataset": dataset,
        "accuracy": _dict(_share(one.right for one in judged)),
        "difference": _tested(difference),
    }


def _stages(timed: Sequence[Outcome]) -> dict[str, float]:
    names = dict.fromkeys(stage for one in timed for stage in one.stages)
    return {name: sum(one.stages.get(name, 0.0) for one in timed) / len(timed) for name in names}


def _tokens(found: Sequence[Tokens]) -> dict[str, float | None]:
    """Return a role's tokens for an answer, on average; None where a server did not count."""
    totals = {
        "prompt": summed([one.prompt for one in found]),
        "completion": summed([one.completion for one in found]),
    }
    return {
        name: None if total is None or not found else total / len(found)
        for name, total in totals.items()
    }


def _verifier_tokens(pairs: Sequence[tuple[Outcome, Outcome]]) -> float | None:
    """Return the verifier's tokens by those of standard RAG, where both have an answer."""
    both = [(a.verifier, b.verifier) for a, b in pairs if not a.failed and not b.failed]
    ours = summed([_read_and_written(one) for one, _ in both])
    theirs = summed([_read_and_written(one) for _, one in both])
    return ours / theirs if theirs and ours is not None else None


def _read_and_written(tokens: Tokens) -> int | None:
    return summed([tokens.prompt, tokens.completion])


def _decoded_by_drafter(outcomes: Sequence[Outcome]) -> float | None:
    answered = [one for one in outcomes if not one.failed]
    ours = summed([one.drafter.completion for one in answered])
    theirs = summed([one.verifier.completion for one in answered])
    if ours is None or theirs is None or not ours + theirs:
        return None
    return ours / (ours + theirs)


def _cost(outcomes: Sequence[Outcome], prices: Prices | None) -> Json | None:
    """Return what a thousand answers cost; None where a price or a time is lacking."""
    if not prices:
        return None
    costs = [
        _priced(one.drafter, prices.get("drafter")) + _priced(one.verifier, prices.get("verifier"))
        for one in outcomes
        if not one.failed
    ]
    known = [cost for cost in costs if not math.isnan(cost)]
    if not known:
        return None
    return {"value": 1000 * fmean(known), "per": 1000, "n": len(known)}


def _priced(tokens: Tokens, price: Price | HourPrice | None) -> float:
    """Return what a role cost; NaN where that is not known."""
    if not tokens.busy and _read_and_written(tokens) == 0:
        return 0.0  # the role took no part
    if isinstance(price, HourPrice):
        return math.nan if tokens.busy is None else tokens.busy * price.hour / 3600
    if price is None or tokens.prompt is None or tokens.completion is None:
        return math.nan
    return (tokens.prompt * price.input + tokens.completion * price.output) / 1e6


# -------------------------------------------------------------------- drafts


def _bounds(run: Compared) -> list[Json]:
    """Return what selecting among the drafts could reach, and what it must beat, as two systems.

    `oracle` takes a right draft wherever the first drafting system has one; `random_draft` takes
    any, the same one each time.
    """
    ours = next((one for one in run.systems if one.drafts), None)
    if ours is None:
        return []
    picked: dict[str, list[Outcome]] = {"oracle": [], "random_draft": []}
    for question, outcome in zip(run.questions, run.of(ours.name), strict=True):
        # Where nothing can be answered, the right draft is one that abstains.
        drafts = outcome.choices if question.answerable else outcome.drafts
        best = max(drafts, key=lambda draft: (draft.right, draft.f1), default=None)
        seed = f"{question.dataset} {question.id}".encode(errors="surrogatepass")
        lot = random.Random(seed)  # noqa: S311 - no secret
        picked["oracle"].append(_as_outcome("oracle", question, best))
        picked["random_draft"].append(
            _as_outcome("random_draft", question, lot.choice(drafts or [None]))
        )
    told = {
        "oracle": f"the best draft of {ours.name}, if one knew",
        "random_draft": f"any draft of {ours.name}",
    }
    added = {name: {one.key[:2]: one for one in found} for name, found in picked.items()}
    bounds = replace(run, by_system={**run.by_system, **added})
    return [_bound(bounds, name, told[name]) for name in picked]


def _bound(run: Compared, name: str, told: str) -> Json:
    row = _system(run, System(name=name, base="speculative"), None)
    for unknown in _UNKNOWN_OF_BOUNDS:
        for part in (row, row["against_standard"] or {}):
            if unknown in part:
                part[unknown] = None
    return {**row, "bound": True, "description": told}


def _as_outcome(system: str, question: Question, draft: DraftOutcome | None) -> Outcome:
    """Return a draft as if it had been the answer; without one, an unanswered question."""
    right = draft is not None and draft.right
    grades = Grades(
        right=right if question.is_judged else None,
        contained=right,
        exact=False,
        f1=draft.f1 if draft else 0.0,
        words=0,
    )
    unknown = Tokens(prompt=None, completion=None)
    return Outcome(
        dataset=question.dataset,
        id=question.id,
        system=system,
        grades=grades,
        drafter=unknown,
        verifier=unknown,
    )


def _selections(run: Compared, system: System) -> list[Json]:
    """Return how well the right draft was found, in sets of labels and in the others.

    Where nothing can be answered there is no right draft to find, but an abstention of all.
    """
    kinds = {(one.dataset, one.id): one.kind for one in run.questions if one.answerable}
    lines = []
    for labels in (False, True):
        outcomes = [
            one
            for one in run.of(system.name)
            if kinds.get((one.dataset, one.id)) in (("label",) if labels else ("short",))
            and one.grades
        ]
        pools = [pool_of(one) for one in outcomes if one.drafts]
        if not pools:
            continue
        found = selection_efficiency(pools)
        usable = [pool for pool in pools if pool.rights]
        lines.append(
            {
                "system": system.name,
                "labels": labels,
                "questions": len(pools),
                "contested": sum(0 < sum(pool.rights) < len(pool.rights) for pool in pools),
                "mean": sum(fmean(pool.rights) for pool in usable) / len(pools),
                "selected": sum(bool(pool.selected) for pool in pools) / len(pools),
                "oracle": sum(any(pool.rights) for pool in pools) / len(pools),
                "efficiency": _dict(found.interval) if found else None,
            }
        )
    return lines


def pool_of(outcome: Outcome) -> PoolRights:
    """Return which of a question's usable drafts are right, and whether the selected one is."""
    chosen = [draft.right for draft in outcome.choices if draft.index == outcome.winner]
    return PoolRights(
        rights=tuple(draft.right for draft in outcome.choices),
        selected=chosen[0] if chosen else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trusted:
    """The draft that was selected, or would have been: how sure it was, and whether it is right."""

    confidence: float
    right: bool


Curve = Callable[[Sequence[_Trusted], int], Json | None]
"""(those with a confidence, the number of all questions) -> a curve."""


def _curves(run: Compared, curve: Curve) -> list[Json]:
    """Draw a curve over all questions, those that fell back included: it is to show what to trust.

    Only systems with a confidence have one.
    """
    curves = []
    for system in run.systems:
        outcomes = [one for one in run.of(system.name) if _is_judged(one)]
        known = [trusted for one in outcomes if (trusted := _trusted(one)) is not None]
        if len(known) >= _CURVE_QUESTIONS and (found := curve(known, len(outcomes))) is not None:
            curves.append(
                {"system": system.name, "n": len(known), "questions": len(outcomes), **found}
            )
    return curves


def _trusted(outcome: Outcome) -> _Trusted | None:
    for draft in outcome.drafts:
        if draft.index == outcome.winner and draft.confidence is not None:
            return _Trusted(confidence=draft.confidence, right=draft.right)
    return None


def _risk_curve(known: Sequence[_Trusted], questions: int) -> Json:
    """Return the curve over all questions: those without a confidence are never covered."""
    points = risk_coverage([one.confidence for one in known], [one.right for one in known])
    share = len(known) / questions
    return {
        "points": [{"coverage": point.coverage * share, "risk": point.risk} for point in points]
    }


def _reliability(known: Sequence[_Trusted], _: int) -> Json | None:
    confidences, rights = [one.confidence for one in known], [one.right for one in known]
    measures = calibration_measures(confidences, rights)
    if measures is None:
        return None
    return {
        "bins": [
            {
                "confidence": one.confidence,
                "right": one.right.value,
                "low": one.right.low,
                "high": one.right.high,
                "n": one.right.n,
            }
            for one in reliability(confidences, rights)
        ],
        "brier": measures.brier,
        "ece": measures.ece,
    }


_SWEPT = re.compile(r"speculative(?:\+[mk]\d+)*\Z")


def _sweep(parameter: str, rows: Sequence[Json]) -> list[Json]:
    """Return the systems that differ in one number only."""
    points = []
    for row in rows:
        numbers = dict(re.findall(r"\+([mk])(\d+)", row["name"]))
        if _SWEPT.match(row["name"]) and set(numbers) == {parameter}:
            seconds = row["total"]["p50"] if row["total"] else None
            points.append(
                {
                    "value": int(numbers[parameter]),
                    "system": row["name"],
                    "accuracy": row["accuracy"],
                    "seconds": seconds,
                }
            )
    return sorted(points, key=lambda point: point["value"])


# -------------------------------------------------------------------- failures


def _failures(run: Compared) -> list[Json]:
    """Return the questions worth reading, those first of which most can be learnt."""
    ours = next((one.name for one in run.systems if one.drafts), None)
    if ours is None:
        return []
    baseline = run.by_system.get(BASELINE, {})
    found = []
    for question in run.questions:
        key = question.dataset, question.id
        outcome = run.by_system[ours][key]
        why = _why(outcome, baseline.get(key))
        if why is not None:
            found.append((why, question, outcome))
    found.sort(key=lambda item: _WHYS.index(item[0]))
    return [
        {
            "dataset": question.dataset,
            "id": question.id,
            "question": question.question,
            "answers": list(question.answers),
            "why": why,
            "answered": [
                {
                    "system": system.name,
                    "text": (one := run.by_system[system.name][question.dataset, question.id]).text,
                    "right": one.right,
                }
                for system in run.systems
            ],
            "drafts": [_shown(draft, outcome) for draft in outcome.drafts],
        }
        for why, question, outcome in found[:_SHOWN_FAILURES]
    ]


_SURE = 0.8
_WHYS = (
    "sure, and wrong",
    "a right draft was there, and another was selected",
    "no draft was right, and standard RAG was",
    "the drafts were right, and were not trusted",
)


def _why(outcome: Outcome, standard: Outcome | None) -> str | None:
    if not _is_judged(outcome):
        return None
    some_right = any(draft.right for draft in outcome.drafts)
    if not outcome.right and (outcome.confidence or 0.0) >= _SURE:
        return _WHYS[0]
    if not outcome.right and some_right:
        return _WHYS[3] if outcome.fallback else _WHYS[1]
    if not outcome.right and standard is not None and standard.right:
        return _WHYS[2]
    return None


def _shown(draft: DraftOutcome, outcome: Outcome) -> Json:
    return {
        "index": draft.index,
        "answer": draft.answer if draft.usable else draft.answer or "(failed)",
        "ranks": list(draft.ranks),
        "value": draft.value,
        "right": draft.right,
        "selected": draft.index == outcome.winner,
    }


# -------------------------------------------------------------------- recommendation


def recommendation(summary: Json) -> str:
    """Return what to do, in a sentence with its interval; or that standard RAG does it as well."""
    rows = {row["name"]: row for row in summary["systems"]}
    if BASELINE not in rows:
        return f"No recommendation: {BASELINE} is not among the systems, so nothing is compared."
    ours = [row for row in summary["systems"] if row["name"].startswith("speculative")]
    if not ours:
        return "No recommendation: no form of Speculative RAG is among the systems asked so far."
    if all(row["fallback"] == 1 for row in ours):
        return "No recommendation: Speculative RAG fell back to standard RAG on every question."
    ours = [r for r in ours if r["against_standard"]["difference"] and r["fallback"] != 1]
    if not ours:
        return (
            "No recommendation: no form of Speculative RAG has been judged beside standard RAG. "
            "Answers of many words are judged by no rule, only by --judge."
        )
    best = max(ours, key=_merit)
    among = "" if len(ours) == 1 else f" It is the best of {len(ours)}: confirm it on others."
    return f"{_advice(best)}{_otherwise_in_f1(best['against_standard'])}{among}"


def _otherwise_in_f1(against: Json) -> str:
    """Say so where F1, which does not reward length, tells what the share of right ones does not.

    Where what is right holds the reference somewhere, a longer answer may be right and worse.
    """
    f1 = against["f1"]
    if f1 is None:
        return ""
    if f1["high"] < 0 and against["verdict"] != "worse":
        return f" In F1 it is worse: {_points(f1)}."
    if f1["low"] > 0 and against["verdict"] != "better":
        return f" In F1 it is better: {_points(f1)}."
    return ""


def _advice(row: Json) -> str:
    name, against = row["name"], row["against_standard"]
    number, speed = against["difference"]["n"], against["speedup"]
    told = f"{name} {_points(against['difference'])} against standard RAG on {number} questions"
    told += f", {_times(speed, number)} as fast" if speed else ", from kept replies, so untimed"
    faster = speed is not None and speed["low"] > 1
    if against["verdict"] == "better":
        return f"Use {name}: {told}."
    if against["verdict"] == "worse":
        return f"Standard RAG is better here; use it: {told}."
    if against["verdict"] == "inconclusive":
        return f"Inconclusive: {told}; {_open(against, faster=faster)}"
    if faster:
        return f"Use {name}: as good and faster: {told}."
    if speed is None:
        return f"As good, and nobody knows how fast: {told}; time it with --fresh."
    return f"Standard RAG is as good here; use it: {told}."


def _open(against: Json, *, faster: bool) -> str:
    """Return what would settle an open comparison, and what to do before that."""
    wanted, number = against["questions_needed"], against["difference"]["n"]
    meanwhile = "Meanwhile"
    if number < _ENOUGH:
        more = f"too few questions to say how many would settle it: ask at least {_ENOUGH}"
    elif wanted is None:
        more = "nobody can say how many more questions would settle it"
    else:
        more = f"about {wanted:,} questions would settle whether it is as good within 3 points"
        meanwhile = "Until then"
    return f"{more}." if faster else f"{more}. {meanwhile} use standard RAG."


def _merit(row: Json) -> tuple[bool, bool, float]:
    """Order systems: as good as standard RAG first, of these the faster ones, then the best."""
    against = row["against_standard"]
    faster = against["speedup"] is not None and against["speedup"]["low"] > 1
    good = against["verdict"] in {"better", "as_good"}
    return good, good and faster, against["difference"]["value"]


def _points(interval: Json) -> str:
    low, high = 100 * interval["low"], 100 * interval["high"]
    return f"{100 * interval['value']:+.1f} points (95 %: {low:+.1f} to {high:+.1f})"


def _times(interval: Json, number: int) -> str:
    ends = "too few questions for an interval"
    if interval["high"] is not None:
        ends = f"{interval['low']:.2f} to {interval['high']:.2f}"
    timed = "" if interval["n"] == number else f", {interval['n']} of them timed"
    return f"{interval['value']:.2f} times ({ends}{timed})"


# -------------------------------------------------------------------- small things


def _datasets(questions: Sequence[Question]) -> list[Json]:
    found = []
    for name in dict.fromkeys(one.dataset for one in questions):
        own = [one for one in questions if one.dataset == name]
        label = majority(own) if own[0].kind == "label" else None
        found.append(
            {
                "name": name,
                "kind": own[0].kind,
                "questions": len(own),
                "passages": fmean([len(one.passages) for one in own]),
                "unanswerable": sum(not one.answerable for one in own),
                "majority": {"label": label[0], "share": label[1]} if label else None,
            }
        )
    return found


def _share(found: Iterable[bool]) -> Interval | None:
    values = list(found)
    return share_interval(sum(values), len(values)) if values else None


def _percentiles(values: Sequence[float | None]) -> Json | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"p50": percentile(known, 50), "p95": percentile(known, 95), "n": len(known)}


def _dict(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else interval.to_dict()


def _tested(difference: Difference | None) -> dict[str, float] | None:
    """Return a difference with its interval and its sign test."""
    if difference is None:
        return None
    return {
        **difference.interval.to_dict(),
        "wins": difference.wins,
        "losses": difference.losses,
        "ties": difference.ties,
        "p": difference.p,
    }
