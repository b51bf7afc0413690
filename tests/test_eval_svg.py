import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations.evaluation import estimates, svg
from specrag_integrations.evaluation.estimates import Estimate

PAGE = svg.Box(left=0, top=0, right=720, bottom=380)
inside = st.tuples(st.floats(10, 710), st.floats(10, 370))


def test_texts_and_attributes_are_escaped() -> None:
    """Nothing that an element is given can end it or add to it."""
    drawn = svg.element("text", "</text><script>", class_='"><b', text_anchor="end").__html__()

    assert drawn == (
        '<text class="&quot;&gt;&lt;b" text-anchor="end">&lt;/text&gt;&lt;script&gt;</text>'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_drawn(value: float) -> None:
    """A chart with such a coordinate is an error where it is made."""
    with pytest.raises(ValueError, match="cannot show"):
        svg.line(0, 0, value, 1, "").__html__()


@given(st.lists(inside, min_size=1, max_size=14), st.integers(1, 20))
def test_names_cover_neither_each_other_nor_a_dot(
    dots: list[tuple[float, float]], letters: int
) -> None:
    """Names that are placed overlap nothing and stay on the page; else none is placed."""
    names = ["x" * letters] * len(dots)
    labels = svg.labels(names, dots, [], PAGE)

    if labels is None:
        assert len(dots) > 1 or letters > 5
        return
    boxes = [label.box for label in labels]
    assert not any(one.meets(other) for one, other in combinations(boxes, 2))
    assert not any(box.distance(dot) < 3 for box in boxes for dot in dots)
    assert all(box.inside(PAGE) for box in boxes)


def test_a_name_avoids_lines_and_places_that_another_dot_could_claim() -> None:
    """With room to the right it goes there; across a line or beside another dot it does not."""
    dot = (300.0, 200.0)
    right = svg.labels(["name"], [dot], [], PAGE)
    line = svg.Box(left=320, top=0, right=322, bottom=380)
    crossed = svg.labels(["name"], [dot], [line], PAGE)
    rival = svg.labels(["name", "other"], [dot, (345.0, 200.0)], [], PAGE)

    assert right
    assert right[0].box.left > dot[0]
    assert crossed
    assert not crossed[0].box.meets(line)
    assert rival
    assert rival[0].box.distance(dot) < rival[0].box.distance((345.0, 200.0))


def test_a_name_far_from_its_dot_is_tied_to_it() -> None:
    """Only there a line is drawn between them."""
    near = svg.Label(words="a", box=svg.Box(left=9, top=-8, right=19, bottom=8), dot=(0, 0))
    far = svg.Label(words="a", box=svg.Box(left=59, top=-8, right=69, bottom=8), dot=(0, 0))

    assert [one.name for one in near.draw("")] == ["text"]
    assert [one.name for one in far.draw("")] == ["line", "text"]


@given(st.lists(st.floats(0, 300), max_size=12))
def test_lines_of_text_are_moved_apart_and_keep_their_order(heights: list[float]) -> None:
    """Neighbours are a line's height apart, and on average nothing has moved."""
    moved = svg.apart(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)

    assert all(moved[below] - moved[above] > 15 - 1e-9 for above, below in pairwise(order))
    assert sum(moved) == pytest.approx(sum(heights), abs=1e-6)


@given(
    st.lists(st.floats(0.0, 1e4), min_size=1, max_size=8),
)
def test_any_times_find_their_place_on_an_axis(times: list[float]) -> None:
    """The order is kept, nothing leaves the axis, and there are a few round ticks."""
    scale = svg.time_scale(times, 40, 700)
    places = [scale(time) for time in sorted(times)]

    assert places == sorted(places)
    assert all(40 <= place <= 700 for place in places)
    assert 1 <= len(scale.ticks(5)) <= 16


def test_an_axis_is_logarithmic_only_where_times_span_more_than_ten_fold() -> None:
    """Equal seconds are equally far apart, or else equal ratios are."""
    even, ratios = svg.time_scale([2, 4, 6], 0, 100), svg.time_scale([1, 10, 100], 0, 100)

    assert even(6) - even(4) == pytest.approx(even(4) - even(2))
    assert ratios(100) - ratios(10) == pytest.approx(ratios(10) - ratios(1))
    assert ratios.ticks(5) == [1, 2, 5, 10, 20, 50, 100]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_shares_are_drawn_from_tenth_to_tenth(shares: list[float]) -> None:
    """The axis holds all values, never leaves 0 to 100 %, and is never without a length."""
    scale = svg.share_scale(shares, 0, 100)

    assert 0 <= scale.low <= min(shares)
    assert max(shares) <= scale.high
    assert scale.high - scale.low >= 0.1 - 1e-9


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (estimates.number(-1234.56), "\u22121,234.6"),
        (estimates.number(-0.04), "0.0"),
        (estimates.number(None), "\u2013"),
        (estimates.percent(0.5), "50.0\u00a0%"),
        (estimates.percent(None), "\u2013"),
        (estimates.points(0.012), "+1.2"),
        (estimates.points(-0.012), "\u22121.2"),
        (estimates.points(0.0001), "0.0"),
        (estimates.points(None), "\u2013"),
        (estimates.seconds(0.123), "0.12\u00a0s"),
        (estimates.seconds(12.34), "12.3\u00a0s"),
        (estimates.seconds(None), "no uncached timing"),
        (estimates.times(1.5), "1.50\u00d7"),
        (estimates.times(None), "\u2013"),
        (estimates.count(12345), "12,345"),
        (estimates.count(None), "\u2013"),
    ],
)
def test_numbers_are_written_as_a_reader_expects(written: str, words: str) -> None:
    """True minus signs, no minus zero, units after a space that does not break."""
    assert written == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.25, "10.0 to 25.0\u00a0%"),
        (None, 0.25, "at most 25.0\u00a0%"),
        (0.1, None, "at least 10.0\u00a0%"),
        (None, None, "no interval"),
    ],
)
def test_intervals_name_their_unit_once_and_their_open_ends(
    low: float | None, high: float | None, words: str
) -> None:
    """An end that is None is open."""
    assert estimates.between(Estimate(value=0.2, low=low, high=high), estimates.percent) == words


@pytest.mark.parametrize("found", [None, {}, {"value": None, "low": 0.1}])
def test_nothing_measured_is_no_estimate(found: dict[str, float | None] | None) -> None:
    """Without a value there is nothing to show, whatever else stands there."""
    assert Estimate.read(found) is None
    assert estimates.between(Estimate.read(found), estimates.percent) == "no interval"
