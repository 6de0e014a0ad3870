"""A picture of several series over the same time, as an SVG of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 900, 130, 64, 40, 44
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 14px; font-weight: 600 }
.grid { stroke: #ddd } .line { fill: none; stroke: #2458a6; stroke-width: 1.5 } .dot { fill: #2458a6; fill-opacity: .5 }
.mark { stroke: #c2571a; stroke-opacity: .35 } .back { fill: #fff }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """A series: times in seconds and values, as a line, as steps or as dots."""

    title: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dots: bool = False


def drawn(title: str, seconds: float, panels: Sequence[Panel], marks: Sequence[float] = ()) -> str:
    """Return the SVG of panels below each other; at each of the marks is a vertical line."""
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    whole = _LEFT + _WIDTH + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{whole}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_HEIGHT + _GAP) + 18, seconds, marks)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: float, seconds: float, marks: Sequence[float]) -> list[str]:
    most = max((value for _, value in panel.points), default=0.0) or 1.0
    bottom = top + _HEIGHT - 30

    def x(at: float) -> float:
        return _LEFT + _WIDTH * min(1.0, at / seconds)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / most

    parts = [f'<text x="{_LEFT}" y="{top - 6}">{escape(panel.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        height = y(most * share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{_figure(most * share)}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = f"{seconds * share / 60:.3g} min"
        parts.append(f'<text x="{x(seconds * share):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{label}</text>')
    parts += [f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top}" y2="{bottom}"/>' for at in marks]
    if panel.dots:
        return parts + [f'<circle class="dot" r="2" cx="{x(at):.1f}" cy="{y(v):.1f}"/>' for at, v in panel.points]
    line = []
    for at, value in panel.points:
        if panel.steps and line:
            line.append(f"{x(at):.1f},{line[-1].partition(',')[2]}")
        line.append(f"{x(at):.1f},{y(value):.1f}")
    return [*parts, f'<polyline class="line" points="{" ".join(line)}"/>']


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
