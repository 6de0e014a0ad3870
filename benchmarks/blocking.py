"""Whether the caller's event loop stays free: the longest time between two ticks of a coroutine that sleeps 1 ms."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, fill, new_database, open_buffer, put_all
from benchmarks.table import Row, Settings, spread

BATCH = 64
_LONGEST = 0.020


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database, for groups of 1 MB of lists and of arrays."""
    rounds = settings.size(5, 2)
    for kind in settings.databases:
        for name, make in (("arrays", groups.arrays), ("lists", groups.lists)):
            async with new_database(kind) as url, open_buffer(url) as buffer:
                idle, gets, puts = [], [], []
                for _ in range(rounds):
                    await fill(buffer, lambda make=make: make(1000), BATCH)  # type: ignore[misc]
                    gets.append(await _longest_gap(lambda: buffer.get(BATCH, TASK)))
                    fresh = [make(1000) for _ in range(BATCH)]
                    puts.append(await _longest_gap(lambda fresh=fresh: put_all(buffer, fresh)))  # type: ignore[misc]
                    await buffer.delete({})
                    idle.append(await _longest_gap(lambda: asyncio.to_thread(_busy)))
            for what, measured in ((f"get(64) of 1 MB groups of {name}", gets), (f"64 puts of those of {name}", puts)):
                yield Row(
                    "blocking",
                    f"{kind}: longest gap of the event loop in {what}",
                    spread(measured),
                    f"another thread busy in Python: {spread(idle)}",
                    aim="<= 20 ms",
                    met=max(measured) <= _LONGEST,
                )


async def _longest_gap(work: Callable[[], Awaitable[Any]]) -> float:
    gc.collect()
    longest, stop = 0.0, False

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not stop:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    kept = await work()  # kept until the end: freeing millions of tokens is the caller's own time
    await asyncio.sleep(0.01)
    stop = True
    await ticking
    del kept
    return longest


def _busy() -> None:
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        pass
