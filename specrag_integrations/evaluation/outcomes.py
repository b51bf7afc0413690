"""Outcomes: what one system made of one question, and the file they are kept in, line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from specrag_integrations.errors import InputError

T = TypeVar("T")

HALF_CHARACTERS = "backslashreplace"
"""How a file of JSON is encoded: what UTF-8 cannot hold, JSON has this escape for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """An answer against the reference."""

    right: bool | None
    """Whether it counts as right: containment of a short answer, the label of a labelled claim, an
    abstention where nothing can be answered. None for long answers, which no rule can judge."""
    contained: bool
    exact: bool
    f1: float
    words: int
    """How long the answer is: containment rewards length."""
    label: str | None = field(default=None, repr=False)
    """The label the answer gives, in sets of labels."""
    citation_precision: float | None = None
    """The share of the cited passages that are gold; None where none is cited or gold is
    unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutcome:
    """A draft of one question, right or wrong, with everything a selector may go by."""

    index: int
    ranks: tuple[int, ...]
    answer: str = field(default="", repr=False)
    right: bool = False
    f1: float = 0.0
    group: int = 0
    """Drafts with equal answers have the same number."""
    usable: bool = True
    """Neither failed nor abstained."""
    truncated: bool = False
    terms: Mapping[str, float] = field(default_factory=dict)
    """The exposed terms, in nats."""
    value: float | None = None
    """The score; None where it could not be scored."""
    confidence: float | None = None
    share: float | None = None
    """What the selector made of it."""
    words: int = 0
    """Of the rationale and the answer."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    arrived: float | None = None
    """Seconds from the question to its score; None where a reply was replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one role over a question, as the servers counted them; None: one did not."""

    prompt: int | None = 0
    completion: int | None = 0
    busy: float | None = None
    """Seconds in which at least one of its requests was under way: what a rented GPU costs."""


def summed(counts: Sequence[int | None]) -> int | None:
    """Return the sum; None where one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one system made of one question."""

    dataset: str
    id: str
    system: str
    text: str = field(default="", repr=False)
    grades: Grades | None = None
    """None where there is no answer."""
    passages: tuple[str, ...] = ()
    """The ids of the passages it was written from."""
    abstained: bool = False
    fallback: str | None = None
    """Why standard RAG took over."""
    winner: int | None = None
    tier: str | None = None
    confidence: float | None = None
    drafts: tuple[DraftOutcome, ...] = ()
    replayed: bool = False
    """Some reply came from the cache, so that the times say nothing and are None."""
    seconds: float | None = None
    first_token: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in each stage; stages that overlap count once."""
    drafter: Tokens = Tokens()
    verifier: Tokens = Tokens()
    requests: int = 0
    error: str | None = field(default=None, repr=False)
    """Why there is no answer."""
    sitting: int = 0
    """In which sitting of its run it was made, counted from 0."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is the outcome of: data set, question and system."""
        return self.dataset, self.id, self.system

    @property
    def choices(self) -> list[DraftOutcome]:
        """The drafts that could be selected: those that neither failed nor abstained."""
        return [draft for draft in self.drafts if draft.usable]

    @property
    def failed(self) -> bool:
        """Whether there is no answer."""
        return self.error is not None

    @property
    def right(self) -> bool:
        """Whether the answer is right; no answer is not."""
        return bool(self.grades and self.grades.right)

    def to_dict(self, *, texts: bool = True) -> dict[str, Any]:
        """Return a JSON-able form; without `texts`, nothing that data or models have written."""
        found = asdict(self)
        if not texts:
            for one in (found, *found["drafts"]):
                one.pop("text", None)
                one.pop("answer", None)
            found["error"] = "" if self.failed else None
            found.pop("passages")
            if found["grades"]:
                found["grades"].pop("label")  # a word of the data
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        made = {name: found[name] for name in (f.name for f in fields(cls)) if name in found}
        if made.get("grades"):
            made["grades"] = Grades(**made["grades"])
        made["passages"] = tuple(made.get("passages", ()))
        drafts = made.get("drafts", ())
        made["drafts"] = tuple(
            DraftOutcome(**{**draft, "ranks": tuple(draft["ranks"])}) for draft in drafts
        )
        for role in ("drafter", "verifier"):
            made[role] = Tokens(**made.get(role, {}))
        return cls(**made)


def read_outcomes(path: Path) -> list[Outcome]:
    """Read a file of outcomes; a last line that was cut off is left out.

    Raises:
        InputError: a line is not an outcome; the message names it.
    """
    return read_lines(path, Outcome.from_dict, "an outcome")


def read_lines(path: Path, read: Callable[[Any], T], what: str) -> list[T]:
    """Read a file of JSON lines; a last line that was cut off is left out.

    Raises:
        InputError: a line is not `what` it should be; the message names it.
    """
    # Each line is decoded by itself: the last one may end within a character.
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(read(json.loads(line.decode())))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break  # the run was stopped in the middle of it
            raise InputError(
                f"{path}:{number}: not {what} of specrag eval ({error}); delete that line, and run "
                "the same specrag eval again to replace it"
            ) from None
    return found


def write_outcomes(path: Path, outcomes: Iterable[Outcome], *, texts: bool = True) -> None:
    """Write a file of outcomes anew."""
    with path.open("w", encoding="utf-8", errors=HALF_CHARACTERS) as file:
        file.writelines(line_of(outcome, texts=texts) for outcome in outcomes)


def line_of(outcome: Outcome, *, texts: bool = True) -> str:
    """Return an outcome as a line of such a file."""
    return json.dumps(outcome.to_dict(texts=texts), ensure_ascii=False) + "\n"
