"""A process that puts and one that takes, at the same time, beside two of the tuned `sqlite3` floor."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer, put_all, sqlite_path
from benchmarks.floor import TunedSqliteFloor
from benchmarks.table import Row, Settings, number

BATCH = 64
#: Of the tuned floor's rate.
AIM = 0.8

Worker = Callable[[str, int, Any, Any], None]


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each database."""
    count = settings.size(4096, 512)
    for kind in settings.databases:
        rates: dict[str, list[float]] = {"ours": [], "floor": []}
        for turn in range(3):
            works = [("ours", kind, _produce, _consume), ("floor", "sqlite", _produce_bare, _consume_bare)]
            for name, where, *pair in works if turn % 2 else reversed(works):
                async with new_database(where) as url:
                    if name == "floor":  # two processes that switch a new file to WAL at once don't wait for each other
                        TunedSqliteFloor(sqlite_path(url)).close()
                    rates[name].append(await asyncio.to_thread(_together, url, count, *pair))
        ratios = sorted(ours / bare for ours, bare in zip(rates["ours"], rates["floor"], strict=True))
        yield Row(
            "processes",
            f"{kind}: a process puts {count:,} groups of 100 KB, another takes them {BATCH} at a time",
            f"{number(statistics.median(rates['ours']))}/s",
            f"sqlite3 tuned, not decoded: {number(statistics.median(rates['floor']))}/s",
            f"{number(statistics.median(ratios))} ({number(ratios[0])}..{number(ratios[-1])})",
            f">= {AIM}" if kind == "sqlite" else "",
            statistics.median(ratios) >= AIM if kind == "sqlite" else None,
        )


def _together(url: str, count: int, produce: Worker, consume: Worker) -> float:
    """Return the groups per second, from the moment when both are ready until the last group was taken."""
    context = multiprocessing.get_context("spawn")
    barrier, done = context.Barrier(3), context.Queue()
    pair = [context.Process(target=work, args=(url, count, barrier, done)) for work in (produce, consume)]
    for process in pair:
        process.start()
    barrier.wait(120)
    start = time.perf_counter()
    done.get(timeout=600)
    elapsed = time.perf_counter() - start
    for process in pair:
        process.join()
    return count / elapsed


def _produce(url: str, count: int, barrier: Any, _: Any) -> None:
    async def main() -> None:
        async with open_buffer(url) as buffer:
            made = [groups.arrays() for _ in range(count)]
            barrier.wait(120)
            await put_all(buffer, made)

    asyncio.run(main())


def _consume(url: str, count: int, barrier: Any, done: Any) -> None:
    async def main() -> None:
        async with open_buffer(url) as buffer:
            barrier.wait(120)
            for _ in range(0, count, BATCH):
                await buffer.take_batch({TASK: BATCH}, timeout=60)
            done.put(None)

    asyncio.run(main())


def _produce_bare(url: str, count: int, barrier: Any, _: Any) -> None:
    floor = TunedSqliteFloor(sqlite_path(url))
    payloads = [groups.payload(groups.arrays()) for _ in range(count)]
    barrier.wait(120)
    floor.put(payloads)
    floor.close()


def _consume_bare(url: str, count: int, barrier: Any, done: Any) -> None:
    floor = TunedSqliteFloor(sqlite_path(url))
    barrier.wait(120)
    while count:
        count -= (taken := len(floor.take(BATCH)))
        if not taken:
            time.sleep(0.001)
    done.put(None)
    floor.close()
