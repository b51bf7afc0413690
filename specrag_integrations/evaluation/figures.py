"""Figures: the charts of a report as SVG, each with the table of its numbers.

Each chart is drawn twice, for a wide page and for a phone, so that its letters keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specrag_integrations.evaluation import svg
from specrag_integrations.evaluation.estimates import (
    NO_TIMING,
    NOTHING,
    Estimate,
    between,
    count,
    listed,
    number,
    percent,
    seconds,
)
from specrag_integrations.evaluation.svg import Element, Scale

WIDE, NARROW = 720.0, 340.0
"""Widths of the two drawings, px."""

_SERIES = 6
"""Colours for lines; later ones take them again, dashed."""
_STAGES = {
    "partition": 5,
    "draft": 0,
    "verify": 1,
    "select": 3,
    "fallback": 2,
    "refine": _SERIES,  # the draft's, and paler
    "answer": 4,
}
"""The stages in their order and the colours they keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart, what it says in words, and the numbers it was drawn from."""

    name: str
    """Unique in the page; the drawings' titles are found by it."""
    title: str
    description: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    drawings: tuple[Element, ...]
    """For a wide page and for a narrow one; or one for both."""
    caption: str = ""
    """What it says of itself beside it; what all charts of a section share stands above them."""
    notes: tuple[str, ...] = ()
    """What a reader must know to trust it: what is left out, and why."""
    key: tuple[str, ...] = ()
    """Names of the numbered dots, where names would cover each other."""
    key_when_wide: bool = True
    """Whether the wide drawing is numbered too, or only the narrow one."""


# ------------------------------------------------------------------- accuracy against time


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    name: str
    accuracy: Estimate
    seconds: float
    n: int | None

    @property
    def words(self) -> str:
        return f"{self.name}: {percent(self.accuracy.value)} right, {seconds(self.seconds)}"


def _timed(systems: Sequence[Mapping[str, Any]]) -> list[_System]:
    found = []
    for system in systems:
        accuracy = Estimate.read(system["accuracy"])
        total = system["total"] or {}
        if accuracy is not None and total.get("p50") is not None:
            made = _System(
                name=system["name"], accuracy=accuracy, seconds=total["p50"], n=total.get("n")
            )
            found.append(made)
    return found


def frontier(systems: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw accuracy against the median seconds of a question; None where nothing was timed."""
    timed = _timed(systems)
    if not timed:
        return None
    best = {one.name for one in timed if not any(_beats(other, one) for other in timed)}
    drawn = {one.name for one in timed}
    # Bounds are asked by nobody, so that they have no time, and are not missed.
    asked = [system["name"] for system in systems if not system["bound"]]
    left_out = [name for name in asked if name not in drawn]
    title = "Accuracy against time"
    description = (
        "One dot per system: the share of right answers with its interval, against the median "
        f"seconds of a question. On the frontier: {listed(sorted(best)) or 'none'}."
    )
    notes = (f"Not drawn, without a graded answer or an uncached timing: {listed(left_out)}.",)
    drawings, numbered = [], {}
    for kind, width, height in (("wide", WIDE, 380.0), ("narrow", NARROW, 340.0)):
        parts, numbered[kind] = _scatter(timed, best, width, height)
        named = svg.named("frontier", kind, title, description)
        drawings.append(svg.drawing("frontier", kind, (width, height), [*named, *parts]))
    return Figure(
        name="frontier",
        title=title,
        description=description,
        columns=("System", "Right", "Interval", "n", "Median time", "Timed", "On the frontier"),
        rows=tuple(
            (
                one.name,
                percent(one.accuracy.value),
                between(one.accuracy, percent),
                count(one.accuracy.n),
                seconds(one.seconds),
                count(one.n),
                "yes" if one.name in best else "no",
            )
            for one in timed
        ),
        drawings=tuple(drawings),
        caption="Filled dots are on the frontier (dotted): no other system was as right in less "
        "time. Where intervals overlap, the order may be chance.",
        notes=notes if left_out else (),
        key=tuple(one.name for one in timed) if any(numbered.values()) else (),
        key_when_wide=numbered["wide"],
    )


def _beats(one: _System, other: _System) -> bool:
    first = (one.accuracy.value, -one.seconds)
    second = (other.accuracy.value, -other.seconds)
    return first != second and first[0] >= second[0] and first[1] >= second[1]


def _scatter(
    timed: Sequence[_System], best: set[str], width: float, height: float
) -> tuple[list[Element], bool]:
    left, right, top, bottom = 46.0, width - 12, 30.0, height - 46
    across = svg.time_scale([one.seconds for one in timed], left, right)
    ends = [end for one in timed for end in one.accuracy.ends]
    up = svg.share_scale(ends, bottom, top)
    dots = [(across(one.seconds), up(one.accuracy.value)) for one in timed]
    whiskers = [tuple(up(end) for end in one.accuracy.ends) for one in timed]
    stairs = list(_stairs(timed, best, across, up))
    thin = [
        svg.Box(left=x - 2, top=high, right=x + 2, bottom=low)
        for (x, _), (low, high) in zip(dots, whiskers, strict=True)
    ]
    thin += [
        svg.Box(left=min(x1, x2), top=min(y1, y2) - 1, right=max(x1, x2), bottom=max(y1, y2) + 1)
        for (x1, y1), (x2, y2) in pairwise(stairs)
    ]
    page = svg.Box(left=left + 2, top=top - 12, right=width - 2, bottom=bottom + 6)
    names = [svg.short(one.name) for one in timed]
    labels = svg.labels(names, dots, thin, page)
    by_number = labels is None
    if labels is None:
        labels = _numbers(dots, thin, page)
    parts = svg.upward(up, left, right, svg.round_percent)
    parts += svg.across(across, top, bottom, svg.round_seconds)
    parts += [
        svg.text(0, 14, "right answers", "axis"),
        svg.text(right, height - 6, "median seconds of a question", "axis", "end"),
        svg.path(stairs, "frontier"),
    ]
    for one, (x, y), (low, high), label in zip(timed, dots, whiskers, labels, strict=True):
        class_ = "best" if one.name in best else "other"
        parts.append(svg.line(x, low, x, high, f"whisker {class_}"))
        parts += label.draw(f"label {class_}")
        parts.append(svg.dot(x, y, class_, one.words))
    return parts, by_number


def _numbers(
    dots: Sequence[tuple[float, float]], thin: Sequence[svg.Box], page: svg.Box
) -> list[svg.Label]:
    names = [str(number) for number in range(1, len(dots) + 1)]
    placed = svg.labels(names, dots, thin, page)
    if placed is not None:
        return placed
    return [  # dots on top of each other: nothing can part their names
        svg.Label(
            words=name, box=svg.Box(left=x + 9, top=y - 8, right=x + 25, bottom=y + 8), dot=(x, y)
        )
        for name, (x, y) in zip(names, dots, strict=True)
    ]


def _stairs(
    timed: Sequence[_System], best: set[str], across: Scale, up: Scale
) -> Iterable[tuple[float, float]]:
    """Return the corners of what is attainable: the best accuracy within so many seconds."""
    chosen = sorted((one for one in timed if one.name in best), key=lambda one: one.seconds)
    ends = [*(across(one.seconds) for one in chosen[1:]), across.end]
    for one, end in zip(chosen, ends, strict=True):
        y = up(one.accuracy.value)
        yield across(one.seconds), y
        yield end, y


def strip(accuracy: Mapping[str, Any] | None, standard: Mapping[str, Any] | None) -> Element | None:
    """Draw one accuracy from 0 to 100 % beside its number; a line marks standard RAG's."""
    estimate = Estimate.read(accuracy)
    if estimate is None:
        return None
    across = Scale(low=0.0, high=1.0, start=6.0, end=126.0)
    low, high = estimate.ends
    parts = [svg.line(across(0.0), 9, across(1.0), 9, "grid")]
    reference = Estimate.read(standard)
    if reference is not None:
        x = across(reference.value)
        parts.append(svg.line(x, 1, x, 17, "reference"))
    parts.append(svg.line(across(low), 9, across(high), 9, "whisker best"))
    parts.append(svg.element("circle", cx=across(estimate.value), cy=9.0, r=4.5, class_="best"))
    return svg.element("svg", *parts, viewBox="0 0 132 18", class_="strip", aria_hidden="true")


# ------------------------------------------------------------------------ a row per system


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of a chart: names to the left on a wide page, above their row on a narrow one."""

    width: float
    names: Sequence[str]
    top: float
    side: float = 0.0
    """Room for words right of the plot, px, on a wide page."""

    @property
    def wide(self) -> bool:
        return self.width == WIDE

    @property
    def left(self) -> float:
        longest = max(svg.width_of(svg.short(name)) for name in self.names)
        return longest + 12 if self.wide else 4.0

    @property
    def right(self) -> float:
        return self.width - self.side - 8 if self.wide else self.width - 12

    @property
    def step(self) -> float:
        return 34.0 if self.wide else 66.0 if self.side else 48.0

    @property
    def bottom(self) -> float:
        return self.top + self.step * len(self.names)

    def middle(self, index: int) -> float:
        return self.top + self.step * index + (17 if self.wide else 30)

    def name(self, index: int) -> Element:
        y = self.middle(index)
        words = svg.short(self.names[index])
        if self.wide:
            return svg.text(self.left - 10, y + 4, words, "label", "end")
        return svg.text(0, y - 14, words, "label")

    def said(self, index: int, words: str) -> Element:
        """Write words beside the row's marks."""
        y = self.middle(index)
        if self.wide:
            return svg.text(self.right + 14, y + 4, words, "value")
        return svg.text(0, y + 24, words, "value")


def selection(rows: Sequence[Mapping[str, Any]], *, name: str, title: str) -> Figure | None:
    """Draw, for each system, how right its mean, its selected and its best drafts are."""
    rows = [row for row in rows if None not in (row["mean"], row["selected"], row["oracle"])]
    if not rows:
        return None
    description = (
        "Per system: how often a draft picked at random is right, how often the selected one is, "
        "and how often any is (oracle)."
    )
    drawings = []
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        layout = _Rows(width=width, names=[row["system"] for row in rows], top=26, side=230)
        size = (width, layout.bottom + 24)
        parts = [*svg.named(name, kind, title, description), *_ladder(rows, layout)]
        drawings.append(svg.drawing(name, kind, size, parts))
    return Figure(
        name=name,
        title=title,
        description=description,
        columns=(
            "System",
            "Mean draft",
            "Selected",
            "Oracle",
            "Questions",
            "Efficiency",
            "Interval",
            "Contested",
        ),
        rows=tuple(
            (
                row["system"],
                percent(row["mean"]),
                percent(row["selected"]),
                percent(row["oracle"]),
                count(row["questions"]),
                number(efficiency.value, 2) if efficiency else NOTHING,
                between(efficiency, lambda value: number(value, 2)),
                count(row["contested"]),
            )
            for row in rows
            for efficiency in (Estimate.read(row["efficiency"]),)
        ),
        drawings=tuple(drawings),
    )


def _ladder(rows: Sequence[Mapping[str, Any]], layout: _Rows) -> list[Element]:
    across = Scale(low=0.0, high=1.0, start=layout.left, end=layout.right)
    parts = svg.across(across, layout.top - 4, layout.bottom, svg.round_percent)
    parts += _marks_explained(layout)
    for index, row in enumerate(rows):
        y = layout.middle(index)
        mean, selected, oracle = (across(row[name]) for name in ("mean", "selected", "oracle"))
        parts += [
            layout.name(index),
            svg.line(min(mean, selected), y, max(oracle, selected), y, "whisker other"),
            svg.dot(mean, y, "other", f"mean draft {percent(row['mean'])}"),
            svg.diamond(oracle, y, "bound", f"oracle {percent(row['oracle'])}", 7),
            svg.dot(selected, y, "best", f"selected {percent(row['selected'])}"),
            layout.said(index, _efficiency_said(row)),
        ]
    return parts


def _efficiency_said(row: Mapping[str, Any]) -> str:
    efficiency = Estimate.read(row["efficiency"])
    contested = f"{count(row['contested'])} contested"
    if efficiency is None:
        return f"no efficiency, {contested}"
    ends = between(efficiency, lambda value: number(value, 2))
    return f"{number(efficiency.value, 2)} ({ends}), {contested}"


def _marks_explained(layout: _Rows) -> list[Element]:
    x, parts = layout.left + 6, []
    for mark, class_, words in (
        (svg.dot, "other", "mean draft"),
        (svg.dot, "best", "selected"),
        (svg.diamond, "bound", "oracle"),
    ):
        parts += [mark(x, 9, class_, words), svg.text(x + 11, 13, words, "tick")]
        x += svg.width_of(words) + 32
    if layout.wide:
        parts.append(svg.text(layout.right + 14, 13, "efficiency (interval)", "tick"))
    return parts


def stages(systems: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw where each system's seconds go."""
    systems = [{**system, "stages": _spent(system)} for system in systems if _spent(system)]
    found = {name for system in systems for name in system["stages"]}
    names = [name for name in _STAGES if name in found] + sorted(found - _STAGES.keys())
    colours = {name: _STAGES.get(name, _SERIES + place) for place, name in enumerate(names)}
    if not names:
        return None
    title = "Where the time goes"
    description = "Mean seconds of a question in each stage, one bar per system."
    drawings = []
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        legend, height = _legend(colours, width, "stage")
        rows = [system["name"] for system in systems]
        layout = _Rows(width=width, names=rows, top=height + 8)
        parts = [*svg.named("stages", kind, title, description), *legend]
        parts += _stacked(systems, colours, layout)
        drawings.append(svg.drawing("stages", kind, (width, layout.bottom + 24), parts))
    return Figure(
        name="stages",
        title=title,
        description=description,
        columns=("System", *names, "Sum", "Timed"),
        rows=tuple(
            (
                system["name"],
                *(
                    seconds(system["stages"][name]) if name in system["stages"] else NOTHING
                    for name in names
                ),
                seconds(sum(system["stages"].values())),
                count((system["total"] or {}).get("n")),
            )
            for system in systems
        ),
        drawings=tuple(drawings),
    )


def _spent(system: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the stages that have any."""
    return {name: spent for name, spent in (system["stages"] or {}).items() if spent is not None}


def _stacked(
    systems: Sequence[Mapping[str, Any]], colours: Mapping[str, int], layout: _Rows
) -> list[Element]:
    longest = max(sum(system["stages"].values()) for system in systems)
    across = Scale(low=0.0, high=max(longest, 1e-3) * 1.12, start=layout.left, end=layout.right)
    parts = svg.across(across, layout.top, layout.bottom, svg.round_seconds)
    for index, system in enumerate(systems):
        y, so_far = layout.middle(index), 0.0
        parts.append(layout.name(index))
        for name, hue in colours.items():
            spent = system["stages"].get(name, 0.0)
            start, end = across(so_far), across(so_far + spent)
            so_far += spent
            words = f"{name} {seconds(spent)}"
            colour = _colour(hue, "stage")
            if end > start:
                bar = {"x": start, "y": y - 8, "width": end - start, "height": 16.0}
                parts.append(svg.element("rect", svg.element("title", words), class_=colour, **bar))
        parts.append(svg.text(across(so_far) + 6, y + 4, seconds(so_far), "value"))
    return parts


def _colour(index: int, kind: str) -> str:
    again = " again" if index >= _SERIES else ""
    return f"{kind} hue-{index % _SERIES}{again}"


def _legend(hues: Mapping[str, int], width: float, kind: str) -> tuple[list[Element], float]:
    """Return the names of colours, line by line, and the height they take."""
    parts: list[Element] = []
    x, y = 0.0, 10.0
    for name, hue in hues.items():
        words = svg.short(name)
        room = svg.width_of(words) + 40
        if x and x + room > width:
            x, y = 0.0, y + 20
        colour = _colour(hue, kind)
        if kind == "stage":
            parts.append(svg.element("rect", x=x, y=y - 6, width=14.0, height=12.0, class_=colour))
        else:
            parts.append(svg.line(x, y, x + 18, y, colour))
        parts.append(svg.text(x + 23, y + 4, words, "tick"))
        x += room
    return parts, y + 10


# ------------------------------------------------------------------------------ confidence


def risk_coverage(curves: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the share of wrong drafts against the share of questions they would answer."""
    kept = [(curve["system"], _curve(curve)) for curve in curves]
    kept = [(system, curve) for system, curve in kept if curve]
    questions = {curve["system"]: _sure_of(curve) for curve in curves}
    if not kept:
        return None
    title = "Risk against coverage"
    description = (
        "If only the most confident drafts were taken, and nothing else answered: the share of "
        "wrong ones among them (risk) against the share of questions answered (coverage), one line "
        "per system."
    )
    drawings = []
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        parts, height = _curves(kept, width)
        named = svg.named("risk", kind, title, description)
        drawings.append(svg.drawing("risk", kind, (width, height), [*named, *parts]))
    counted = [f"{listed([system])} {questions[system]}" for system, _ in kept]
    return Figure(
        name="risk",
        title=title,
        description=description,
        caption=f"Questions: {', '.join(counted)}.",
        columns=("System", "Questions", "Coverage", "Risk"),
        rows=tuple(
            (system, questions[system], percent(coverage), percent(risk))
            for system, curve in kept
            for coverage, risk in curve
        ),
        drawings=tuple(drawings),
    )


def _sure_of(curve: Mapping[str, Any]) -> str:
    """Return how many questions a curve is drawn from."""
    known, asked = curve["n"], curve["questions"]
    return count(known) if asked in {None, known} else f"{count(known)} of {count(asked)}"


def _curve(curve: Mapping[str, Any]) -> list[tuple[float, float]]:
    points = [(point["coverage"], point["risk"]) for point in curve["points"]]
    return sorted(point for point in points if None not in point)


def _curves(
    kept: Sequence[tuple[str, list[tuple[float, float]]]], width: float
) -> tuple[list[Element], float]:
    systems = [system for system, _ in kept]
    parts: list[Element] = []
    left, right, top, high = 46.0, width - 14, 30.0, 210.0
    if width == WIDE:  # names stand at the ends of their lines, where there is room
        right, high = right - max(svg.width_of(svg.short(system)) for system in systems), 250.0
    else:
        hues = {system: hue for hue, system in enumerate(systems)}
        parts, used = _legend(hues, width, "curve")
        top += used
    bottom = top + high
    across = Scale(low=0.0, high=1.0, start=left, end=right)
    worst = max(risk for _, curve in kept for _, risk in curve)
    up = svg.share_scale([0.0, worst], bottom, top)
    parts += svg.upward(up, left, right, svg.round_percent)
    parts += svg.across(across, top, bottom, svg.round_percent)
    parts += [
        svg.text(0, top - 14, "wrong among those answered", "axis"),
        svg.text(right, bottom + 36, "questions answered", "axis", "end"),
    ]
    ends = []
    for hue, (_, curve) in enumerate(kept):
        corners = [(across(coverage), up(risk)) for coverage, risk in curve]
        ends.append(corners[-1])
        x, y = corners[-1]
        colour = _colour(hue, "curve")
        parts.append(svg.path(corners, colour))
        parts.append(svg.element("circle", cx=x, cy=y, r=3.5, class_=colour))
    if width == WIDE:
        heights = svg.apart([y for _, y in ends])
        for hue, (system, (x, _), y) in enumerate(zip(systems, ends, heights, strict=True)):
            parts.append(svg.text(x + 9, y + 4, svg.short(system), f"name hue-{hue % _SERIES}"))
    return parts, bottom + 42


def reliability(found: Mapping[str, Any], *, name: str) -> Figure | None:
    """Draw how often answers are right against the confidence they came with."""
    bins = [
        one for one in found["bins"] if one["n"] and None not in (one["confidence"], one["right"])
    ]
    if not bins:
        return None
    title = f"Reliability of {found['system']}"
    measures = [
        f"{words} {number(found[key], 3)}"
        for words, key in (("Brier score", "brier"), ("expected calibration error", "ece"))
        if found[key] is not None
    ]
    answers = f"{count(sum(one['n'] for one in bins))} answers"
    description = "The share of right answers, with its interval, against their mean confidence."
    parts = [*svg.named(name, "single", title, description), *_diagonal(bins)]
    return Figure(
        name=name,
        title=title,
        description=description,
        columns=("Confidence", "Right", "Interval", "n"),
        rows=tuple(
            (
                percent(one["confidence"]),
                percent(one["right"]),
                between(Estimate(value=one["right"], low=one["low"], high=one["high"]), percent),
                count(one["n"]),
            )
            for one in bins
        ),
        caption=f"{', '.join((answers, *measures))}.",
        drawings=(svg.drawing(name, "single", (NARROW, 340.0), parts),),
    )


def _diagonal(bins: Sequence[Mapping[str, Any]]) -> list[Element]:
    left, right, top, bottom = 46.0, NARROW - 14, 48.0, 292.0
    across = Scale(low=0.0, high=1.0, start=left, end=right)
    up = Scale(low=0.0, high=1.0, start=bottom, end=top)
    parts = svg.upward(up, left, right, svg.round_percent)
    parts += svg.across(across, top, bottom, svg.round_percent)
    parts += [
        svg.text(0, 12, "right answers", "axis"),
        svg.text(left - 6, top - 12, "n", "tick", "end"),
        svg.text(right, 334, "confidence", "axis", "end"),
        svg.line(across(0), up(0), across(1), up(1), "reference"),
    ]
    last = -math.inf
    for one in bins:
        x, y = across(one["confidence"]), up(one["right"])
        low, high = (one["right"] if one[end] is None else one[end] for end in ("low", "high"))
        words = (
            f"{percent(one['right'])} right at {percent(one['confidence'])}, n {count(one['n'])}"
        )
        parts += [svg.line(x, up(low), x, up(high), "whisker best"), svg.dot(x, y, "best", words)]
        room = svg.width_of(count(one["n"])) + 4
        if x - last >= room:  # the table has the counts that find no room
            parts.append(svg.text(x, top - 12, count(one["n"]), "tick", "middle"))
            last = x
    return parts


# ---------------------------------------------------------------------------------- sweeps


def sweep(rows: Sequence[Mapping[str, Any]], *, letter: str, meaning: str) -> Figure | None:
    """Draw accuracy and seconds over the values of one setting."""
    rows = [row for row in rows if row["value"] is not None and Estimate.read(row["accuracy"])]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: row["value"])
    title = f"{letter}: {meaning}"
    description = (
        f"Share of right answers with its interval, and median seconds of a question, by {meaning}."
    )
    name = f"sweep-{letter}"
    drawings = []
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        parts = [*svg.named(name, kind, title, description), *_sweep_panels(rows, width)]
        height = 250.0 if width == WIDE else 480.0
        drawings.append(svg.drawing(name, kind, (width, height), parts))
    return Figure(
        name=name,
        title=title,
        description=description,
        columns=(letter, "System", "Right", "Interval", "n", "Time"),
        rows=tuple(
            (
                number(row["value"], 0),
                row["system"],
                percent(accuracy.value),
                between(accuracy, percent),
                count(accuracy.n),
                seconds(row["seconds"]),
            )
            for row in rows
            for accuracy in (Estimate.read(row["accuracy"]),)
            if accuracy is not None
        ),
        drawings=tuple(drawings),
    )


def _sweep_panels(rows: Sequence[Mapping[str, Any]], width: float) -> list[Element]:
    half = (width - 30) / 2
    places = ((0.0, 0.0, half), (half + 30, 0.0, half))
    if width == NARROW:
        places = ((0.0, 0.0, width), (0.0, 252.0, width))
    return [*_sweep_accuracy(rows, *places[0]), *_sweep_seconds(rows, *places[1])]


def _columns(
    rows: Sequence[Mapping[str, Any]], left: float, right: float, bottom: float
) -> tuple[list[float], list[Element]]:
    """Return where each row stands, evenly spaced, and its value beneath it."""
    step = (right - left) / len(rows)
    middles = [left + step * (index + 0.5) for index in range(len(rows))]
    labels = [
        _text_at(x, bottom + 16, number(row["value"], 0))
        for x, row in zip(middles, rows, strict=True)
    ]
    return middles, labels


def _text_at(x: float, y: float, words: str) -> Element:
    return svg.text(x, y, words, "tick", "middle")


def _sweep_accuracy(
    rows: Sequence[Mapping[str, Any]], x: float, y: float, width: float
) -> list[Element]:
    left, right, top, bottom = x + 46, x + width - 6, y + 32, y + 200
    estimates = [found for row in rows if (found := Estimate.read(row["accuracy"]))]
    up = svg.share_scale([end for one in estimates for end in one.ends], bottom, top)
    middles, labels = _columns(rows, left, right, bottom)
    counts = [
        _text_at(x, bottom + 32, count(one.n)) for x, one in zip(middles, estimates, strict=True)
    ]
    parts = [
        svg.text(x, y + 14, "right answers", "axis"),
        svg.text(left - 6, bottom + 32, "n", "tick", "end"),
        *svg.upward(up, left, right, svg.round_percent),
        *counts,
    ]
    parts += labels
    for middle, one in zip(middles, estimates, strict=True):
        low, high = one.ends
        parts.append(svg.line(middle, up(low), middle, up(high), "whisker best"))
        parts.append(svg.dot(middle, up(one.value), "best", percent(one.value)))
        parts.append(svg.text(middle + 9, up(one.value) + 4, svg.round_percent(one.value), "value"))
    return parts


def _sweep_seconds(
    rows: Sequence[Mapping[str, Any]], x: float, y: float, width: float
) -> list[Element]:
    left, right, top, bottom = x + 46, x + width - 6, y + 32, y + 200
    known = [row["seconds"] for row in rows if row["seconds"] is not None]
    parts = [svg.text(x, y + 14, "median seconds of a question", "axis")]
    if not known:
        return [*parts, svg.text(left, (top + bottom) / 2, NO_TIMING, "value")]
    up = Scale(low=0.0, high=max(*known, 1e-3) * 1.1, start=bottom, end=top)
    middles, labels = _columns(rows, left, right, bottom)
    parts += [*svg.upward(up, left, right, svg.round_seconds), *labels]
    for middle, row in zip(middles, rows, strict=True):
        if row["seconds"] is None:
            parts.append(svg.text(middle, bottom - 6, "none", "value", "middle"))
            continue
        height = bottom - up(row["seconds"])
        bar = {"x": middle - 10, "y": bottom - height, "width": 20.0, "height": height}
        parts.append(
            svg.element("rect", svg.element("title", seconds(row["seconds"])), class_="bar", **bar)
        )
        words = svg.text(middle, bottom - height - 6, seconds(row["seconds"]), "value", "middle")
        parts.append(words)
    return parts
