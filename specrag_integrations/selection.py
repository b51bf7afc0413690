"""Selection: which draft is the answer, and why ordinary RAG takes over when none is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from specrag_integrations.drafts import Draft
from specrag_integrations.errors import ConfigurationError
from specrag_integrations.scores import Score


class FallbackReason(StrEnum):
    """Why no draft was selected."""

    NO_USABLE_DRAFT = "no_usable_draft"
    """All drafts failed, abstained or could not be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A draft that may be selected, with its score."""

    draft: Draft
    score: Score
    value: float
    """The score's value: never None, always finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome: a winner, or the reason there is none."""

    winner: int | None
    """The index of the selected draft."""
    ranking: tuple[int, ...]
    """The indices of all candidates, best first."""
    reason: FallbackReason | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"winner": self.winner, "ranking": list(self.ranking), "reason": self.reason}


class Selector(Protocol):
    """A rule that orders candidates."""

    def rank(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates it trusts, best first; the first is the answer."""
        ...


@dataclass(frozen=True, slots=True)
class BestScore:
    """The highest score wins, as in the paper (algorithm 1, line 13).

    A draft that was cut off ranks below all whole ones. Equal scores go to the lower index, so that
    the same replies always give the same answer, in whatever order they arrived.
    """

    def rank(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Order by wholeness, score and index."""
        return sorted(
            candidates,
            key=lambda one: (one.draft.truncated, -one.value, one.draft.index),
        )


def candidates_of(drafts: Sequence[Draft], scores: Sequence[Score]) -> list[Candidate]:
    """Pair the drafts that may be selected with their scores, in index order."""
    by_draft = {score.draft: score for score in scores}
    return [
        Candidate(draft=draft, score=score, value=score.value)
        for draft in sorted(drafts, key=lambda draft: draft.index)
        if not draft.abstained
        and (score := by_draft.get(draft.index)) is not None
        and score.value is not None
        and math.isfinite(score.value)
    ]


def select(candidates: Sequence[Candidate], selector: Selector) -> Selection:
    """Select a winner, or say why there is none."""
    ranked = selector.rank(candidates) if candidates else ()
    ranking = tuple(candidate.draft.index for candidate in ranked)
    known = {candidate.draft.index for candidate in candidates}
    if len(set(ranking)) < len(ranking) or not known.issuperset(ranking):
        raise ConfigurationError(
            f"{type(selector).__name__}.rank must return candidates it was given, each at most "
            f"once; it returned the drafts {list(ranking)} of {sorted(known)}"
        )
    if not ranking:  # there are none, or the selector trusts none
        return Selection(winner=None, ranking=(), reason=FallbackReason.NO_USABLE_DRAFT)
    return Selection(winner=ranking[0], ranking=ranking)
