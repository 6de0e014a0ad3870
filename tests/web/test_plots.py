"""Plots, as functions of their numbers."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.units import bins
from replaybuf.web.plots import BARS, HEIGHT, POINTS, WIDTH, areas, histogram, lines, whole_bins

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(numbers, min_size=2, max_size=50))
def test_lines_stay_inside_of_the_frame(values: list[float]) -> None:
    plot = lines("any", {"<one>": list(enumerate(values))})
    assert plot is not None
    [line] = ElementTree.fromstring(plot.svg).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert all(-0.1 <= x <= WIDTH + 0.1 and -0.1 <= y <= HEIGHT + 0.1 for x, y in points)


def test_hostile_names_stay_texts() -> None:
    name = '"><script>alert(1)</script>\x1b\u202e'
    plot = lines(name, {name: [(0, 1), (1, 2)]})
    assert plot is not None
    assert "<script>" not in plot.svg
    assert not re.search("[\x1b\u202e]", plot.svg)
    ElementTree.fromstring(plot.svg)


def test_many_points_are_thinned_and_the_last_one_stays() -> None:
    plot = lines("many", {"one": [(x, x) for x in range(200_001)]})
    assert plot is not None
    assert plot.svg.partition("points=")[2].count(",") <= POINTS
    assert plot.legend == (("s0", "one 200k"),)


def test_areas_stand_on_each_other() -> None:
    plot = areas("both", {"low": [(0, 1), (1, 1)], "high": [(0, 3), (1, 3)]})
    assert plot is not None
    low, high = ElementTree.fromstring(plot.svg).iter("polygon")
    assert low.attrib["points"] == "0.0,120.0 600.0,120.0 600.0,160.0 0.0,160.0"
    assert high.attrib["points"] == "0.0,0.0 600.0,0.0 600.0,120.0 0.0,120.0"


def test_nothing_is_plotted_of_nothing() -> None:
    assert lines("none", {}) is lines("one", {"a": [(0, 1)]}) is areas("none", {}) is histogram("none", [], "") is None


@given(st.lists(numbers, min_size=1, max_size=200))
def test_bins_have_every_value_once(values: list[float]) -> None:
    counts = bins(values, BARS)
    assert sum(n for _, n in counts) == len(values)
    assert len(counts) <= BARS


@given(st.dictionaries(st.integers(-(10**9), 10**9), st.integers(1, 100), min_size=1, max_size=40))
def test_whole_bins_have_every_count_once(counts: dict[int, int]) -> None:
    found = whole_bins(counts)
    assert sum(n for _, n in found) == sum(counts.values())
    assert len(found) <= BARS


def test_numbers_that_arent_finite_are_left_out_of_bins() -> None:
    assert bins([1.0, float("nan"), float("inf"), 1.0], BARS) == [("1", 2)]
