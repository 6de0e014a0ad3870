"""Large databases: the memory that puts and takes need, and the time that a fresh process needs to open one.

Each figure is measured in its own child process, so that none inherits memory or caches of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from benchmarks.table import Row, Settings, number, spread

BATCH = 64
_MEGABYTE = 1 << 20


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database: memory while it is filled, opening it, memory while it is emptied."""
    from benchmarks.databases import new_database

    count = settings.size(50_000, 2_500)
    for kind in settings.databases:
        async with new_database(kind) as url:
            put, lasted = await asyncio.to_thread(_in_child, _put, url, count)
            yield _memory_row(kind, "put", count, put, lasted)
            opened = [await asyncio.to_thread(_in_child, _open, url) for _ in range(settings.rounds)]
            yield Row(
                "opening",
                f"{kind}: a fresh process opens {count / 1e4:g} GB and counts (import apart)",
                spread([took for _, took in opened]),
                f"import {number(statistics.median(took for took, _ in opened) * 1000)} ms",
                aim="<= 200 ms",
                met=statistics.median(took for _, took in opened) <= 0.2,
            )
            taken, lasted = await asyncio.to_thread(_in_child, _take, url)
            yield _memory_row(kind, "taken", count, taken, lasted)


def _memory_row(kind: str, what: str, count: int, resident: float, lasted: float) -> Row:
    return Row(
        "opening",
        f"{kind}: most resident memory while {count / 1e4:g} GB are {what}",
        f"{number(resident)} MB",
        f"({number(count / lasted)} groups/s{', made by the same process' if what == 'put' else ''})",
        aim="<= 400 MB",
        met=resident <= 400,
    )


def _in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def _open(url: str) -> tuple[float, float]:
    """Return the seconds to import, and to open and count."""
    start = time.perf_counter()
    # All that opening needs, which would import it otherwise.
    import asyncpg  # noqa: F401

    import replaybuf.storage.sql.backend  # noqa: F401
    from replaybuf import ReplayBufferConfig

    imported = time.perf_counter()

    async def count() -> float:
        begun = time.perf_counter()
        async with ReplayBufferConfig(url=url).build() as buffer:
            await buffer.count("math", "completed")
            return time.perf_counter() - begun

    return imported - start, asyncio.run(count())


def _put(url: str, count: int) -> tuple[float, float]:
    from benchmarks import groups
    from benchmarks.databases import fill, open_buffer

    async def work() -> None:
        async with open_buffer(url) as buffer:
            await fill(buffer, groups.arrays, count)

    return _watched(work)


def _take(url: str) -> tuple[float, float]:
    from benchmarks.databases import TASK, drain, open_buffer

    async def work() -> None:
        async with open_buffer(url) as buffer:
            await drain(buffer, lambda: buffer.get(BATCH, TASK))

    return _watched(work)


def _watched(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the peak resident memory in MB while a coroutine function runs, and its seconds."""
    with _largest_memory() as largest:
        start = time.perf_counter()
        asyncio.run(work())
        lasted = time.perf_counter() - start
    return max(largest), lasted


@contextlib.contextmanager
def _largest_memory() -> Any:
    import psutil

    process, stop = psutil.Process(), threading.Event()
    largest = [0.0]

    def watch() -> None:
        while not stop.wait(0.01):
            largest[0] = max(largest[0], process.memory_info().rss / _MEGABYTE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield largest
    finally:
        stop.set()
        watcher.join()
