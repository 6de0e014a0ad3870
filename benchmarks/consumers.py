"""Eight processes that take from one buffer, beside one."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, fill, new_database, open_buffer
from benchmarks.table import Row, Settings, number

BATCH = 64
PROCESSES = 8


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each database."""
    for kind in settings.databases:
        yield await _compare(settings, kind)


async def _compare(settings: Settings, kind: str) -> Row:
    count = settings.size(16_384, 4096)
    rates: dict[int, list[float]] = {1: [], PROCESSES: []}
    async with new_database(kind) as url:
        for _ in range(5):
            for processes in rates:
                async with open_buffer(url) as buffer:
                    await fill(buffer, groups.small, count)
                rates[processes].append(await asyncio.to_thread(_drain, url, processes, count))
    ratios = sorted(many / one for many, one in zip(rates[PROCESSES], rates[1], strict=True))
    cores = len(os.sched_getaffinity(0))
    aim = 3.0 if cores >= PROCESSES else 1.0
    return Row(
        "consumers",
        f"{kind}: {PROCESSES} processes take {count:,} groups of 1 KB in batches of {BATCH} ({cores} cores)",
        f"{number(statistics.median(rates[PROCESSES]))}/s",
        f"one process: {number(statistics.median(rates[1]))}/s",
        f"{number(ratios[len(ratios) // 2])} ({number(ratios[0])}..{number(ratios[-1])})",
        f">= {aim:g}" if kind == "postgresql" else "",
        ratios[len(ratios) // 2] >= aim if kind == "postgresql" else None,
    )


def _drain(url: str, processes: int, count: int) -> float:
    """Return the groups per second, from the moment when all processes are ready to the last group."""
    context = multiprocessing.get_context("spawn")
    barrier, taken = context.Barrier(processes + 1), context.Queue()
    workers = [context.Process(target=_take_all, args=(url, barrier, taken)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    barrier.wait(120)
    start = time.perf_counter()
    total = sum(taken.get(timeout=300) for _ in workers)
    elapsed = time.perf_counter() - start
    for worker in workers:
        worker.join()
    if total != count:
        raise RuntimeError(f"{total} groups were taken where {count} were")
    return count / elapsed


def _take_all(url: str, barrier: Any, taken: Any) -> None:
    async def main() -> None:
        async with open_buffer(url) as buffer:
            barrier.wait(120)
            total = 0
            while found := len(await buffer.get(BATCH, TASK)):
                total += found
            taken.put(total)

    asyncio.run(main())
