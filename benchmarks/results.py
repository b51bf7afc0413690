"""Print the tables of docs/results.md from its files of features, without any model.

    python benchmarks/results.py docs/results/*.features.jsonl.gz [system …]

The files hold outcomes without texts, as `specrag report DIR --features FILE` writes them. Systems
of several files are compared on the questions that all of them were asked.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from statistics import fmean, median

from specrag_integrations import display
from specrag_integrations.evaluation.intervals import (
    Difference,
    PoolRights,
    paired_difference,
    selection_efficiency,
)
from specrag_integrations.evaluation.outcomes import Outcome
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.summary import (
    BASELINE,
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


def halves(run: Compared) -> tuple[list[Question], list[Question]]:
    """Return the first questions of each set, and the others; the order is that of the draw."""
    seen: Counter[str] = Counter()
    both: tuple[list[Question], list[Question]] = [], []
    for question in run.questions:
        both[seen[question.dataset] >= HALF].append(question)
        seen[question.dataset] += 1
    return both


def beside(run: Compared, system: str, other: str) -> None:
    """Print by how much one system is right more often than another."""
    pairs = zip(run.of(system), run.of(other), strict=True)
    found = paired_difference(*zip(*((a.right, b.right) for a, b in pairs), strict=True))
    assert found is not None  # noqa: S101 - there are questions
    told = f"{_points(found)}, {found.wins} won, {found.losses} lost"
    print(f"{system} against {other}: {told}")


def moved(run: Compared, system: str, other: str) -> None:
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


def reweighted(run: Compared, system: str) -> None:
    """Print how well other weights would have chosen among a system's drafts."""
    first, second = halves(run)
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


def together(run: Compared, systems: Sequence[str]) -> None:
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


def frontier(run: Compared, system: str) -> None:
    """Print what falling back below a score would have made of a system, were it the confidence."""
    pairs = list(zip(run.of(system), run.of(BASELINE), strict=True))
    scored = [(_score(ours), ours, theirs) for ours, theirs in pairs]
    for share in SHARES:
        least = sorted(score for score, _, _ in scored)[int(share * len(scored))]
        mixed = [(theirs if score < least else ours, theirs) for score, ours, theirs in scored]
        found = paired_difference([a.right for a, _ in mixed], [b.right for _, b in mixed])
        read = sum(
            (ours.verifier.prompt or 0) + (theirs.verifier.prompt or 0) * (score < least)
            for score, ours, theirs in scored
        ) / sum(theirs.verifier.prompt or 0 for _, theirs in pairs)
        fallen = fmean(score < least for score, _, _ in scored)
        assert found is not None  # noqa: S101 - there are questions
        print(
            f"{system}, falling back below {math.exp(least):.2f}: {fallen:.0%} of the questions, "
            f"{_points(found)} against {BASELINE}, the verifier reads {read:.0%} of its tokens"
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
    run = compared(asked, systems, outcomes)
    display.show_evaluation(display.console(), summarised(run))
    parts = {name: [q for q in run.questions if q.dataset == name] for name, _ in places}
    parts |= dict(zip(("first half", "second half"), halves(run), strict=True))
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
