"""Large payloads: a lease of groups in a folder with a large field that isn't read, beside one that reads it; and the
longest gap of the caller's event loop while 64 groups of 100 KB are put or taken.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np

from benchmarks import groups
from benchmarks.databases import TASK, new_database, new_folder, open_buffer, put_all
from benchmarks.table import Row, Settings, cost, in_turn, number, spread
from replaybuf import RolloutState, Status
from replaybuf.storage.sql.tasks.handles import load_all


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield the rows of each database."""
    for kind in settings.databases:
        yield await _deferred(settings, kind)
        for fields, make in (("lists", groups.lists), ("arrays", groups.arrays)):
            yield await _gaps(settings, kind, fields, make)


#: The most milliseconds for which a take of lists may keep the event loop from running.
MOST_GAP = 20


async def _gaps(settings: Settings, kind: str, fields: str, make: Callable[[int], list[RolloutState]]) -> Row:
    """Return the longest gap of the event loop in a take of 64 groups of 100 KB, and in their puts."""
    get_gaps, put_gaps = [], []
    async with new_database(kind) as url, open_buffer(url) as buffer:
        for turn in range(settings.rounds + 1):
            new_groups = [make(100) for _ in range(64)]
            gaps = [await longest_gap(lambda new_groups=new_groups: put_all(buffer, new_groups))]  # type: ignore[misc]
            del new_groups
            gaps.append(await longest_gap(lambda: buffer.take_batch({TASK: 64}, timeout=60)))
            if turn:
                put_gaps.append(gaps[0])
                get_gaps.append(gaps[1])
    figure = statistics.median(get_gaps)
    return Row(
        "payloads",
        f"{kind}: longest gap of the event loop in a take of 64 x 100 KB of {fields}",
        spread(get_gaps),
        f"in puts {spread(put_gaps)}",
        aim=f"<= {MOST_GAP} ms",
        met=figure <= MOST_GAP / 1000,
    )


async def longest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """Return the longest time in seconds, beyond one millisecond, for which the event loop didn't run in a call."""
    gaps = [0.0]

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    beating = asyncio.create_task(beat())
    result = await work()
    await asyncio.sleep(0.02)
    beating.cancel()
    del result
    return max(gaps)


async def _deferred(settings: Settings, kind: str) -> Row:
    """Return a lease of groups with a field of 20 MB that isn't read, beside one that reads it."""
    count = settings.size(16, 4)
    heavy = np.random.default_rng(0).integers(0, 64, (10_000, 1000), dtype=np.int16)

    def make() -> list[RolloutState]:
        return [RolloutState(message=[], tokens=np.arange(4000), routed_experts=heavy, status=Status.COMPLETED)]

    async with (
        new_database(kind) as url,
        new_folder() as folder,
        open_buffer(url, payloads=str(folder)) as buffer,
    ):
        await put_all(buffer, [make() for _ in range(count)])

        async def lease(deferred: Sequence[str]) -> None:
            leased = await buffer.lease_batch({TASK: count}, timeout=60, deferred=deferred)
            await leased.give_back()

        pairs = await in_turn(lambda: lease(["routed_experts"]), lambda: lease([]), settings.rounds)
        leased = await buffer.lease_batch({TASK: count}, deferred=["routed_experts"])
        handles = [item.item[0].routed_experts for item in leased.items[TASK]]
        loaded = await cost(lambda: load_all(handles[:1]))
        await leased.acknowledge()
    deferred_seconds, theirs = pairs.median
    _, ratio_text = pairs.ratio(faster=True)
    return Row(
        "payloads",
        f"{kind} with a folder: {count} groups leased, a field of 20 MB deferred",
        f"{number(deferred_seconds * 1000)} ms, one loaded in {number(loaded.seconds * 1000)} ms",
        f"read with the groups {number(theirs * 1000)} ms",
        ratio_text,
    )
