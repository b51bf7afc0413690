"""Svg: the elements, axes and labels that charts are drawn with.

A drawing is a tree of elements that escapes what it is given, so that names from data are text and
never markup. Colours are classes: the page's style sheet decides them, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

_LETTER = 6.7
"""Mean width of a letter of a chart's labels, px; a little generous."""
_WIDE_LETTERS = 0x2E80
"""Letters from here on, Chinese ones say, take twice the room."""
_LONGEST = 34
"""Letters of a name in a chart; the tables have it whole."""
_LOG_FROM = 10.0
"""Seconds that differ by more than this factor are drawn on a logarithmic axis."""
_TICK = 10.0
"""Room between a tick's label and its axis, px."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of SVG; its text and its attributes are escaped when it is written."""

    name: str
    children: tuple[Element | str, ...] = ()
    attributes: Mapping[str, str | float] = field(default_factory=dict)

    def __html__(self) -> str:
        """Return it as markup; templates take this as it is."""
        attributes = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{escape(_written(value))}"'
            for name, value in self.attributes.items()
        )
        inside = "".join(
            child.__html__() if isinstance(child, Element) else escape(child)
            for child in self.children
        )
        return f"<{self.name}{attributes}>{inside}</{self.name}>"


def _written(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        raise ValueError(f"a chart cannot show {value}")
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(name: str, *children: Element | str, **attributes: str | float) -> Element:
    """Return an element; in names of attributes `_` stands for `-`, and a last one for nothing."""
    return Element(name, children, attributes)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Element:
    """Write words with their baseline at `y`; the anchor says which end of them is at `x`."""
    return element("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    """Draw a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(corners: Iterable[tuple[float, float]], class_: str) -> Element:
    """Draw a line through corners."""
    steps = " ".join(f"{_written(x)},{_written(y)}" for x, y in corners)
    return element("polyline", points=steps, class_=class_)


def dot(x: float, y: float, class_: str, words: str, radius: float = 5) -> Element:
    """Draw a dot; a pointer that rests on it is shown the words."""
    return element("circle", element("title", words), cx=x, cy=y, r=radius, class_=class_)


def diamond(x: float, y: float, class_: str, words: str, radius: float = 6) -> Element:
    """Draw a diamond, as `dot` does a dot."""
    corners = ((x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y))
    steps = " ".join(f"{_written(a)},{_written(b)}" for a, b in corners)
    return element("polygon", element("title", words), points=steps, class_=class_)


def drawing(figure: str, kind: str, size: tuple[float, float], parts: Sequence[Element]) -> Element:
    """Return a whole drawing, named and described by the elements that `named` makes."""
    width, height = size
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {_written(width)} {_written(height)}",
        class_=f"drawing {kind}",
        role="img",
        aria_labelledby=f"{figure}-{kind}-title {figure}-{kind}-desc",
    )


def named(figure: str, kind: str, title: str, description: str) -> list[Element]:
    """Return what a reader who cannot see it is told of a drawing."""
    return [
        element("title", title, id=f"{figure}-{kind}-title"),
        element("desc", description, id=f"{figure}-{kind}-desc"),
    ]


def width_of(words: str) -> float:
    """Return about how wide words are in a chart, px."""
    return sum(_LETTER if ord(letter) < _WIDE_LETTERS else 2 * _LETTER for letter in words)


def short(name: str, letters: int = _LONGEST) -> str:
    """Return a name cut to so many letters."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


# --------------------------------------------------------------------------------- scales
@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values to px along one axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return where a value lies, in px; values outside the axis are laid on its ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, wanted: int) -> list[float]:
        """Return round values for about so many ticks."""
        if self.log:
            exponents = range(
                math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
            )
            round_ones = [step * 10.0**power for power in exponents for step in (1, 2, 5)]
            return [value for value in round_ones if self.low <= value <= self.high]
        step = _step((self.high - self.low) / wanted)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


def time_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Cover seconds from 0, or their orders of magnitude where they span more than one."""
    longest = max((*values, 1e-3))
    shortest = max(min(values), longest / 1e4)
    if longest / shortest > _LOG_FROM:
        return Scale(low=shortest / 1.5, high=longest * 1.5, start=start, end=end, log=True)
    return Scale(low=0.0, high=longest * 1.12, start=start, end=end)


def share_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Cover all values in steps of a tenth: dots, unlike bars, need no zero to be honest."""
    low = max(0.0, math.floor(min(values) * 10 - 0.2) / 10)
    high = min(1.0, math.ceil(max(values) * 10 + 0.2) / 10)
    return Scale(low=low, high=max(high, low + 0.1), start=start, end=end)


def across(
    scale: Scale, top: float, bottom: float, written: Callable[[float], str]
) -> list[Element]:
    """Draw the horizontal axis: a faint line and a label for each tick."""
    parts = []
    for value in scale.ticks(5):
        x = scale(value)
        parts.append(line(x, top, x, bottom, "grid"))
        parts.append(text(x, bottom + _TICK + 6, written(value), "tick", "middle"))
    return parts


def upward(
    scale: Scale, left: float, right: float, written: Callable[[float], str]
) -> list[Element]:
    """Draw the vertical axis."""
    parts = [line(left, scale.start, right, scale.start, "grid")]
    for value in scale.ticks(5):
        y = scale(value)
        parts.append(line(left, y, right, y, "grid"))
        parts.append(text(left - 6, y + 4, written(value), "tick", "end"))
    return parts


def round_percent(share: float) -> str:
    """Write a share at a tick."""
    return f"{round(100 * share)}\u00a0%"


def round_seconds(value: float) -> str:
    """Write seconds at a tick."""
    return f"{value:g}\u00a0s"


# --------------------------------------------------------------------------------- labels
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a drawing, px; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether they overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def inside(self, other: Box) -> bool:
        """Whether it is within another."""
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )

    def distance(self, point: tuple[float, float]) -> float:
        """How far a point is from it; 0 inside."""
        x, y = point
        near = min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)
        return math.dist(point, near)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A name beside its dot."""

    words: str
    box: Box
    dot: tuple[float, float]

    def draw(self, class_: str) -> list[Element]:
        """Write the name, and a line to its dot where they are not side by side."""
        x, y = self.dot
        box = self.box
        parts = [text(box.left, box.bottom - 4, self.words, class_)]
        near_x = min(max(x, box.left), box.right)
        near_y = min(max(y, box.top), box.bottom)
        if math.dist((x, y), (near_x, near_y)) > _TICK + 4:
            parts.insert(0, line(x, y, near_x, near_y, "leader"))
        return parts


def apart(heights: Sequence[float], room: float = 15.0) -> list[float]:
    """Return heights, in the same order, moved so that no two lines of text overlap."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved = list(heights)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + room)
    # All were pushed downwards: together they move up by as much as they moved on average.
    drift = sum(new - old for new, old in zip(moved, heights, strict=True)) / max(len(moved), 1)
    return [height - drift for height in moved]


def _places(x: float, y: float, width: float) -> Iterable[Box]:
    """Where a label may stand, the best first: right, left, above, below, then further away."""
    height = 16.0
    for away in (9.0, 22.0, 38.0, 56.0, 76.0):
        for left, middle in (
            (x + away, y),
            (x - away - width, y),
            (x - width / 2, y - away - height / 2),
            (x - width / 2, y + away + height / 2),
            (x + away, y - away - 2),
            (x + away, y + away + 2),
            (x - away - width, y - away - 2),
            (x - away - width, y + away + 2),
        ):
            top = middle - height / 2
            yield Box(left=left, top=top, right=left + width, bottom=top + height)


def labels(
    names: Sequence[str], dots: Sequence[tuple[float, float]], thin: Sequence[Box], page: Box
) -> list[Label] | None:
    """Place names beside their dots so that none covers another name or dot.

    A place nearer to another dot than to its own, or across a line (`thin`), is taken only where no
    better one is left. Returns None if some name finds no place.
    """
    taken = [Box(left=x - 6, top=y - 6, right=x + 6, bottom=y + 6) for x, y in dots]
    labels = []
    for words, dot in zip(names, dots, strict=True):
        free = [
            box
            for box in _places(*dot, width_of(words) + 2)
            if box.inside(page) and not any(box.meets(other) for other in taken)
        ]
        if not free:
            return None
        box = min(free, key=lambda box: _faults(box, dot, dots, thin))
        taken.append(box)
        labels.append(Label(words=words, box=box, dot=dot))
    return labels


def _faults(
    box: Box,
    dot: tuple[float, float],
    dots: Sequence[tuple[float, float]],
    thin: Sequence[Box],
) -> int:
    """Return how bad a place is; of equally bad ones `min` takes the first, the nearest."""
    own = box.distance(dot)
    mistaken = any(box.distance(other) <= own for other in dots if other != dot)
    return 2 * mistaken + any(box.meets(line) for line in thin)
