"""Passages: the retrieved texts a question is answered from."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrag_integrations.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One retrieved text; its place in the list given to `ask` is its rank.

    The repr holds neither text nor title, so that a log never leaks a document.
    """

    text: str = field(repr=False)
    """What the models read."""
    id: str | None = None
    """The retriever's identifier, carried through untouched."""
    title: str | None = field(default=None, repr=False)
    """Shown to the models above the text."""
    score: float | None = None
    """The retriever's score; never used for ranking, since scales differ between retrievers."""
    embedding: Sequence[float] | None = field(default=None, repr=False)
    """A vector of shape (d,), used for clustering when every passage has one."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Anything else, carried through untouched."""

    @property
    def label(self) -> str:
        """A short name for messages: the id where there is one."""
        return self.id if self.id is not None else "(no id)"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form without the embedding."""
        return {
            "id": self.id,
            "title": self.title,
            "text": self.text,
            "score": _jsonable(self.score),
            "metadata": {key: _jsonable(value) for key, value in self.metadata.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The passages worth sending, and why the others were left out."""

    passages: tuple[Passage, ...]
    dropped: tuple[str, ...] = ()
    """One line for each passage left out, for the trace."""


def usable_passages(items: Iterable[Passage | str]) -> Usable:
    """Turn strings into passages and leave out the empty and the repeated ones.

    Two passages are the same when title and text agree but for case and white space: a second copy
    would be paid for and, sampled twice, would look like independent evidence.

    Raises:
        InputError: an item is neither a `Passage` nor a string, or `items` is no list of them.
    """
    if isinstance(items, str | bytes | Passage | Mapping) or not isinstance(items, Iterable):
        raise InputError(
            f"passages must be a list of Passage or str, not a single {type(items).__name__}"
        )
    kept: list[Passage] = []
    dropped: list[str] = []
    seen: set[tuple[str, str]] = set()
    for rank, item in enumerate(items):
        passage = Passage(text=item) if isinstance(item, str) else item
        if not isinstance(passage, Passage):
            raise InputError(
                f"passage {rank} is a {type(item).__name__}; give Passage(text=…) or str"
            )
        if not isinstance(passage.text, str):
            raise InputError(
                f"passage {rank}: its text is a {type(passage.text).__name__} and must be a str"
            )
        if not isinstance(passage.title, str | None):
            raise InputError(
                f"passage {rank}: title is a {type(passage.title).__name__}; give a str or None"
            )
        if not isinstance(passage.metadata, Mapping):
            raise InputError(
                f"passage {rank}: metadata is a {type(passage.metadata).__name__}; give a dict"
            )
        key = (_normal(passage.title or ""), _normal(passage.text))
        if not key[1]:
            dropped.append(f"passage {rank} {passage.label}: empty")
        elif key in seen:
            dropped.append(f"passage {rank} {passage.label}: repeats an earlier one")
        else:
            seen.add(key)
            kept.append(passage)
    return Usable(passages=tuple(kept), dropped=tuple(dropped))


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):  # numpy's scalars as well
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return str(value)
