"""Payloads apart: groups of arrays with a folder, in pairs with what that replaces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from benchmarks import groups
from benchmarks.databases import (
    TASK,
    drain,
    new_database,
    new_folder,
    open_buffer,
    put_all,
    until_swept,
)
from benchmarks.table import Pairs, Row, Settings, cost, in_turn, number
from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.storage.sql.tasks.handles import load_all

BATCH = 64
SIZES = {"100 KB": 100, "2 MB": 2000}
COUNTS = {"100 KB": 1024, "2 MB": 64}


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database with a folder, and for deferred fields."""
    for kind in settings.databases:
        for size in SIZES:
            async for row in _folder(settings, kind, size):
                yield row
        yield await _deferred(settings, kind)


@asynccontextmanager
async def _apart(kind: str, **options: Any) -> AsyncIterator[ReplayBuffer]:
    """Yield an open buffer whose large payloads are in a folder."""
    async with (
        new_database(kind) as url,
        new_folder() as folder,
        open_buffer(url, payloads=str(folder), **options) as one,
    ):
        yield one


async def _folder(settings: Settings, kind: str, size: str) -> AsyncIterator[Row]:
    """Yield puts and takes with a folder, beside the database alone."""
    count, kilobytes = settings.size(COUNTS[size], COUNTS[size] // 4), SIZES[size]

    def make() -> list[RolloutState]:
        return groups.arrays(kilobytes)

    async with _apart(kind) as apart, new_database(kind) as url, open_buffer(url) as whole:
        fresh = await _beside(settings, apart, whole, make, count)
        yield _row(kind, f"{size} put", count, fresh[0], "in the database", _AIMS_DATABASE, size)
        yield _row(
            kind, f"{size} taken, get({min(BATCH, count)})", count, fresh[1], "in the database", _AIMS_TAKE, size
        )


_AIMS_TAKE = {("sqlite", "100 KB"): 2.0, ("postgresql", "2 MB"): 2.0}
_AIMS_DATABASE = {("postgresql", "2 MB"): 1.3}


def _row(
    kind: str, what: str, count: int, pairs: Pairs, yardstick: str, aims: dict[tuple[str, str], float], size: str
) -> Row:
    middle, shown = pairs.ratio(faster=True)
    (mine, theirs), aim = pairs.median, aims.get((kind, size))
    return Row(
        "payloads",
        f"{kind} with a folder: {what}",
        f"{number(count / mine)}/s",
        f"{yardstick} {number(count / theirs)}/s",
        shown,
        "" if aim is None else f">= {aim}",
        None if aim is None else middle >= aim,
    )


async def _beside(
    settings: Settings, apart: ReplayBuffer, whole: ReplayBuffer, make: Callable[[], Any], count: int
) -> tuple[Pairs, Pairs]:
    """Measure puts and takes of the same groups, in both buffers in turn."""
    puts, takes = Pairs([], []), Pairs([], [])
    for turn in range(settings.rounds + 1):
        for buffer in (apart, whole) if turn % 2 else (whole, apart):
            fresh = [make() for _ in range(count)]
            put = await cost(lambda buffer=buffer, fresh=fresh: put_all(buffer, fresh))
            taken = await cost(lambda buffer=buffer: drain(buffer, lambda: buffer.get(BATCH, TASK)))
            await until_swept(buffer)
            if turn:
                for pairs, one in ((puts, put), (takes, taken)):
                    (pairs.ours if buffer is apart else pairs.theirs).append(one.seconds)
    return puts, takes


async def _deferred(settings: Settings, kind: str) -> Row:
    """Return a lease of groups with a field of 20 MB that isn't read, beside one that reads it."""
    count = settings.size(16, 4)
    heavy = np.random.default_rng(0).integers(0, 64, (10_000, 1000), dtype=np.int16)

    def make() -> list[RolloutState]:
        return [RolloutState(message=[], tokens=np.arange(4000), routed_experts=heavy, status=Status.COMPLETED)]

    async with _apart(kind) as buffer:
        await put_all(buffer, [make() for _ in range(count)])

        async def lease(deferred: Sequence[str]) -> None:
            leased = await buffer.lease_batch({TASK: count}, timeout=60, deferred=deferred)
            await leased.give_back()

        pairs = await in_turn(lambda: lease(["routed_experts"]), lambda: lease([]), settings.rounds)
        leased = await buffer.lease_batch({TASK: count}, deferred=["routed_experts"])
        handles = [item.item[0].routed_experts for item in leased.items[TASK]]
        loaded = await cost(lambda: load_all(handles[:1]))
        await leased.acknowledge()
    mine, theirs = pairs.median
    _, shown = pairs.ratio(faster=True)
    return Row(
        "payloads",
        f"{kind} with a folder: {count} groups leased, a field of 20 MB deferred",
        f"{number(mine * 1000)} ms, one loaded in {number(loaded.seconds * 1000)} ms",
        f"read with the groups {number(theirs * 1000)} ms",
        shown,
    )
