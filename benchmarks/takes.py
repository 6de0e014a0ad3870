"""Batches of 64 groups of 100 KB, beside the bare drivers (arrays) and bare msgpack (lists)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack

from benchmarks import groups
from benchmarks.databases import (
    TASK,
    drain,
    fill,
    new_database,
    open_buffer,
    sqlite_path,
    stop_sweeping,
    until_swept,
)
from benchmarks.floor import PostgresFloor, SqliteFloor
from benchmarks.table import Row, Settings, in_turn, number
from replaybuf import ReplayBuffer
from replaybuf.storage.sql.tasks.sweeper import GRACE_SECONDS

BATCH = 64


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database: arrays, arrays with the sweep, lists."""
    for kind in settings.databases:
        async with new_database(kind) as ours, new_database(kind) as theirs:
            yield await _arrays(settings, kind, ours, theirs)
        async with new_database(kind) as ours, new_database(kind) as theirs:
            yield await _sustained(settings, kind, ours, theirs)
        async with new_database(kind) as ours:
            yield await _lists(settings, kind, ours)


async def _arrays(settings: Settings, kind: str, ours: str, theirs: str) -> Row:
    turns = settings.rounds * 2
    count = (turns + 2) * BATCH
    async with open_buffer(ours) as buffer:
        await fill(buffer, groups.arrays, count)
        await stop_sweeping(buffer)
        get = _getter(buffer)
        payloads = [groups.payload(groups.arrays()) for _ in range(count)]
        if kind == "sqlite":
            floor = SqliteFloor(sqlite_path(theirs))
            floor.put(payloads)
            pairs = await in_turn(get, lambda: floor.take(BATCH), turns)
            floor.close()
        else:
            async with PostgresFloor(theirs) as pool:
                await pool.put(payloads)
                take: Callable[[], Awaitable[Any]] = lambda: pool.take(BATCH)  # noqa: E731
                pairs = await in_turn(get, take, turns)
    middle, shown = pairs.ratio(faster=True)
    mine, bare = pairs.median
    return Row(
        "takes",
        f"{kind}: get(64) of 100 KB groups of arrays",
        f"{number(BATCH / mine)}/s",
        f"{'sqlite3' if kind == 'sqlite' else 'asyncpg'} {number(BATCH / bare)}/s, not decoded",
        shown,
        ">= 4" if kind == "sqlite" else "",
        middle >= 4 if kind == "sqlite" else None,
    )


async def _sustained(settings: Settings, kind: str, ours: str, theirs: str) -> Row:
    """Measure taking everything, batch after batch, until the sweep has removed the payloads."""
    count = settings.size(8192, 2048)
    async with open_buffer(ours) as buffer:
        await fill(buffer, groups.arrays, count)
        start = time.perf_counter()
        await drain(buffer, _getter(buffer))
        taken = time.perf_counter() - start
        await until_swept(buffer)
        # The sweep leaves payloads alone for a while, in case a take is undone; that time isn't work.
        swept = time.perf_counter() - start - GRACE_SECONDS
    bare = await _floor_drain(kind, theirs, count)
    return Row(
        "takes",
        f"{kind}: the same until all payloads are swept ({count:,} groups, less {GRACE_SECONDS:g} s of grace)",
        f"{number(count / swept)}/s (taken at {number(count / taken)}/s)",
        f"{'sqlite3' if kind == 'sqlite' else 'asyncpg'} {number(count / bare)}/s, not decoded",
        number(bare / swept),
    )


async def _floor_drain(kind: str, url: str, count: int) -> float:
    payloads = [groups.payload(groups.arrays()) for _ in range(512)]
    if kind == "sqlite":
        floor = SqliteFloor(sqlite_path(url))
        for _ in range(0, count, 512):
            floor.put(payloads)
        start = time.perf_counter()
        while floor.take(BATCH):
            pass
        taken = time.perf_counter() - start
        floor.close()
        return taken
    async with PostgresFloor(url) as pool:
        for _ in range(0, count, 512):
            await pool.put(payloads)
        start = time.perf_counter()
        while await pool.take(BATCH):
            pass
        return time.perf_counter() - start


async def _lists(settings: Settings, kind: str, url: str) -> Row:
    turns = settings.rounds * 2
    async with open_buffer(url) as buffer:
        await fill(buffer, groups.lists, (turns + 2) * BATCH)
        await stop_sweeping(buffer)
        packed = [msgpack.packb(rollout) for _ in range(BATCH) for rollout in groups.plain(groups.lists())]
        pairs = await in_turn(_getter(buffer), lambda: [msgpack.unpackb(one) for one in packed], turns)
    middle, shown = pairs.ratio(faster=False)
    mine, bare = pairs.median
    return Row(
        "takes",
        f"{kind}: get(64) of 100 KB groups of lists",
        f"{number(mine * 1000)} ms, {number(BATCH / mine)}/s",
        f"msgpack.unpackb {number(bare * 1000)} ms",
        shown,
        "<= 1.3" if kind == "sqlite" else "",
        middle <= 1.3 if kind == "sqlite" else None,
    )


def _getter(buffer: ReplayBuffer) -> Callable[[], Awaitable[Any]]:
    return lambda: buffer.get(BATCH, TASK)
