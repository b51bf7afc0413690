"""Print the tables of docs/results.md from its files of features, without any model.

    python benchmarks/results.py docs/results/*.features.jsonl.gz [system …]

The files hold outcomes without texts, as `specrag report DIR --features FILE` writes them. Systems
of several files are compared on the questions that all of them were asked. The first file tells the
order in which questions were drawn, and so which of them no choice had seen.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from statistics import fmean, median

from specrag_integrations import display
from specrag_integrations.evaluation.intervals import (
    Difference,
    PoolRights,
    paired_difference,
    ratio_interval,
    selection_efficiency,
)
from specrag_integrations.evaluation.outcomes import Outcome
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.summary import (
    BASELINE,
    MARGIN,
    Compared,
    compared,
    summarised,
)
from specrag_integrations.evaluation.systems import system_named

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)  # of the questions that fall back
WEIGHTS = {
    "reflection": {"reflection": 1.0},
    "draft": {"draft": 1.0},
    "reflection + draft": {"reflection": 1.0, "draft": 1.0},
    "reflection + draft_rationale": {"reflection": 1.0, "draft_rationale": 1.0},
    "reflection + draft + consistency": {
        "reflection": 1.0,
        "draft": 1.0,
        "consistency_rationale": 0.5,
        "consistency_answer": 0.5,
    },
}
HALF = 25  # questions of each set that a choice may have seen


def read(path: str) -> list[Outcome]:
    """Read a file of features."""
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [Outcome.from_dict(json.loads(line)) for line in file]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Compared):
    """Compared outcomes of which one knows the order of the draw."""

    drawn: Sequence[Question]
    """All questions that some system was asked, in the order of the draw."""

    @property
    def halves(self) -> tuple[list[Question], list[Question]]:
        """The first questions of each set, which a choice may have seen, and the others."""
        seen: Counter[str] = Counter()
        late = set()
        for question in self.drawn:
            if seen[question.dataset] >= HALF:
                late.add((question.dataset, question.id))
            seen[question.dataset] += 1
        both: tuple[list[Question], list[Question]] = [], []
        for question in self.questions:
            both[(question.dataset, question.id) in late].append(question)
        return both


def beside(run: Drawn, system: str, other: str) -> None:
    """Print by how much one system, and its mean draft, is right more often than another.

    The second half is what no choice had seen.
    """
    for part, questions in (("all", run.questions), ("second half", run.halves[1])):
        ours, theirs = (
            [run.by_system[name][one.dataset, one.id] for one in questions]
            for name in (system, other)
        )
        values = {
            "right": [(a.right, b.right) for a, b in zip(ours, theirs, strict=True)],
            "the mean draft right": [
                (_mean_draft(a), _mean_draft(b)) for a, b in zip(ours, theirs, strict=True)
            ],
        }
        for what, pairs in values.items():
            found = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
            if found is not None and (what == "right" or found.wins or found.losses):
                print(
                    f"{system} against {other}, {part} ({len(pairs)}), {what}: {_points(found)}, "
                    f"{found.wins} won, {found.losses} lost, p {found.p:.2g}"
                )


def _mean_draft(outcome: Outcome) -> float:
    return fmean([draft.right for draft in outcome.choices] or [False])


def moved(run: Drawn, system: str, other: str) -> None:
    """Print by how much the scores of drafts that both wrote differ, beside what decides."""
    differences, margins = [], []
    for ours, theirs in zip(run.of(system), run.of(other), strict=True):
        if ours.tier != theirs.tier:
            continue
        best: dict[int | None, float] = {}  # by answer
        for one, another in zip(ours.drafts, theirs.drafts, strict=False):
            if one.value is None or another.value is None:
                continue
            best[one.group] = max(one.value, best.get(one.group, -math.inf))
            if (one.ranks, one.words, one.right) == (another.ranks, another.words, another.right):
                differences.append(abs(one.value - another.value))
        if len(best) > 1:
            first, second = nlargest(2, best.values())
            margins.append(first - second)
    if differences and margins:
        print(
            f"{system} and {other}: scores of {len(differences)} drafts alike in both differ by "
            f"{fmean(differences):.3f} nats in the mean, the two best answers of a question by "
            f"{median(margins):.3f} in the median"
        )


def _points(found: Difference) -> str:
    ends = found.interval.value, found.interval.low, found.interval.high
    return "{:+.1f} points ({:+.1f} to {:+.1f})".format(*(100 * end for end in ends))


def reweighted(run: Drawn, system: str) -> None:
    """Print how well other weights would have chosen among a system's drafts."""
    first, second = run.halves
    parts = {"all": run.questions, "first half": first, "second half": second}.items()
    for name, weights in WEIGHTS.items():
        told = []
        for part, questions in parts:
            outcomes = [run.by_system[system][one.dataset, one.id] for one in questions]
            found = selection_efficiency([_pool(one, weights) for one in outcomes])
            if found is not None:
                one = found.interval
                told.append(f"{part} {one.value:.2f} ({one.low:.2f} to {one.high:.2f})")
        if told:  # else its tier has no such terms
            print(f"{system}, chosen by {name}: efficiency {', '.join(told)}")


def together(run: Drawn, systems: Sequence[str]) -> None:
    """Print what other weights would have made of several systems, each question counted once."""

    def right(weights: Mapping[str, float]) -> list[float]:
        pools = zip(
            *([_pool(one, weights) for one in run.of(name)] for name in systems), strict=True
        )
        return [fmean(bool(pool.selected) for pool in of_question) for of_question in pools]

    theirs = right(WEIGHTS["reflection"])
    for name in ("reflection + draft", "reflection + draft_rationale"):
        found = paired_difference(right(WEIGHTS[name]), theirs)
        assert found is not None  # noqa: S101 - there are questions
        print(f"{len(systems)} systems together, chosen by {name} instead: {_points(found)}")


def _pool(outcome: Outcome, weights: Mapping[str, float]) -> PoolRights:
    drafts = [one for one in outcome.choices if weights.keys() <= one.terms.keys()]
    best = max(drafts, key=lambda d: sum(w * d.terms[t] for t, w in weights.items()), default=None)
    return PoolRights(
        rights=tuple(one.right for one in outcome.choices),
        selected=best.right if best else None,
    )


def frontier(run: Drawn, system: str) -> None:
    """Print what falling back below a score would have made of a system, were it the confidence.

    The thresholds are those below which a share of the first half falls back; both are then
    measured on the second half, which did not choose them.
    """
    first, second = (
        [
            (run.by_system[system][place], run.by_system[BASELINE][place])
            for place in ((one.dataset, one.id) for one in half)
        ]
        for half in run.halves
    )
    if not first or not second:
        return
    seen = sorted(_score(ours) for ours, _ in first)
    for share in (0.0, *SHARES):
        least = seen[int(share * len(seen))] if share else -math.inf
        below = f"below {math.exp(least):.2f}" if share else "never"
        print(f"{system}, falling back {below}: {_fallen_back(second, least)}")


def _fallen_back(pairs: Sequence[tuple[Outcome, Outcome]], least: float) -> str:
    """Tell what comes of falling back to standard RAG below a score."""
    scored = [(_score(ours) < least, ours, theirs) for ours, theirs in pairs]
    mixed = [(theirs if falls else ours, theirs) for falls, ours, theirs in scored]
    found = paired_difference([a.right for a, _ in mixed], [b.right for _, b in mixed])
    assert found is not None  # noqa: S101 - there are questions
    read = sum(
        (ours.verifier.prompt or 0) + (theirs.verifier.prompt or 0) * falls
        for falls, ours, theirs in scored
    ) / sum(theirs.verifier.prompt or 0 for _, theirs in pairs)
    timed = [
        (theirs.seconds, ours.seconds + theirs.seconds * falls)
        for falls, ours, theirs in scored
        if ours.seconds and theirs.seconds
    ]
    speed = ratio_interval([standard for standard, _ in timed], [mixed for _, mixed in timed])
    told = (
        f"{fmean(falls for falls, _, _ in scored):.0%} of {len(pairs)} questions, "
        f"{_points(found)} against {BASELINE}, the verifier reads {read:.0%} of its tokens"
    )
    if speed is not None:
        told += f", {speed.value:.2f} times as fast ({speed.low:.2f} to {speed.high:.2f})"
    return f"{told}; {_needed(found)}"


def _needed(found: Difference) -> str:
    verdict, needed = found.verdict(MARGIN), found.questions_needed(MARGIN)
    return (
        f"{verdict}, {needed:,} questions would settle it" if verdict == "inconclusive" else verdict
    )


def _score(outcome: Outcome) -> float:
    values = [draft.value for draft in outcome.drafts if draft.index == outcome.winner]
    return values[0] if values and values[0] is not None else -math.inf


def main(arguments: Sequence[str]) -> None:
    """Print everything."""
    files = [one for one in arguments if Path(one).exists()]
    outcomes = [outcome for file in files for outcome in read(file)]
    names = [one for one in arguments if one not in files]
    systems = [system_named(one) for one in names or dict.fromkeys(o.system for o in outcomes)]
    places = dict.fromkeys((one.dataset, one.id) for one in outcomes)
    # An answer stands for those that the features leave out: every question here has one.
    asked = [Question(dataset=d, id=i, question="?", answers=("?",)) for d, i in places]
    found = compared(asked, systems, outcomes)
    run = Drawn(questions=found.questions, systems=systems, by_system=found.by_system, drawn=asked)
    display.show_evaluation(display.console(), summarised(run))
    parts = {name: [q for q in run.questions if q.dataset == name] for name, _ in places}
    parts |= dict(zip(("first half", "second half"), run.halves, strict=True))
    for system in systems:
        told = []
        for part, questions in parts.items():
            right = sum(run.by_system[system.name][q.dataset, q.id].right for q in questions)
            told.append(f"{part} {right}/{len(questions)}")
        print(f"{system.name}: {', '.join(told)}")
    for system in systems:
        if BASELINE in run.by_system and any(
            one.tier == "reflection" for one in run.of(system.name)
        ):
            frontier(run, system.name)
    drafting = [system.name for system in systems if system.drafts]
    for system in drafting[1:]:
        beside(run, drafting[0], system)
        moved(run, drafting[0], system)
    chosen = [system.name for system in systems if system.num_drafts > 1]
    for name in chosen:
        reweighted(run, name)
    if len(chosen) > 1:
        together(run, chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
