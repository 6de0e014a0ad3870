"""`python -m benchmarks guard`: fail on a clear regression, against the figures in guard.json.

Statements and round trips are exact. Function calls are those of Python and of C functions by the threads of this
process, for a group: a measure of what a put or a take does in Python that no machine's speed and no other work changes
by more than 1 or 2 %. They don't tell how much a function copies, so that of large groups the CPU is compared, too: the
time of this process for a group, divided by that of a yardstick which is measured in turn with it, msgpack and the same
bytes through `sqlite3`. Of each the smallest of several rounds counts, because other work on the machine only ever adds
to it. What is too high is measured again before it counts, and what is kept is the typical figure of several
measurements.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from benchmarks import groups
from benchmarks.counts import counting_calls, statements_and_round_trips
from benchmarks.databases import (
    TASK,
    new_database,
    new_folder,
    open_buffer,
    put_all,
    stop_sweeping,
)
from benchmarks.floor import TunedSqliteFloor
from benchmarks.table import Settings, Work, cost

KEPT = Path(__file__).with_name("guard.json")
#: How much more than kept is a failure, by the kind of figures; others are exact. README.md says how it was chosen.
TOLERANCES = {"calls": 1.05, "CPU": 2.0}
ROUNDS = {"calls": 3, "CPU": 9}
#: How often a figure that is too high is measured again, and how often one that will be kept is measured.
AGAIN = KEEPING = 3
BATCH = 64
#: The sizes of groups.
SIZES: dict[str, Callable[[], Any]] = {
    "1 KB": groups.small,
    "1 KB of arrays": partial(groups.arrays, 1),
    "100 KB": groups.arrays,
}
#: How many of them a round puts and takes, a multiple of the batch.
COUNT = 192
#: The sizes of which the CPU is compared.
LARGE = ("100 KB",)

Figures = dict[str, dict[str, float]]


async def main(settings: Settings, *, update: bool) -> int:
    """Measure, print, and compare with the kept figures, or replace them. Return 1 for a regression."""
    baseline: Figures = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    measured: Figures = {}
    for kind in settings.databases:
        statements, trips = await statements_and_round_trips(kind)
        measured[f"{kind}: statements"] = dict(statements)
        if kind == "postgresql":
            measured[f"{kind}: round trips"] = dict(trips)
        for cost_name, measure_one, sizes in (("calls", calls, SIZES), ("CPU", cpu, LARGE)):
            name = f"{kind}: {cost_name} on Python {sys.version_info.major}.{sys.version_info.minor}"
            measured[name] = {}
            for size in sizes:
                measure = partial(measure_one, kind, size)
                measured[name] |= await (typical(measure) if update else confirmed(measure, name, baseline))
    print("\n".join(_lines(measured, baseline)))
    if update:
        KEPT.write_text(json.dumps(baseline | measured, indent=2) + "\n")
        return 0
    worse_figures = regressions(measured, baseline)
    print("\n" + "\n".join(worse_figures or ["no regression"]))
    if worse_figures:
        print("Mend it; or if it is meant, python -m benchmarks guard --update, and say why in the commit.")
    return 1 if worse_figures else 0


def regressions(measured: Figures, baseline: Figures) -> list[str]:
    """Return a line for each figure that is clearly worse than the kept one, or of which none is kept.

    Calls and CPU are only compared on versions of Python of which figures are kept.
    """
    sentences = []
    for section, figures in measured.items():
        tolerance = next((tolerance for kind, tolerance in TOLERANCES.items() if kind in section), 1)
        if tolerance > 1 and section not in baseline:
            continue  # of a version of Python for which none are kept: others have other figures
        limit = f", at most {tolerance:g} times that" if tolerance > 1 else ""
        for name, figure in figures.items():
            before = baseline.get(section, {}).get(name)
            if before is None:
                sentences.append(f"NEW: {section}, {name}: {figure:g}; run python -m benchmarks guard --update")
            elif figure > before * tolerance:
                sentences.append(f"REGRESSION: {section}, {name}: {figure:g} where {before:g} is kept{limit}")
    return sentences


def _lines(measured: Figures, baseline: Figures) -> Iterator[str]:
    for section, figures in measured.items():
        for name, figure in figures.items():
            yield f"{section}, {name}: {figure:g}, kept {baseline.get(section, {}).get(name, 'nothing')}"


async def typical(measure: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """Return the medians of several measurements: what is kept must not be the luckiest."""
    several = [await measure() for _ in range(KEEPING)]
    return {name: statistics.median(costs[name] for costs in several) for name in several[0]}


async def confirmed(
    measure: Callable[[], Awaitable[dict[str, float]]], section: str, baseline: Figures
) -> dict[str, float]:
    """Return figures; where one is a regression they are measured again, and of each the smallest counts."""
    figures = await measure()
    for _ in range(AGAIN):
        if not regressions({section: figures}, baseline):
            break
        repeated = await measure()
        figures = {name: min(figure, repeated[name]) for name, figure in figures.items()}
    return figures


async def calls(kind: str, size: str) -> dict[str, float]:
    """Return the function calls of puts and takes of groups of this size, for a group."""
    counts: dict[str, list[int]] = {}
    with counting_calls() as count:
        async with new_database(kind) as url, open_buffer(url) as buffer:
            await stop_sweeping(buffer)
            for _ in range(ROUNDS["calls"]):
                fresh = [SIZES[size]() for _ in range(COUNT)]
                for name, work in (("puts", partial(put_all, buffer, fresh)), ("takes", partial(_take, buffer))):
                    before = count.value
                    await work()
                    counts.setdefault(name, []).append(count.value - before)
    return {f"{name} of {size}": round(min(numbers) / COUNT) for name, numbers in counts.items()}


async def cpu(kind: str, size: str) -> dict[str, float]:
    """Return the CPU of puts and takes of groups of this size, as multiples of the yardstick's."""
    make = SIZES[size]
    async with new_database(kind) as url, new_folder() as folder, open_buffer(url) as buffer:
        await stop_sweeping(buffer)
        yardstick = _Yardstick(str(folder / "floor.db"), [make() for _ in range(COUNT)])
        costs: dict[str, list[float]] = {}
        for _ in range(ROUNDS["CPU"]):
            fresh = [make() for _ in range(COUNT)]
            works: dict[str, Work] = {
                "floor puts": yardstick.put,
                "puts": partial(put_all, buffer, fresh),
                "floor takes": yardstick.take,
                "takes": partial(_take, buffer),
            }
            for name, work in works.items():
                costs.setdefault(name, []).append((await cost(work)).cpu)
    return {f"{name} of {size}": round(min(costs[name]) / min(costs[f"floor {name}"]), 2) for name in ("puts", "takes")}


async def _take(buffer: Any) -> None:
    for _ in range(0, COUNT, BATCH):
        await buffer.get(BATCH, TASK)


class _Yardstick:
    """Groups as plain values through msgpack, and as its bytes through the tuned floor."""

    def __init__(self, path: str, new_groups: list[Any]) -> None:
        self._floor = TunedSqliteFloor(path)
        self._plain = list(map(groups.plain, new_groups))

    def put(self) -> None:
        self._floor.put([msgpack.packb(group, default=lambda array: array.tobytes()) for group in self._plain])

    def take(self) -> None:
        while payloads := self._floor.take(BATCH):
            for data in payloads:
                msgpack.unpackb(data)
