"""Plots, as functions of their numbers."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.web.plots import (
    HEIGHT,
    POINTS,
    WIDTH,
    Across,
    lines,
    value_axis,
    write_step,
    write_time,
    x_axis,
)

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


def test_a_dip_in_one_of_many_points_is_kept() -> None:
    plot = lines("mean", {"mean": [(x, 0.34 if x == 7777 else 0.4) for x in range(20_000)]}, fitted=True)
    assert plot is not None
    [line] = ElementTree.fromstring(plot.svg).iter("polyline")
    depths = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert max(depths) - min(depths) > HEIGHT / 2
    assert "0.340" in json.loads(plot.data)["of"][0][2]


@given(st.lists(numbers, min_size=1, max_size=50), st.booleans())
def test_an_axis_has_all_values_between_its_first_and_last_tick(values: list[float], fitted: bool) -> None:
    axis = value_axis(values, fitted=fitted)
    assert axis.ticks[0][0] == axis.low <= min(values)
    assert axis.ticks[-1][0] == axis.high >= max(values)
    assert 2 <= len(axis.ticks) <= 8
    assert fitted or axis.low <= 0 <= axis.high


@given(st.integers(0, 2**33), st.integers(0, 2**24))
def test_ticks_of_times_and_steps_are_few_and_inside(low: int, span: int) -> None:
    for write in (write_time, write_step):
        ticks = [value for value, _ in x_axis(low, low + span, write).ticks]
        assert 1 <= len(ticks) <= 5
        assert ticks == sorted({*ticks})
        assert (ticks[0], ticks[-1]) == (low, low + span)


def test_the_script_gets_texts_of_each_value() -> None:
    across = Across(times=False)
    plot = lines("both", {"mean": [(1, 0.5), (3, 0.25)], "most": [(1, 1.0), (2, 1.0)]}, across=across)
    assert plot is not None
    assert json.loads(plot.data) == {
        "at": [0.0, 0.5, 1.0],
        "x": ["step 1", "step 2", "step 3"],
        "of": [["mean", "s0", ["0.50", "", "0.25"]], ["most", "s1", ["1", "1", ""]]],
    }


def test_a_point_with_a_mark_is_kept_among_many() -> None:
    plot = lines("mean", {"mean": [(x, float(x % 2)) for x in range(20_000)]}, marks={7776.0: "odd"})
    assert plot is not None
    assert plot.svg.count("<circle") == 1


def test_marks_lie_on_the_first_line_and_say_why() -> None:
    plot = lines("mean", {"mean": [(0, 0), (1, 1), (2, 0.5)]}, marks={1: "<bad>", 9: "elsewhere"})
    assert plot is not None
    [mark] = ElementTree.fromstring(plot.svg).iter("circle")
    assert (mark.attrib["cx"], mark.attrib["cy"], mark[0].text) == ("50.00%", "0.00%", "<bad>")


def test_nothing_is_plotted_of_nothing() -> None:
    assert lines("none", {}) is lines("one", {"a": [(0, 1)]}) is None


def test_plots_of_one_run_share_their_axis() -> None:
    plot = lines("mean", {"mean": [(2, 0.5), (3, 0.25)]}, across=Across(times=False, low=1, high=5))
    assert plot is not None
    assert (json.loads(plot.data)["at"], plot.axis) == ([0.25, 0.5], "train step")
