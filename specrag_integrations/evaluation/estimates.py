"""Estimates: measured numbers with their intervals, and how a report writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

NO_TIMING = "no uncached timing"
NOTHING = "\u2013"

_MINUS = "\u2212"
_DIGITS = frozenset("0123456789")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A measured number with its interval and the number of questions behind it."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any] | None) -> Self | None:
        """Read an interval of a summary; None where nothing was measured."""
        value = (found or {}).get("value")
        if not found or value is None:
            return None
        return cls(value=value, low=found.get("low"), high=found.get("high"), n=found.get("n"))

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; the value itself where there is none."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return low, high


def number(value: float | None, digits: int = 1) -> str:
    """Return a number to so many digits after the point, with a true minus sign."""
    if value is None:
        return NOTHING
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", _MINUS)


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return NOTHING if share is None else f"{number(100 * share)}\u00a0%"


def points(share: float | None) -> str:
    """Return a difference of two shares in percentage points, always with its sign."""
    if share is None:
        return NOTHING
    written = number(100 * share)
    return written if written.startswith(_MINUS) or written == "0.0" else f"+{written}"


def seconds(value: float | None) -> str:
    """Return seconds, with the digits that matter at their size."""
    if value is None:
        return NO_TIMING
    return f"{number(value, 2 if value < 1 else 1)}\u00a0s"


def times(ratio: float | None) -> str:
    """Return a ratio of two times."""
    return NOTHING if ratio is None else f"{number(ratio, 2)}\u00d7"


def between(estimate: Estimate | None, written: Callable[[float], str]) -> str:
    """Return the interval of an estimate in words; an end that is None is open."""
    low, high = (None, None) if estimate is None else (estimate.low, estimate.high)
    if low is not None and high is not None:
        start, end = written(low), written(high)
        unit = "".join(takewhile(lambda letter: letter not in _DIGITS, reversed(end)))[::-1]
        return f"{start.removesuffix(unit) if unit else start} to {end}"
    if high is not None:
        return f"at most {written(high)}"
    return "no interval" if low is None else f"at least {written(low)}"


def count(n: float | None) -> str:
    """Return a number of questions or tokens."""
    return NOTHING if n is None else number(n, 0)


def listed(names: Iterable[str]) -> str:
    """Return names one after the other, each in a direction of its own (Unicode's isolates)."""
    return ", ".join(f"\u2068{name}\u2069" for name in names)
