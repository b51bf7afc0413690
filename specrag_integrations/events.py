"""Events: what a streamed question reports while it is worked on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from specrag_integrations.answers import Answer
from specrag_integrations.drafts import Draft, FailedDraft
from specrag_integrations.passages import Passage
from specrag_integrations.scores import Score
from specrag_integrations.selection import FallbackReason, Selection
from specrag_integrations.subsets import Subset


@dataclass(frozen=True, slots=True, kw_only=True)
class PassagesEvent:
    """The usable passages, and the subsets that will be drafted from."""

    passages: tuple[Passage, ...] = field(repr=False)
    subsets: tuple[Subset, ...] = ()
    type: Literal["passages"] = "passages"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "type": self.type,
            "passages": [passage.to_dict() for passage in self.passages],
            "subsets": [list(subset.ranks) for subset in self.subsets],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEvent:
    """A draft arrived, or failed."""

    draft: Draft | FailedDraft
    type: Literal["draft"] = "draft"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"type": self.type, "draft": self.draft.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreEvent:
    """A draft was scored, or could not be."""

    score: Score
    type: Literal["score"] = "score"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"type": self.type, "score": self.score.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedEvent:
    """A draft is the answer; one `delta` with its whole text follows, many if it is refined."""

    selection: Selection
    passages: tuple[Passage, ...] = field(repr=False)
    """What it rests on."""
    type: Literal["selected"] = "selected"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "type": self.type,
            "selection": self.selection.to_dict(),
            "passages": [passage.to_dict() for passage in self.passages],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackEvent:
    """Standard RAG takes over; its text follows as many `delta`."""

    reason: FallbackReason
    passages: tuple[Passage, ...] = field(repr=False)
    """Those that fit into its prompt, in their order there: `[1]` of its text is the first."""
    type: Literal["fallback"] = "fallback"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "type": self.type,
            "reason": self.reason.value,
            "passages": [passage.to_dict() for passage in self.passages],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEvent:
    """A piece of the answer's text."""

    text: str = field(repr=False)
    restart: bool = False
    """The text begins anew: a refinement broke off, and the draft stands after all."""
    type: Literal["delta"] = "delta"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"type": self.type, "text": self.text, "restart": self.restart}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvent:
    """The whole answer; always the last event."""

    answer: Answer
    type: Literal["answer"] = "answer"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"type": self.type, "answer": self.answer.to_dict()}


Event = (
    PassagesEvent
    | DraftEvent
    | ScoreEvent
    | SelectedEvent
    | FallbackEvent
    | DeltaEvent
    | AnswerEvent
)
Emit = Callable[[Event], None]
