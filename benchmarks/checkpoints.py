"""Step checkpoints of 100,000 groups of 100 KB (10 GB): making, restoring, their effect on puts; and `kill -9`.

The yardstick is the way of frameworks: pickling the list of groups to a file and reading it back. It is measured with a
hundredth of them, because 10 GB of rollouts don't fit into the memory of small machines.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, fill, new_database, new_folder, open_buffer, put_all, until_swept
from benchmarks.million import multiply
from benchmarks.table import Row, Settings, in_turn, milliseconds, number, seconds, spread
from replaybuf import ReplayBuffer

SEED = 1_000
_PUTS = 16_384
_PAUSE_SECONDS = 0.003
_LONGEST_SECONDS = 0.05


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database."""
    count = settings.size(100_000, 5_000)
    saved, loaded = await _pickling()
    for kind in settings.databases:
        async with new_database(kind) as url:
            async with open_buffer(url, keep_checkpoints=None) as buffer:
                await fill(buffer, groups.arrays, SEED)
                await multiply(buffer, SEED, count)
                async for row in _checkpoints(settings, kind, buffer, count, saved, loaded):
                    yield row
            yield await _reopening(settings, kind, url, count)
        yield await _puts_beside(settings, kind, settings.size(100_000, 10_000))
        yield await _waits_beside(settings, kind, settings.size(1_500_000, 30_000))


async def _pickling() -> tuple[float, float]:
    """Return the seconds to pickle a thousand groups into a file, with fsync, and to load them."""
    arrays = [groups.arrays() for _ in range(SEED)]
    async with new_folder() as folder:
        file = folder / "buffer.pickle"

        def save() -> None:
            with open(file, "wb") as stream:
                pickle.dump(arrays, stream, protocol=pickle.HIGHEST_PROTOCOL)
                os.fsync(stream.fileno())

        return await seconds(save), await seconds(lambda: pickle.loads(file.read_bytes()))


async def _checkpoints(
    settings: Settings, kind: str, buffer: ReplayBuffer, count: int, saved: float, loaded: float
) -> AsyncIterator[Row]:
    size = f"{count:,} groups, {count / 1e4:g} GB"
    checkpoint_seconds = [await seconds(lambda step=step: buffer.checkpoint(step)) for step in range(settings.rounds)]
    times = count // SEED
    pickled = f"pickling {SEED:,} of them: {milliseconds(saved)}"
    yield _row(f"{kind}: checkpoint of {size}", checkpoint_seconds, pickled, saved, times, 1.0)
    pickled = f"loading {SEED:,} of them: {milliseconds(loaded)}"
    unchanged_seconds = [await seconds(lambda: buffer.restore(1)) for _ in range(settings.rounds)]
    yield _row(f"{kind}: restore, nothing changed: {size}", unchanged_seconds, pickled, loaded, times, 2.0)
    restore_seconds = []
    for _ in range(3):
        await buffer.delete({})
        restore_seconds.append(await seconds(lambda: buffer.restore(1)))
    yield _row(f"{kind}: restore, all had left: {size}", restore_seconds, pickled, loaded, times, 2.0)


def _row(measured: str, figures: list[float], yardstick: str, base: float, times: int, limit: float) -> Row:
    middle = sorted(figures)[len(figures) // 2]
    ratio = f"{number(middle / base)}, with {times} times as many groups"
    return Row("checkpoints", measured, spread(figures), yardstick, ratio, f"<= {limit:g} s", middle <= limit)


async def _puts_beside(settings: Settings, kind: str, count: int) -> Row:
    """Measure a checkpoint in the middle of puts that take some seconds; it replaces an older one."""
    puts = settings.size(_PUTS, _PUTS // 8)
    fresh: list[Any] = []
    checkpoint_seconds: list[float] = []
    async with new_database(kind) as url, open_buffer(url) as buffer:
        await fill(buffer, groups.small, SEED)
        await multiply(buffer, SEED, count)

        async def before() -> None:
            fresh[:] = [groups.small() for _ in range(puts)]
            await buffer.delete({"uid": {"$gt": count}})  # those of the turn before
            await until_swept(buffer)

        async def with_checkpoint() -> None:
            async def later() -> None:
                await asyncio.sleep(0.2)
                checkpoint_seconds.append(await seconds(lambda: buffer.checkpoint(1)))

            await asyncio.gather(later(), put_all(buffer, fresh))

        pairs = await in_turn(with_checkpoint, lambda: put_all(buffer, fresh), settings.rounds, before=before)
    middle, ratio_text = pairs.ratio(faster=False)
    median, base = pairs.median
    return Row(
        "checkpoints",
        f"{kind}: {puts:,} puts of 1 KB by 256 coroutines while a checkpoint of {count:,} groups is made "
        f"({milliseconds(statistics.median(checkpoint_seconds))})",
        f"{number(puts / median)}/s",
        f"without one: {number(puts / base)}/s",
        ratio_text,
        "<= 1.1",
        middle <= 1.1,
    )


async def _waits_beside(settings: Settings, kind: str, count: int) -> Row:
    """Measure puts, one every few milliseconds through connections of their own, while checkpoints are made."""
    async with new_database(kind) as url, open_buffer(url) as buffer, open_buffer(url) as other:
        await fill(buffer, groups.small, SEED)
        await multiply(buffer, SEED, count)
        beside: list[float] = []
        alone: list[float] = []
        making, over = asyncio.Event(), asyncio.Event()

        async def put() -> None:
            while not over.is_set():
                was_making = making.is_set()
                group, start = groups.small(), time.perf_counter()
                await other.put(group, TASK)
                (beside if was_making or making.is_set() else alone).append(time.perf_counter() - start)
                await asyncio.sleep(_PAUSE_SECONDS)

        putting = asyncio.create_task(put())
        durations = []
        for step in range(settings.rounds):
            await asyncio.sleep(1)
            making.set()
            durations.append(await seconds(lambda step=step: buffer.checkpoint(step)))
            making.clear()
        over.set()
        await putting
    longest = max(beside)
    return Row(
        "checkpoints",
        f"{kind}: the longest of {len(beside):,} lone puts of 1 KB, one every {milliseconds(_PAUSE_SECONDS)}, while a "
        f"checkpoint of {count:,} groups is made ({milliseconds(sorted(durations)[len(durations) // 2])})",
        f"{milliseconds(longest)} (p50 {milliseconds(statistics.median(beside))})",
        f"without one: {milliseconds(max(alone))} (p50 {milliseconds(statistics.median(alone))})",
        number(longest / max(alone)),
        f"<= {number(_LONGEST_SECONDS * 1000)} ms",
        longest <= _LONGEST_SECONDS,
    )


async def _reopening(settings: Settings, kind: str, url: str, count: int) -> Row:
    """Kill a process that puts and takes, and measure the time until another one has opened and taken a batch."""
    durations = []
    for _ in range(settings.rounds):
        command = [sys.executable, "-m", "benchmarks.checkpoints", url]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()  # it is in the middle of its work now
        await asyncio.sleep(1)
        process.kill()
        await process.communicate()
        start = time.perf_counter()
        async with open_buffer(url) as buffer:
            assert await buffer.get(1, TASK)
            durations.append(time.perf_counter() - start)
    middle = sorted(durations)[len(durations) // 2]
    measured = f"{kind}: open {count / 1e4:g} GB after kill -9 of a process that put and took, and take a group"
    return Row("checkpoints", measured, spread(durations), aim="<= 1 s", met=middle <= 1)


async def _work(url: str) -> None:
    async with open_buffer(url) as buffer:
        while True:
            await put_all(buffer, [groups.arrays() for _ in range(64)])
            await buffer.get(64, TASK)
            print("working", flush=True)


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
