"""The cost of rules: eviction beside puts without a capacity, a lease and its acknowledgement beside a take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, fill, new_database, open_buffer, put_all, stop_sweeping
from benchmarks.table import Row, Settings, in_turn, milliseconds, number

BATCH = 64
CAPACITY = 5_000


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database."""
    for kind in settings.databases:
        for remover in ("fifo", "staleness", "uniform"):
            yield await _evictions(settings, kind, remover)
        yield await _leases(settings, kind)


async def _evictions(settings: Settings, kind: str, remover: str) -> Row:
    """Measure puts that each evict a group: the buffer is full from the beginning."""
    count = settings.size(4096, 1024)
    async with (
        new_database(kind) as bounded_url,
        new_database(kind) as free_url,
        open_buffer(bounded_url, capacity=CAPACITY, remover=remover) as bounded,
        open_buffer(free_url) as free,
    ):
        for buffer in (bounded, free):
            await fill(buffer, groups.small, CAPACITY)
            await stop_sweeping(buffer)
        fresh = [[groups.small() for _ in range(count)] for _ in range(2 * (settings.rounds + 1))]
        pairs = await in_turn(
            lambda: put_all(bounded, fresh.pop()), lambda: put_all(free, fresh.pop()), settings.rounds
        )
    middle, shown = pairs.ratio(faster=False)
    mine, base = pairs.median
    return Row(
        "rules",
        f"{kind}: 1 KB groups put by 256 coroutines, each evicting one of {CAPACITY:,} ({remover})",
        f"{number(count / mine)}/s",
        f"without a capacity: {number(count / base)}/s",
        shown,
        "<= 1.3",
        middle <= 1.3,
    )


async def _leases(settings: Settings, kind: str) -> Row:
    turns = settings.rounds * 2
    async with new_database(kind) as url, open_buffer(url) as buffer:
        await fill(buffer, groups.arrays, (2 * turns + 4) * BATCH)
        await stop_sweeping(buffer)

        async def lease() -> None:
            async with buffer.lease_batch({TASK: BATCH}) as leased:
                assert leased.counts == {TASK: BATCH}

        get: Any = lambda: buffer.get(BATCH, TASK)  # noqa: E731
        pairs = await in_turn(lease, get, turns)
    middle, shown = pairs.ratio(faster=False)
    mine, base = pairs.median
    return Row(
        "rules",
        f"{kind}: lease of 64 groups of 100 KB and its acknowledgement",
        milliseconds(mine),
        f"get(64): {milliseconds(base)}",
        shown,
        "<= 2",
        middle <= 2,
    )
