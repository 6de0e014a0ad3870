"""The cost of a batch, a look and a refresh with 1,000,000 groups; of a batch beside 10,000, and beside fifo."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import AsyncIterator

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer
from benchmarks.million import fill_many, refresh
from benchmarks.table import Row, Settings, in_turn, milliseconds, seconds, spread
from replaybuf import ReplayBuffer

BATCH = 64
ORDERS = ("fifo", "lifo", "staleness")
RACES = ("prioritized",)


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database."""
    many, few = settings.size(1_000_000, 50_000), 10_000
    for kind in settings.databases:
        async with new_database(kind) as large, new_database(kind) as small:
            await fill_many(large, many)
            await fill_many(small, few)
            for policy in ORDERS:
                yield await _gets(settings, kind, policy, large, small, many, few)
            async with open_buffer(large) as buffer:
                yield await _looks(settings, kind, buffer, "is_ready", many, 0.005)
                yield await _looks(settings, kind, buffer, "count", many, 0.050)
                yield await _refreshes(settings, kind, buffer, many)
            # Random policies come last: once a race has begun, every group has a key in one more index.
            for policy in RACES:
                yield await _gets(settings, kind, policy, large, small, many, few)
            for policy in (*ORDERS[1:], *RACES):
                yield await _beside_fifo(settings, kind, policy, large, many)


async def _gets(settings: Settings, kind: str, policy: str, large: str, small: str, many: int, few: int) -> Row:
    async with open_buffer(large, policy) as big, open_buffer(small, policy) as little:
        pairs = await in_turn(
            lambda: big.get(BATCH, TASK), lambda: little.get(BATCH, TASK), settings.rounds * 3, warm_up=4
        )
    middle, ratio_text = pairs.ratio(faster=False)
    median, base = pairs.median
    return Row(
        "scale",
        f"{kind}, {policy}: get(64) with {many:,} small groups buffered",
        milliseconds(median),
        f"with {few:,}: {milliseconds(base)}",
        ratio_text,
        "<= 1.5",
        middle <= 1.5,
    )


async def _beside_fifo(settings: Settings, kind: str, policy: str, large: str, many: int) -> Row:
    async with open_buffer(large, policy) as measured_buffer, open_buffer(large, "fifo") as fifo:
        pairs = await in_turn(
            lambda: measured_buffer.get(BATCH, TASK), lambda: fifo.get(BATCH, TASK), settings.rounds * 3, warm_up=4
        )
    middle, ratio_text = pairs.ratio(faster=False)
    median, base = pairs.median
    return Row(
        "scale",
        f"{kind}, {policy}: get(64) with {many:,} small groups buffered, beside fifo",
        milliseconds(median),
        f"fifo: {milliseconds(base)}",
        ratio_text,
        "<= 2",
        middle <= 2,
    )


async def _looks(settings: Settings, kind: str, buffer: ReplayBuffer, name: str, many: int, aim: float) -> Row:
    async def look() -> None:
        if name == "count":
            await buffer.count(TASK, "completed")
        else:
            await buffer.is_ready({TASK: BATCH})

    measured = [await seconds(look) for _ in range(settings.rounds * 3)][2:]
    return Row(
        "scale",
        f"{kind}: {name} with {many:,} groups buffered",
        spread(measured),
        aim=f"<= {aim * 1000:g} ms",
        met=statistics.median(measured) <= aim,
    )


async def _refreshes(settings: Settings, kind: str, buffer: ReplayBuffer, many: int) -> Row:
    """Measure refreshes to the next train step, which each expire one group in a hundred, spread evenly."""
    steps = itertools.count(groups.TRAIN_STEP + 1)
    measured = [await seconds(lambda: refresh(buffer, next(steps))) for _ in range(settings.rounds)]
    return Row("scale", f"{kind}: refresh_staleness of {many:,} groups, of which 1 % expire", spread(measured))
