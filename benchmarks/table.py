"""Rows of figures, and their format."""

from __future__ import annotations

import asyncio
import gc
import inspect
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Work = Callable[[], object] | Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the command line."""

    quick: bool
    databases: tuple[str, ...]

    def size(self, full: int, quick: int) -> int:
        """Return `quick` in a quick run, otherwise `full`."""
        return quick if self.quick else full

    @property
    def rounds(self) -> int:
        """The number of times that a pair is measured."""
        return 3 if self.quick else 7


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its yardstick. `met` is None if nothing was promised."""

    name: str
    measured: str
    figure: str
    yardstick: str = ""
    ratio: str = ""
    aim: str = ""
    met: bool | None = None

    def cells(self) -> list[str]:
        """Return the row as text."""
        aim_met = "" if self.met is None else "yes" if self.met else "**no**"
        return [self.name, self.measured, self.figure, self.yardstick, self.ratio, self.aim, aim_met]


HEADINGS = ["name", "what was measured", "figure", "yardstick", "ratio (min..max)", "aim", "met"]


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds of two things that were measured in turn."""

    ours: list[float]
    theirs: list[float]

    @property
    def median(self) -> tuple[float, float]:
        """The median of each."""
        return statistics.median(self.ours), statistics.median(self.theirs)

    def ratio(self, *, faster: bool) -> tuple[float, str]:
        """Return the median ratio over the pairs, and a text with its range: how many times as fast, or as long."""
        pairs = zip(self.ours, self.theirs, strict=True)
        ratios = [theirs / ours if faster else ours / theirs for ours, theirs in pairs]
        middle = statistics.median(ratios)
        return middle, f"{number(middle)} ({number(min(ratios))}..{number(max(ratios))})"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by the clock, and CPU seconds of this process: user and system, all threads."""

    seconds: float
    cpu: float


async def cost(work: Work) -> Cost:
    """Return what a call of a function or coroutine function costs. Earlier garbage is collected first."""
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    if inspect.isawaitable(result):
        result = await result
    spent = Cost(time.perf_counter() - start, time.process_time() - cpu)
    del result
    return spent


async def seconds(work: Work) -> float:
    """Return the seconds that a call takes, as `cost` does."""
    return (await cost(work)).seconds


async def in_turn(
    ours: Work, theirs: Work, rounds: int, *, warm_up: int = 1, before: Callable[[], Awaitable[object]] | None = None
) -> Pairs:
    """Measure A B, then B A, and so on, so that a noisy machine affects both alike; `before` each, what isn't timed."""
    measured: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + warm_up):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            if before is not None:
                await before()
            duration = await seconds((ours, theirs)[side])
            if turn >= warm_up:
                measured[side].append(duration)
            await asyncio.sleep(0)
    return Pairs(*measured)


def number(value: float) -> str:
    """Format a number with three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def milliseconds(value: float) -> str:
    """Format seconds in ms."""
    return f"{number(value * 1000)} ms"


def spread(values: Sequence[float]) -> str:
    """Return the median time and its range."""
    ms = [value * 1000 for value in values]
    return f"{number(statistics.median(ms))} ms ({number(min(ms))}..{number(max(ms))})"


def percentile(values: Sequence[float], hundredths: int) -> float:
    """Return a percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[hundredths - 1]


def quantiles(values: Sequence[float]) -> str:
    """Return the median time and the 99th percentile."""
    return f"p50 {milliseconds(percentile(values, 50))}, p99 {milliseconds(percentile(values, 99))}"
