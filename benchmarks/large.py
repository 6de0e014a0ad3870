"""What very many groups cost a put: with 1,500,000 buffered beside 100,000, and while a checkpoint of them is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer, put_all, stop_sweeping
from benchmarks.million import fill_many
from benchmarks.table import Row, Settings, in_turn, milliseconds, number
from replaybuf import ReplayBuffer

PUTS = 4096
LONGEST = 0.050


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield two rows for each database."""
    few, many = settings.size(100_000, 10_000), settings.size(1_500_000, 150_000)
    for kind in settings.databases:
        async with new_database(kind) as small, new_database(kind) as large:
            await fill_many(small, few)
            await fill_many(large, many)
            async with open_buffer(small) as base, open_buffer(large) as buffer:
                yield await _puts(settings, kind, buffer, base, many, few)
                yield await _checkpoint(settings, kind, buffer, many)


async def _puts(settings: Settings, kind: str, buffer: ReplayBuffer, base: ReplayBuffer, many: int, few: int) -> Row:
    for each in (buffer, base):
        await stop_sweeping(each)
    fresh = [[groups.small() for _ in range(PUTS)] for _ in range(2 * (settings.rounds + 1))]
    pairs = await in_turn(lambda: put_all(buffer, fresh.pop()), lambda: put_all(base, fresh.pop()), settings.rounds)
    middle, shown = pairs.ratio(faster=False)
    mine, theirs = pairs.median
    return Row(
        "large",
        f"{kind}: 1 KB groups put by 256 coroutines into {many:,}",
        f"{number(PUTS / mine)}/s",
        f"into {few:,}: {number(PUTS / theirs)}/s",
        shown,
        "<= 1.1",
        middle <= 1.1,
    )


async def _checkpoint(settings: Settings, kind: str, buffer: ReplayBuffer, many: int) -> Row:
    """Measure the longest put, alone and one after another, from before a checkpoint until after it."""
    quiet = max(await _latencies(buffer, asyncio.sleep(1.0)))
    took, longest = [], []
    for step in range(1, min(3, settings.rounds) + 1):
        start = time.perf_counter()
        longest.append(max(await _latencies(buffer, buffer.checkpoint(step))))
        took.append(time.perf_counter() - start)
    return Row(
        "large",
        f"{kind}: longest put while a checkpoint of {many:,} groups is made ({milliseconds(max(took))})",
        f"{milliseconds(max(longest))}",
        f"longest in a second without one: {milliseconds(quiet)}",
        aim=f"<= {milliseconds(LONGEST)}",
        met=max(longest) <= LONGEST,
    )


async def _latencies(buffer: ReplayBuffer, meanwhile: Awaitable[object]) -> list[float]:
    """Return the seconds of the puts, one at a time, that fall into `meanwhile`."""
    running = asyncio.ensure_future(meanwhile)
    taken = []
    while not running.done():
        group, start = groups.small(), time.perf_counter()
        await buffer.put(group, TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)
        taken.append(time.perf_counter() - start)
    await running
    return taken
