"""Plots as inline SVG, drawn on the server: the page's script only shows values.

Shapes are stretched to the width of the page; markers and the numbers on the axes are placed in percent, so that they
keep their size on a phone. Colours are classes of the style sheet, which has a light and a dark mode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup, escape

from replaybuf.common import units
from replaybuf.common.redact import escape as visible

#: The number of ticks on a y axis at most, and on an x axis.
_MOST_TICKS, _ACROSS = 6, 4


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, and its ticks: values with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Return the relative position of a value: 0 at `low`, 1 at `high`."""
        return (value - self.low) / ((self.high - self.low) or 1.0)


def value_axis(values: Iterable[float], *, fitted: bool) -> Axis:
    """Return a y axis that begins and ends with a tick: at 0 unless it is `fitted` to the values."""
    numbers = [*values]
    low, high = (min(numbers), max(numbers)) if fitted else (min(0.0, *numbers), max(0.0, *numbers))
    if low == high:
        spread = abs(low) / 20 or 0.5
        low, high = (low - spread, high + spread) if fitted else (low, 1.0)
    step = _round_step((high - low) / (_MOST_TICKS - 2))
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple((tick * step, written(tick * step, step)) for tick in range(first, last + 1))
    return Axis(first * step, last * step, ticks)


def written(value: float, step: float) -> str:
    """Return a value with as many digits as distinguish it from one a step away."""
    if step >= 100 or abs(value) >= 10_000:
        return units.short(round(value))
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"


def _round_step(minimum: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... (and 0.5, 0.2, ...) that is at least this."""
    if not math.isfinite(minimum) or minimum < 1e-300:
        return 1.0 if minimum < 1.0 else 1e308
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= minimum * (1 - 1e-9))


def write_time(seconds: float, span: float) -> str:
    form = "%b %d %H:%M" if span > 86_400 else "%H:%M" if span > 600 else "%H:%M:%S"
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


def x_axis(low: float, high: float, write: Callable[[float, float], str]) -> Axis:
    """Return an axis from the first value to the last, with ticks at whole numbers that are equally far apart."""
    values = sorted({round(low + (high - low) * place / (_ACROSS - 1)) for place in range(_ACROSS)})
    return Axis(low, high, tuple((float(value), write(value, high - low)) for value in values if low <= value <= high))


def write_step(value: float, _: float) -> str:
    return f"{value:,.0f}"


WIDTH, HEIGHT = 600, 160
#: A line with more points is thinned out to the minimum and maximum of each interval.
POINTS = 400

#: The values of a line, by x.
Points = Sequence[tuple[float, float]]
Classes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: title, shapes, numbers on the axes, legend (classes and names), and the title of the x axis.

    `data` is for the page's script: for each x its position from 0 to 1, its label, and the label of each value.
    """

    title: str
    svg: Markup
    left: Markup
    bottom: Markup
    legend: tuple[tuple[str, str], ...]
    data: str = ""
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Across:
    """The x axis of a plot, of `times` (seconds since the epoch) or train steps.

    It is from `low` to `high`, or else from the first value to the last.
    """

    times: bool = True
    low: float | None = None
    high: float | None = None


def lines(
    title: str,
    series: Mapping[str, Points],
    classes: Classes | None = None,
    *,
    across: Across = Across(),
    fitted: bool = False,
    marks: Mapping[float, str] | None = None,
) -> Plot | None:
    """Return a plot of lines; None when no line has two points.

    The y axis is `fitted` to the values, or begins at 0. `marks` are annotations of points of the first line, by x.
    """
    thinned = {name: _thin(points, marks or {}) for name, points in series.items() if len(points) > 1}
    if not thinned:
        return None
    frame = _Frame.of(thinned, across, fitted=fitted)
    styles = _styles(thinned, classes)
    shapes = [
        f'<polyline class="line {styles[name]}" points="{frame.path(points)}"><title>{_safe(name)}</title></polyline>'
        for name, points in thinned.items()
    ]
    first_line = dict(next(iter(thinned.values())))
    dots = [frame.dot(x, first_line[x], text) for x, text in (marks or {}).items() if x in first_line]
    return frame.plot(title, shapes, dots, styles, thinned)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The axes of a plot."""

    x: Axis
    y: Axis
    across: Across

    @staticmethod
    def of(series: Mapping[str, Points], across: Across, *, fitted: bool) -> _Frame:
        points = [point for line in series.values() for point in line]
        xs = [x for x, _ in points]
        low = min(xs) if across.low is None else across.low
        high = max(xs) if across.high is None else across.high
        return _Frame(
            x_axis(low, high, write_time if across.times else write_step),
            value_axis([y for _, y in points], fitted=fitted),
            across,
        )

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x.place(x) * WIDTH:.1f},{HEIGHT - self.y.place(y) * HEIGHT:.1f}" for x, y in points)

    def dot(self, x: float, y: float, text: str) -> str:
        across, down = 100 * self.x.place(x), 100 - 100 * self.y.place(y)
        return f'<circle class="mark" cx="{across:.2f}%" cy="{down:.2f}%" r="5"><title>{_safe(text)}</title></circle>'

    def plot(
        self, title: str, shapes: list[str], dots: list[str], styles: Classes, series: Mapping[str, Points]
    ) -> Plot:
        step = self.y.ticks[1][0] - self.y.ticks[0][0]
        last_values = {name: number_text(points[-1][1], step) for name, points in series.items()}
        values = ", ".join(f"{visible(name)} {value}" for name, value in last_values.items())
        sentence = f"{title}; at the end: {values}"
        if self.y.low < 0 < self.y.high:
            zero = HEIGHT - self.y.place(0.0) * HEIGHT
            shapes = [f'<line class="zero" x1="0" x2="{WIDTH}" y1="{zero:.1f}" y2="{zero:.1f}"/>', *shapes]
        legend = tuple((styles[name], f"{name} {value}") for name, value in last_values.items())
        bottom = _bottom_axis([(self.x.place(x), text) for x, text in self.x.ticks])
        svg = _svg(self.y, shapes, dots, sentence)
        axis = "time (UTC)" if self.across.times else "train step"
        return Plot(title, svg, _left_axis(self.y), bottom, legend, self._data(styles, series, step), axis)

    def _data(self, styles: Classes, series: Mapping[str, Points], step: float) -> str:
        xs = sorted({x for points in series.values() for x, _ in points})
        texts = []
        for name, points in series.items():
            y_at = dict(points)
            values = [number_text(y_at[x], step) if x in y_at else "" for x in xs]
            texts.append([visible(name), styles[name], values])
        places = [round(self.x.place(x), 4) for x in xs]
        return json.dumps({"at": places, "x": [self._x_text(x) for x in xs], "of": texts})

    def _x_text(self, x: float) -> str:
        if self.across.times:
            text = units.moment(units.time_of(x))
            return text[5:] if self.x.high - self.x.low > 60 else text[11:]
        return f"step {write_step(x, 0.0)}"


def number_text(value: float, step: float) -> str:
    """Return a value with one digit more than ticks at a distance of `step` have."""
    return written(value, 1.0 if float(value).is_integer() else step / 10)


def _svg(axis: Axis, shapes: Sequence[str], dots: Sequence[str], sentence: str) -> Markup:
    heights = [HEIGHT - axis.place(value) * HEIGHT for value, _ in axis.ticks]
    grid = "".join(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights)
    return Markup(
        f'<svg class="canvas" role="img" tabindex="0" aria-label="{_safe(sentence)}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{grid}{"".join(shapes)}</svg>'
        f"{''.join(dots)}</svg>"
    )


def _left_axis(axis: Axis) -> Markup:
    texts = [(100 - 100 * axis.place(value), text) for value, text in axis.ticks]
    inside = "".join(f'<text x="100%" y="{down:.1f}%">{_safe(text)}</text>' for down, text in texts)
    return Markup(f'<svg class="left" aria-hidden="true">{inside}</svg>')


def _bottom_axis(ticks: Iterable[tuple[float, str]]) -> Markup:
    inside = ""
    for place, text in ticks:
        side = "first" if place < 0.05 else "last" if place > 0.95 else "middle"
        inside += f'<text class="{side}" x="{100 * place:.2f}%" y="12">{_safe(text)}</text>'
    return Markup(f'<svg class="bottom" aria-hidden="true">{inside}</svg>')


def _styles(series: Mapping[str, Points], classes: Classes | None) -> dict[str, str]:
    return {name: (classes or {}).get(name, f"s{place % 8}") for place, name in enumerate(series)}


def _thin(points: Points, marks: Container[float]) -> Points:
    """Return at most `POINTS` points: first, last, and the minimum and maximum of each interval between.

    Points with marks are kept as well.
    """
    if len(points) <= POINTS:
        return points
    size = -(-(len(points) - 2) // ((POINTS - 2) // 2))
    thinned = [points[0]]
    for start in range(1, len(points) - 1, size):
        stretch = points[start : min(start + size, len(points) - 1)]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        thinned += sorted({*ends, *(point for point in stretch if point[0] in marks)})
    return [*thinned, points[-1]]


def _safe(text: str) -> Markup:
    return escape(visible(text))
