"""The rates of puts and takes as horizontal bars, in an SVG written by hand: a panel for each size and kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.peers.adapter import SIZES
from benchmarks.peers.tables import rate
from benchmarks.table import number

BAR, LABELS, WIDTH, PANEL = 16, 200, 330, 70
COLOURS = {"replaybuf": "#1f6fb2", "floor": "#b8b8b8", "peer": "#7fae7f"}
_FLOORS = ("sqlite3", "sqlite3-tuned", "asyncpg", "fdatasync")


def draw(results: Mapping[str, Any], rows: Sequence[tuple[str, str, str]]) -> str:
    """Return an SVG: for each row puts on the left and takes on the right, on a logarithmic axis, with their ranges."""
    top, parts = 30, []
    for turn, size, kind in rows:
        row = f"{turn} {size} {kind}"
        shown = {name: result for name, result in results.items() if row in result.turns}
        if not shown:
            continue
        title = f"groups of {SIZES[size]}, {kind}: groups a second, median and range, logarithmic"
        parts.append(f'<text x="10" y="{top}" font-weight="bold">{title}</text>')
        for column, what in enumerate(("put", "take")):
            rates = {name: rate(result.turns[row], what) for name, result in shown.items()}
            parts += _panel(rates, {name: result.title for name, result in shown.items()}, what, column, top + 22)
        top += PANEL + BAR * len(shown)
    width = LABELS + 2 * WIDTH + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(
    rates: Mapping[str, Sequence[float]], titles: Mapping[str, str], what: str, column: int, top: int
) -> Iterator[str]:
    left = LABELS + column * (WIDTH + 20)
    lowest = math.floor(math.log10(min(min(values) for values in rates.values())))
    highest = math.ceil(math.log10(max(max(values) for values in rates.values())))

    def at(value: float) -> float:
        return left + (WIDTH - 60) * (math.log10(value) - lowest) / max(1, highest - lowest)

    yield f'<text x="{left}" y="{top - 4}" fill="#555">{what}s</text>'
    for line, (name, values) in enumerate(rates.items()):
        y, middle = top + line * BAR, statistics.median(values)
        if column == 0:
            yield f'<text x="{LABELS - 8}" y="{y + 11}" text-anchor="end">{escape(titles[name])}</text>'
        width = max(1.0, at(middle) - left)
        yield f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{BAR - 4}" fill="{_colour(name)}"/>'
        ends = f'x1="{at(min(values)):.1f}" x2="{at(max(values)):.1f}"'
        yield f'<line {ends} y1="{y + BAR / 2}" y2="{y + BAR / 2}" stroke="#333"/>'
        yield f'<text x="{at(max(values)) + 4:.1f}" y="{y + 11}">{number(middle)}</text>'


def _colour(name: str) -> str:
    if name.startswith("replaybuf"):
        return COLOURS["replaybuf"]
    return COLOURS["floor" if name in _FLOORS else "peer"]
