"""The time from a commit until another process on the same machine, which waits for it, goes on."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer
from benchmarks.table import Row, Settings, milliseconds, percentile, quantiles
from replaybuf import ReplayBuffer

#: Seconds of the median and of the 99th percentile.
AIMS = 0.005, 0.015
LIMITS = {"capacity": 1, "on_full": "block"}


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database: a take that waits for a put, and a put that waits for room."""
    for kind in settings.databases:
        yield await _wakes(settings, kind, "take_batch waits for a put", _take, _put)
        yield await _wakes(settings, kind, "put waits for a take", _put, _take)


async def _take(buffer: ReplayBuffer) -> None:
    await buffer.take_batch({TASK: 1}, timeout=60)


async def _put(buffer: ReplayBuffer) -> None:
    await buffer.put(groups.small(), TASK)


Work = Callable[[ReplayBuffer], Awaitable[None]]


async def _wakes(settings: Settings, kind: str, name: str, wait: Work, act: Work) -> Row:
    rounds = settings.size(200, 10)
    context = multiprocessing.get_context("spawn")
    begin, woken = context.Queue(), context.Queue()
    async with new_database(kind) as url, open_buffer(url, **LIMITS) as buffer:
        if act is _take:
            await _put(buffer)  # full from the beginning
        waiter = context.Process(target=_wait, args=(url, wait, rounds, begin, woken))
        waiter.start()
        taken = []
        for _ in range(rounds):
            await asyncio.to_thread(begin.get, timeout=60)
            await asyncio.sleep(0.1)  # by now it waits
            await act(buffer)
            committed = time.time()
            taken.append(max(0.0, await asyncio.to_thread(woken.get, timeout=60) - committed))
        await asyncio.to_thread(waiter.join)
    return Row(
        "waking",
        f"{kind}: {name}, in another process",
        f"{quantiles(taken)} ({milliseconds(min(taken))}..{milliseconds(max(taken))})",
        aim="p50 <= 5 ms, p99 <= 15 ms",
        met=all(percentile(taken, at) <= aim for at, aim in zip((50, 99), AIMS, strict=True)),
    )


def _wait(url: str, wait: Work, rounds: int, begin: Any, woken: Any) -> None:
    async def main() -> None:
        async with open_buffer(url, **LIMITS) as buffer:
            for _ in range(rounds):
                begin.put(None)
                await wait(buffer)
                woken.put(time.time())

    asyncio.run(main())
