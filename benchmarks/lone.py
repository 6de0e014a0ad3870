"""One put at a time, with a pause before each: the latency that a producer sees, beside the bare drivers."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer, sqlite_path
from benchmarks.floor import PostgresFloor, SqliteFloor
from benchmarks.table import Row, Settings, number, quantiles

#: How many times as long as the bare driver's put.
AIMS = {"sqlite": 10.0}

PAUSE_SECONDS = 0.01

Put = Callable[[], Awaitable[None]]


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each database."""
    for kind in settings.databases:
        yield await _compare(settings, kind)


async def _compare(settings: Settings, kind: str) -> Row:
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(new_database(kind))
        theirs = await stack.enter_async_context(new_database(kind))
        buffer = await stack.enter_async_context(open_buffer(ours))
        data = groups.payload(groups.small())
        fresh = iter([groups.small() for _ in range(50 * (settings.rounds + 1))])

        async def put() -> None:
            group = next(fresh)
            await buffer.put(group, TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)

        if kind == "sqlite":
            floor = SqliteFloor(sqlite_path(theirs))
            stack.callback(floor.close)

            async def bare() -> None:
                floor.put([data])
        else:
            pool = await stack.enter_async_context(PostgresFloor(theirs))

            async def bare() -> None:
                await pool.put_one(data)

        taken: dict[Put, list[float]] = {put: [], bare: []}
        ratios = []
        for turn in range(settings.rounds + 1):
            pair = {one: await _latencies(one) for one in (list(taken) if turn % 2 else reversed(list(taken)))}
            if turn:  # the first one warms up
                ratios.append(statistics.median(pair[put]) / statistics.median(pair[bare]))
                for one, latencies in pair.items():
                    taken[one] += latencies
    middle, aim = statistics.median(ratios), AIMS.get(kind)
    return Row(
        "lone",
        f"{kind}: one put of 1 KB at a time",
        quantiles(taken[put]),
        f"{'sqlite3' if kind == 'sqlite' else 'asyncpg'} {quantiles(taken[bare])}",
        f"{number(middle)} ({number(min(ratios))}..{number(max(ratios))})",
        f"<= {aim:g}" if aim else "",
        middle <= aim if aim else None,
    )


async def _latencies(put: Put) -> list[float]:
    taken = []
    for _ in range(50):
        await asyncio.sleep(PAUSE_SECONDS)  # caches are cold, and what the last put left to the background is over
        start = time.perf_counter()
        await put()
        taken.append(time.perf_counter() - start)
    return taken
