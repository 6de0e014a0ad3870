"""An hour of puts and takes: whether the last minute is as fast as the first, and what grows meanwhile.

`python -m benchmarks --only soak --minutes 60`, for each database. Bursts of 64 groups of 100 KB are put and taken, one
after the other, from a buffer that holds 2,048.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks import groups
from benchmarks.databases import TASK, engine_of, new_database, open_buffer, put_all, sqlite_path
from benchmarks.table import Row, Settings, number, percentile, seconds
from replaybuf import ReplayBuffer

BATCH = 64
#: Groups that stay in the buffer all the time.
BUFFERED = 2048
AIM = 1.1
_MEGABYTE = 1 << 20


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database: puts, takes, and sizes."""
    for kind in settings.databases:
        async with new_database(kind) as url, open_buffer(url) as buffer:
            await put_all(buffer, [groups.arrays() for _ in range(BUFFERED)])
            puts, takes, sizes = [], [], []
            for _ in range(max(2, round(settings.minutes))):
                sizes.append(await _sizes(buffer, url))
                minute = await _minute(buffer, min(60.0, settings.minutes * 30))
                puts.append(minute[0])
                takes.append(minute[1])
            sizes.append(await _sizes(buffer, url))
        for name, minutes in (("puts", puts), ("takes", takes)):
            first, last = percentile(minutes[0], 50), percentile(minutes[-1], 50)
            yield Row(
                "soak",
                f"{kind}: {BATCH} {name} of 100 KB after {settings.minutes:g} minutes (p50 of the last one)",
                f"{number(last * 1000)} ms",
                f"of the first: {number(first * 1000)} ms",
                f"{number(last / first)} (any minute: {_range([percentile(one, 50) / first for one in minutes])})",
                f"<= {AIM}",
                last / first <= AIM,
            )
        for name in sizes[0]:
            yield Row(
                "soak",
                f"{kind}: {name} after {settings.minutes:g} minutes",
                f"{number(sizes[-1][name])} MB ({_range([one[name] for one in sizes])})",
                f"after the first minute: {number(sizes[1][name])} MB",
                number(sizes[-1][name] / max(sizes[1][name], 1)),
            )


async def _minute(buffer: ReplayBuffer, length: float) -> tuple[list[float], list[float]]:
    """Put and take for `length` seconds. Return the seconds of each burst of puts and each take."""
    puts, takes = [], []
    end = time.monotonic() + length
    while time.monotonic() < end:
        made = [groups.arrays() for _ in range(BATCH)]
        puts.append(await seconds(lambda made=made: put_all(buffer, made)))  # type: ignore[misc]
        takes.append(await seconds(lambda: buffer.get(BATCH, TASK)))
    return puts, takes


async def _sizes(buffer: ReplayBuffer, url: str) -> dict[str, float]:
    """Return megabytes of the database, its log and this process's memory."""
    import psutil

    found = {"resident memory": psutil.Process().memory_info().rss}
    if url.startswith("sqlite"):
        path = sqlite_path(url)
        found |= {"the file": _file_size(path), "its log": _file_size(f"{path}-wal")}
    else:
        found["the database"] = await buffer.storage.thread.run(lambda: _database_size(engine_of(buffer)))
    return {name: size / _MEGABYTE for name, size in found.items()}


def _file_size(path: str) -> int:
    file = Path(path)
    return file.stat().st_size if file.exists() else 0


async def _database_size(engine: Any) -> int:
    async with engine.connect() as connection:
        size = await connection.execute(text("SELECT pg_database_size(current_database())"))
        return int(size.scalar_one())


def _range(values: Sequence[float]) -> str:
    return f"{number(min(values))}..{number(max(values))}"
