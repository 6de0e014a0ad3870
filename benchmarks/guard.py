"""`python -m benchmarks guard`: fail on a clear regression, against the figures in guard.json.

Statements and round trips are exact. CPU is the time of this process for a group, divided by that of a yardstick which
is measured in turn with it: msgpack and the same bytes through `sqlite3`. Of each the smallest of several rounds
counts, because other work on the machine only ever adds to it; so machines of another speed, and busy ones, agree.
What is too high is measured again before it counts, and what is kept is the typical figure of several measurements.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from benchmarks import groups
from benchmarks.counts import statements_and_round_trips
from benchmarks.databases import TASK, new_database, new_folder, open_buffer, put_all, stop_sweeping
from benchmarks.floor import TunedSqliteFloor
from benchmarks.table import Settings, Work, cost

KEPT = Path(__file__).with_name("guard.json")
#: How much more CPU than kept is a failure. README.md says how it was chosen.
TOLERANCE = 1.3
ROUNDS = 9
#: How often a figure that is too high is measured again, and how often one that will be kept is measured.
AGAIN = KEEPING = 3
BATCH = 64
#: The sizes of groups, and how many of them a round puts and takes: a multiple of the batch, tens of milliseconds.
SIZES: dict[str, tuple[Callable[[], Any], int]] = {
    "1 KB": (groups.small, 1024),
    "1 KB of arrays": (partial(groups.arrays, 1), 512),
    "100 KB": (groups.arrays, 192),
}

Figures = dict[str, dict[str, float]]


async def main(settings: Settings, *, update: bool) -> int:
    """Measure, print, and compare with the kept figures, or replace them. Return 1 for a regression."""
    kept: Figures = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    measured: Figures = {}
    for kind in settings.databases:
        statements, trips = await statements_and_round_trips(kind)
        measured[f"{kind}: statements"] = dict(statements)
        if kind == "postgresql":
            measured[f"{kind}: round trips"] = dict(trips)
        name = f"{kind}: CPU on Python {sys.version_info.major}.{sys.version_info.minor}"
        measured[name] = {}
        for size in SIZES:
            measure = partial(cpu, kind, size)
            measured[name] |= await (typical(measure) if update else confirmed(measure, name, kept))
    print("\n".join(_lines(measured, kept)))
    if update:
        KEPT.write_text(json.dumps(kept | measured, indent=2) + "\n")
        return 0
    worse = regressions(measured, kept)
    print("\n" + "\n".join(worse or ["no regression"]))
    if worse:
        print("Mend it; or if it is meant, python -m benchmarks guard --update, and say why in the commit.")
    return 1 if worse else 0


def regressions(measured: Figures, kept: Figures) -> list[str]:
    """Return a line for each figure that is clearly worse than the kept one, or of which none is kept.

    CPU is only compared on versions of Python of which figures are kept.
    """
    found = []
    for section, figures in measured.items():
        if "CPU" in section and section not in kept:
            continue  # of a version of Python for which none are kept: others have other figures
        most, limit = (TOLERANCE, f", at most {TOLERANCE:g} times that") if "CPU" in section else (1, "")
        for name, figure in figures.items():
            before = kept.get(section, {}).get(name)
            if before is None:
                found.append(f"NEW: {section}, {name}: {figure:g}; run python -m benchmarks guard --update")
            elif figure > before * most:
                found.append(f"REGRESSION: {section}, {name}: {figure:g} where {before:g} is kept{limit}")
    return found


def _lines(measured: Figures, kept: Figures) -> Iterator[str]:
    for section, figures in measured.items():
        for name, figure in figures.items():
            yield f"{section}, {name}: {figure:g}, kept {kept.get(section, {}).get(name, 'nothing')}"


async def typical(measure: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """Return the medians of several measurements: what is kept must not be the luckiest."""
    several = [await measure() for _ in range(KEEPING)]
    return {what: statistics.median(one[what] for one in several) for what in several[0]}


async def confirmed(
    measure: Callable[[], Awaitable[dict[str, float]]], section: str, kept: Figures
) -> dict[str, float]:
    """Return figures; where one is a regression they are measured again, and of each the smallest counts."""
    figures = await measure()
    for _ in range(AGAIN):
        if not regressions({section: figures}, kept):
            break
        again = await measure()
        figures = {what: min(figure, again[what]) for what, figure in figures.items()}
    return figures


async def cpu(kind: str, size: str) -> dict[str, float]:
    """Return the CPU of puts and takes of groups of this size, as multiples of the yardstick's."""
    make, count = SIZES[size]
    async with new_database(kind) as url, new_folder() as folder, open_buffer(url) as buffer:
        await stop_sweeping(buffer)
        yardstick = _Yardstick(str(folder / "floor.db"), [make() for _ in range(count)])
        costs: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            fresh = [make() for _ in range(count)]
            works: dict[str, Work] = {
                "floor puts": yardstick.put,
                "puts": partial(put_all, buffer, fresh),
                "floor takes": yardstick.take,
                "takes": partial(_take, buffer, count),
            }
            for name, work in works.items():
                costs.setdefault(name, []).append((await cost(work)).cpu)
    return {f"{name} of {size}": round(min(costs[name]) / min(costs[f"floor {name}"]), 2) for name in ("puts", "takes")}


async def _take(buffer: Any, count: int) -> None:
    for _ in range(0, count, BATCH):
        await buffer.get(BATCH, TASK)


class _Yardstick:
    """Groups as plain values through msgpack, and as its bytes through the tuned floor."""

    def __init__(self, path: str, made: list[Any]) -> None:
        self._floor = TunedSqliteFloor(path)
        self._plain = list(map(groups.plain, made))

    def put(self) -> None:
        self._floor.put([msgpack.packb(group, default=lambda array: array.tobytes()) for group in self._plain])

    def take(self) -> None:
        while taken := self._floor.take(BATCH):
            for data in taken:
                msgpack.unpackb(data)
