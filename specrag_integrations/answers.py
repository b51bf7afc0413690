"""Answers: the answer with the passages it rests on, every draft, every score, and the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrag_integrations.citations import normal_answer
from specrag_integrations.drafts import Draft, FailedDraft
from specrag_integrations.passages import Passage
from specrag_integrations.scores import Score, TierName
from specrag_integrations.selection import FallbackReason, Selection
from specrag_integrations.subsets import Subset
from specrag_integrations.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """What the verifier made of the winning draft's answer."""

    before: str = field(repr=False)
    after: str = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """How an answer came about; the repr holds no text."""

    passages: tuple[Passage, ...] = field(repr=False)
    """The usable passages in rank order; `ranks` elsewhere are places in this list."""
    subsets: tuple[Subset, ...] = field(default=(), repr=False)
    drafts: tuple[Draft | FailedDraft, ...] = field(default=(), repr=False)
    scores: tuple[Score, ...] = field(default=(), repr=False)
    """In order of arrival; a question that descended a tier has scores of both."""
    refinement: Refinement | None = None
    """Both texts, the same or not, where the answer was written anew from the draft's."""
    notes: tuple[str, ...] = ()
    """What was dropped, degraded, cut or late."""
    deadline_hit: bool = False
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds each stage ended after the question: partition, draft, verify, select, refine,
    fallback."""
    seconds: float = 0.0
    """The whole question."""
    first_token: float | None = None
    """Seconds to the first piece of the answer; the whole time where a draft was accepted."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "passages": [passage.to_dict() for passage in self.passages],
            "subsets": [list(subset.ranks) for subset in self.subsets],
            "drafts": [draft.to_dict() for draft in self.drafts],
            "scores": [score.to_dict() for score in self.scores],
            "refinement": self.refinement.to_dict() if self.refinement else None,
            "notes": list(self.notes),
            "deadline_hit": self.deadline_hit,
            "stages": dict(self.stages),
            "seconds": self.seconds,
            "first_token": self.first_token,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Dissent:
    """A rival answer that other passages led to: already paid for."""

    answer: str = field(repr=False)
    rationale: str = field(repr=False)
    passages: tuple[Passage, ...] = field(repr=False)
    value: float | None
    """Its best score, in nats."""
    drafts: tuple[int, ...]
    """The indices of the drafts that gave it."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form; passages by id."""
        return {
            "answer": self.answer,
            "rationale": self.rationale,
            "passages": [passage.id for passage in self.passages],
            "value": self.value,
            "drafts": list(self.drafts),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a question."""

    text: str
    rationale: str = field(default="", repr=False)
    passages: tuple[Passage, ...] = field(default=(), repr=False)
    """The passages the answer was written from: `[1]` in its text is the first of them."""
    citations: tuple[int, ...] = ()
    """The numbers cited in rationale and text, in order of appearance."""
    dissent: tuple[Dissent, ...] = ()
    confidence: float | None = None
    """P(correct) of the draft that is the answer. None without a calibration, since a raw score is
    not a probability, and where the verifier wrote the answer: to fall back or to refine."""
    confidence_kind: str | None = None
    """`calibrated` where there is a confidence."""
    abstained: bool = False
    """The passages do not tell."""
    selection: Selection | None = None
    """None where standard RAG was asked directly."""
    fallback_reason: FallbackReason | None = None
    tier: TierName | None = None
    """The tier the drafts were compared at; None where no draft was scored."""
    trace: Trace = field(repr=False)
    usage: Usage = field(default_factory=Usage, repr=False)

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form with everything in it."""
        return {
            "text": self.text,
            "rationale": self.rationale,
            "passages": [passage.to_dict() for passage in self.passages],
            "citations": list(self.citations),
            "dissent": [rival.to_dict() for rival in self.dissent],
            "confidence": self.confidence,
            "confidence_kind": self.confidence_kind,
            "abstained": self.abstained,
            "selection": self.selection.to_dict() if self.selection else None,
            "fallback_reason": self.fallback_reason.value if self.fallback_reason else None,
            "tier": self.tier,
            "trace": self.trace.to_dict(),
            "usage": self.usage.to_dict(),
        }


def dissent_from(
    text: str, drafts: Sequence[Draft | FailedDraft], scores: Sequence[Score]
) -> tuple[Dissent, ...]:
    """Group the drafts that answer otherwise, the best-scored answer first."""
    values = {score.draft: score.value for score in scores}
    groups: dict[str, list[Draft]] = {}
    for draft in drafts:
        if isinstance(draft, Draft) and not draft.abstained:
            groups.setdefault(normal_answer(draft.answer), []).append(draft)
    groups.pop(normal_answer(text), None)
    rivals = [_dissent(group, values) for group in groups.values()]
    return tuple(sorted(rivals, key=lambda rival: (-_or_lowest(rival.value), rival.drafts)))


def _dissent(group: Sequence[Draft], values: Mapping[int, float | None]) -> Dissent:
    best = max(group, key=lambda draft: (_or_lowest(values.get(draft.index)), -draft.index))
    return Dissent(
        answer=best.answer,
        rationale=best.rationale,
        passages=best.passages,
        value=values.get(best.index),
        drafts=tuple(sorted(draft.index for draft in group)),
    )


def _or_lowest(value: float | None) -> float:
    return float("-inf") if value is None else value
