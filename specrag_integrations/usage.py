"""Usage: the seconds and tokens of a question, request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specrag_integrations.models import StepKind, TokenCount

ModelRole = Literal["drafter", "verifier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model's tokens cost, in any currency per million tokens."""

    input: float
    output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """What one request to a model took."""

    kind: StepKind
    index: int
    role: ModelRole
    model: str | None
    seconds: float
    """From sending to the last byte, queueing and retries included."""
    arrived: float = 0.0
    """Seconds from the question to the end of this step."""
    count: TokenCount = field(default_factory=TokenCount)
    attempts: int = 1
    """HTTP requests sent."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "kind": self.kind,
            "index": self.index,
            "role": self.role,
            "model": self.model,
            "seconds": self.seconds,
            "arrived": self.arrived,
            "prompt_tokens": self.count.prompt,
            "completion_tokens": self.count.completion,
            "cached_tokens": self.count.cached,
            "attempts": self.attempts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Seconds and tokens of a question, step by step."""

    steps: tuple[StepUsage, ...] = ()

    @property
    def requests(self) -> int:
        """Generating HTTP requests, retries included; those cut off by a deadline are not known."""
        return sum(step.attempts for step in self.steps)

    def tokens(self, role: ModelRole) -> TokenCount:
        """Add up one role's tokens as the servers counted them; what none counted is None."""
        counts = [step.count for step in self.steps if step.role == role]
        return TokenCount(
            prompt=_total([count.prompt for count in counts]),
            completion=_total([count.completion for count in counts]),
            cached=_total([count.cached for count in counts]),
        )

    def cost(self, prices: Mapping[ModelRole, Price]) -> float | None:
        """Return what the counted tokens cost; None where no server counted any.

        Raises:
            KeyError: a role that was used has no price.
        """
        counted = [s for s in self.steps if s.count.prompt or s.count.completion]
        if self.steps and not counted:
            return None
        return sum(
            (step.count.prompt or 0) * prices[step.role].input / 1e6
            + (step.count.completion or 0) * prices[step.role].output / 1e6
            for step in counted
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form with the totals by role."""
        totals = {}
        for role in ("drafter", "verifier"):
            count = self.tokens(role)
            totals[role] = {
                "prompt_tokens": count.prompt,
                "completion_tokens": count.completion,
                "cached_tokens": count.cached,
            }
        return {
            "requests": self.requests,
            **totals,
            "steps": [step.to_dict() for step in self.steps],
        }


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
