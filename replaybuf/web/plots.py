"""Plots as inline SVG, made here: no script draws them, and they scale with the page.

Only shapes are in the SVG, stretched to the width of the page; titles, axes and legends are text around it, so that
letters keep their size on a phone. Colours are classes of the style sheet, which knows light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup, escape

from replaybuf import units
from replaybuf.redact import escape as visible

WIDTH, HEIGHT = 600, 160
#: Points of a line; more are thinned out.
POINTS = 300
BARS = 24

#: The values of a line, by x.
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: its title, its shapes, what its axes say, its legend (classes and names), and itself in one sentence."""

    title: str
    svg: Markup
    top: str
    left: str
    right: str
    legend: tuple[tuple[str, str], ...]
    sentence: str


def lines(title: str, series: Mapping[str, Points], classes: Mapping[str, str] | None = None) -> Plot | None:
    """Return a plot of lines over times (seconds since the epoch); None when no line has two points."""
    thinned = {name: _thin(points) for name, points in series.items() if len(points) > 1}
    if not thinned:
        return None
    frame = _Frame.of(thinned.values())
    styles = _styles(thinned, classes)
    shapes = [
        f'<polyline class="line {styles[name]}" points="{frame.path(points)}"><title>{_safe(name)}</title></polyline>'
        for name, points in thinned.items()
    ]
    return frame.plot(title, shapes, styles, {name: points[-1][1] for name, points in thinned.items()})


def areas(title: str, series: Mapping[str, Points], classes: Mapping[str, str] | None = None) -> Plot | None:
    """Return a plot of areas above each other, of series with the same times; None when there are fewer than two."""
    thinned = {name: _thin(points) for name, points in series.items() if any(value for _, value in points)}
    if not thinned or min(map(len, thinned.values())) < 2:
        return None
    times = [time for time, _ in next(iter(thinned.values()))]
    stacked: dict[str, tuple[Points, Points]] = {}
    floor = [0.0] * len(times)
    for name, points in thinned.items():
        roof = [below + value for below, (_, value) in zip(floor, points, strict=True)]
        stacked[name] = (list(zip(times, floor, strict=True)), list(zip(times, roof, strict=True)))
        floor = roof
    frame = _Frame.of([[*zip(times, floor, strict=True)]])
    styles = _styles(thinned, classes)
    shapes = [
        f'<polygon class="area {styles[name]}" points="{frame.path(roof)} {frame.path(below[::-1])}">'
        f"<title>{_safe(name)}</title></polygon>"
        for name, (below, roof) in stacked.items()
    ]
    return frame.plot(title, shapes, styles, {name: points[-1][1] for name, points in thinned.items()})


def histogram(title: str, counts: Sequence[tuple[str, int]], of: str) -> Plot | None:
    """Return bars with their labels, from left to right; None when there is nothing to count."""
    total, top = sum(n for _, n in counts), max((n for _, n in counts), default=0)
    if not total:
        return None
    width = WIDTH / len(counts)
    shapes = []
    for place, (label, n) in enumerate(counts):
        tall = HEIGHT * n / top
        shapes.append(
            f'<rect class="bar s0" x="{place * width + width * 0.06:.1f}" y="{HEIGHT - tall:.1f}" '
            f'width="{width * 0.88:.1f}" height="{tall:.1f}">'
            f"<title>{_safe(label)}: {n:,} ({n / total:.0%})</title></rect>"
        )
    common = max(counts, key=lambda one: one[1])
    sentence = f"{title} of {total:,} {of}: from {counts[0][0]} to {counts[-1][0]}, most often {common[0]}"
    return Plot(title, _svg(shapes, sentence), f"{top:,}", counts[0][0], counts[-1][0], (), sentence)


def whole_bins(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return a bar for each whole number from the least to the greatest; beyond `BARS`, bins of several."""
    if not counts:
        return []
    low, high = min(counts), max(counts)
    step = -(-(high - low + 1) // BARS)
    found = []
    for start in range(low, high + 1, step):
        n = sum(count for value, count in counts.items() if start <= value < start + step)
        found.append((str(start) if step == 1 else f"{start} to {start + step - 1}", n))
    return found


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges of x and y that a plot shows."""

    left: float
    right: float
    low: float
    high: float

    @staticmethod
    def of(lines: Iterable[Points]) -> _Frame:
        points = [point for line in lines for point in line]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        return _Frame(min(xs), max(xs), min(0.0, *ys), max(ys) if max(ys) > 0 else 1.0)

    def path(self, points: Points) -> str:
        wide, tall = (self.right - self.left) or 1.0, (self.high - self.low) or 1.0
        return " ".join(
            f"{(x - self.left) / wide * WIDTH:.1f},{HEIGHT - (y - self.low) / tall * HEIGHT:.1f}" for x, y in points
        )

    def plot(self, title: str, shapes: list[str], styles: Mapping[str, str], now: Mapping[str, float]) -> Plot:
        values = ", ".join(f"{visible(name)} {_number(value)}" for name, value in now.items())
        left, right = (_time(one, self.right - self.left) for one in (self.left, self.right))
        sentence = f"{title}, from {left} to {right} UTC; at the end: {values}"
        if self.low < 0:
            zero = HEIGHT + self.low / (self.high - self.low) * HEIGHT
            shapes = [f'<line class="zero" x1="0" x2="{WIDTH}" y1="{zero:.1f}" y2="{zero:.1f}"/>', *shapes]
        legend = tuple((styles[name], f"{name} {_number(value)}") for name, value in now.items())
        return Plot(title, _svg(shapes, sentence), _number(self.high), left, right, legend, sentence)


def _svg(shapes: Sequence[str], sentence: str) -> Markup:
    grid = "".join(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>' for y in (0, HEIGHT // 2, HEIGHT))
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{_safe(sentence)}">'
        f"{grid}{''.join(shapes)}</svg>"
    )


def _styles(series: Mapping[str, Points], classes: Mapping[str, str] | None) -> dict[str, str]:
    return {name: (classes or {}).get(name, f"s{place % 8}") for place, name in enumerate(series)}


def _thin(points: Points) -> Points:
    """Return at most `POINTS` of the points, the last one among them."""
    step = -(-len(points) // POINTS)
    return points[::-1][::step][::-1] if step > 1 else points


def _safe(text: str) -> Markup:
    return escape(visible(text))


def _number(value: float) -> str:
    return units.short(round(value)) if abs(value) >= 100 else f"{value:.3g}"


def _time(seconds: float, span: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%b %d %H:%M" if span > 600 else "%H:%M:%S")
