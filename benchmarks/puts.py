"""Durable puts from 256 coroutines, beside the bare drivers with one transaction per put."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from benchmarks import groups
from benchmarks.databases import new_database, open_buffer, put_all, sqlite_path
from benchmarks.floor import PostgresFloor, SqliteFloor
from benchmarks.table import Row, Settings, in_turn, number

AIMS = {("sqlite", "1 KB"): 0.9, ("sqlite", "100 KB"): 1.3, ("postgresql", "1 KB"): 0.9, ("postgresql", "100 KB"): 0.95}
SIZES: dict[str, Callable[[], Any]] = {"1 KB": groups.small, "100 KB": groups.arrays}
COUNTS = {
    ("sqlite", "1 KB"): 8192,
    ("sqlite", "100 KB"): 1024,
    ("postgresql", "1 KB"): 4096,
    ("postgresql", "100 KB"): 512,
}


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each database and size."""
    for kind in settings.databases:
        for size, make in SIZES.items():
            async with new_database(kind) as ours, new_database(kind) as theirs:
                count = COUNTS[kind, size]
                yield await _compare(settings, kind, size, make, settings.size(count, count // 4), ours, theirs)


async def _compare(
    settings: Settings, kind: str, size: str, make: Callable[[], Any], count: int, ours: str, theirs: str
) -> Row:
    async with open_buffer(ours) as buffer:
        payloads = [groups.payload(make()) for _ in range(count)]
        # Every round puts rollouts that were never put before; they are built before the clock starts.
        fresh = [[make() for _ in range(count)] for _ in range(settings.rounds + 1)]

        async def put_ours() -> None:
            await put_all(buffer, fresh.pop())

        if kind == "sqlite":
            floor = SqliteFloor(sqlite_path(theirs))
            pairs = await in_turn(put_ours, lambda: floor.put(payloads), settings.rounds)
            floor.close()
        else:
            async with PostgresFloor(theirs) as pool:
                put_theirs: Callable[[], Awaitable[None]] = lambda: pool.put(payloads)  # noqa: E731
                pairs = await in_turn(put_ours, put_theirs, settings.rounds)
    middle, shown = pairs.ratio(faster=True)
    aim = AIMS[kind, size]
    (mine, bare), megabytes = pairs.median, sum(map(len, payloads)) / 1e6
    return Row(
        "puts",
        f"{kind}: {size} groups put by 256 coroutines",
        f"{number(count / mine)}/s, {number(megabytes / mine)} MB/s",
        f"{'sqlite3' if kind == 'sqlite' else 'asyncpg'} {number(count / bare)}/s, {number(megabytes / bare)} MB/s",
        shown,
        f">= {aim}",
        middle >= aim,
    )
