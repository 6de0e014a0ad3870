"""CPU for each group of puts and takes, of this process, beside the bare drivers: rates are noisy, CPU is less so.

SQLite's log is copied back at the end of each turn, for all, so that each pays for what it has written.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgpack

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer, put_all, sqlite_path, stop_sweeping
from benchmarks.floor import PostgresFloor, SqliteFloor, TunedSqliteFloor, copy_log_back
from benchmarks.table import Cost, Row, Settings, cost, number
from replaybuf import ReplayBuffer

BATCH = 64
#: The sizes of groups, and how many of them are put and taken in a turn.
SIZES: dict[str, tuple[Callable[[], Any], int]] = {
    "1 KB": (groups.small, 4096),
    "100 KB": (groups.arrays, 512),
    "2 MB": (lambda: groups.arrays(2000), 64),
    "100 KB of lists": (groups.lists, 256),
}
#: Microseconds of CPU a group, and the rate beside the yardstick that is named.
CPU_AIMS = {
    ("sqlite", "1 KB", "puts"): 50,
    ("sqlite", "1 KB", "takes"): 40,
    ("sqlite", "100 KB", "takes"): 220,
}
RATE_AIMS = {
    ("sqlite", "100 KB of lists", "puts", "msgpack and sqlite3"): 0.9,
    ("sqlite", "100 KB of lists", "takes", "msgpack and sqlite3"): 0.9,
    ("sqlite", "1 KB", "puts", "sqlite3"): 0.9,
    ("sqlite", "100 KB", "puts", "sqlite3"): 1.3,
    ("sqlite", "100 KB", "puts", "sqlite3 tuned"): 0.6,
    ("sqlite", "2 MB", "takes", "sqlite3"): 1.0,
    **{("postgresql", size, "puts", "asyncpg"): aim for size, aim in (("1 KB", 0.9), ("100 KB", 0.95), ("2 MB", 0.9))},
    **{("postgresql", size, "takes", "asyncpg"): aim for size, aim in (("1 KB", 0.4), ("100 KB", 0.7), ("2 MB", 0.8))},
}


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield rows for each database, size, direction and yardstick."""
    for kind in settings.databases:
        for size, (make, full) in SIZES.items():
            count = max(BATCH, settings.size(full, full // 8))
            costs = await _measure(settings, kind, make, count)
            for what, taken in costs.items():
                for row in _rows(kind, size, what, count, taken):
                    yield row


async def _measure(settings: Settings, kind: str, make: Callable[[], Any], count: int) -> dict[str, dict[str, Any]]:
    """Return the costs of each rival's turns, by direction: A B C, then C B A, and so on, after a warm-up."""
    costs: dict[str, dict[str, list[Cost]]] = {"puts": {}, "takes": {}}
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(new_database(kind))
        buffer = await stack.enter_async_context(open_buffer(url))
        await stop_sweeping(buffer)
        floors = await _floors(stack, kind, [make() for _ in range(count)], lists=make is groups.lists)
        rivals = [("replaybuf", _Ours(buffer, url, make, count)), *floors]
        for turn in range(settings.rounds + 1):
            for what, taken in costs.items():
                for name, rival in rivals if turn % 2 else rivals[::-1]:
                    if what == "puts":
                        rival.prepare()
                    found = await cost(getattr(rival, what))
                    taken.setdefault(name, []).extend([found] if turn else [])
    return costs


class _Ours:
    def __init__(self, buffer: ReplayBuffer, url: str, make: Callable[[], Any], count: int) -> None:
        self._buffer, self._make, self._count = buffer, make, count
        self._path = sqlite_path(url) if url.startswith("sqlite") else None
        self._fresh: list[Any] = []

    def prepare(self) -> None:
        """Build what is put next: rollouts that were never put before."""
        self._fresh = [self._make() for _ in range(self._count)]

    async def puts(self) -> None:
        await put_all(self._buffer, self._fresh)
        self._settle()

    async def takes(self) -> None:
        left = self._count
        while left:
            left -= len(await self._buffer.get(BATCH, TASK))
        self._settle()

    def _settle(self) -> None:
        if self._path:
            copy_log_back(self._path)


class _Sqlite:
    def __init__(self, floor: SqliteFloor, path: str, payloads: list[bytes]) -> None:
        self._floor, self._path, self._payloads = floor, path, payloads

    def prepare(self) -> None: ...

    def puts(self) -> None:
        self._floor.put(self._payloads)
        copy_log_back(self._path)

    def takes(self) -> None:
        while self._floor.take(BATCH):
            pass
        copy_log_back(self._path)


class _Packed(_Sqlite):
    """Groups as plain values, which are packed and unpacked, too."""

    def __init__(self, floor: SqliteFloor, path: str, plain: list[Any]) -> None:
        super().__init__(floor, path, [])
        self._plain = plain

    def puts(self) -> None:
        self._payloads = list(map(msgpack.packb, self._plain))
        super().puts()

    def takes(self) -> None:
        while taken := self._floor.take(BATCH):
            for data in taken:
                msgpack.unpackb(data)
        copy_log_back(self._path)


class _Postgres:
    def __init__(self, floor: PostgresFloor, payloads: list[bytes]) -> None:
        self._floor, self._payloads = floor, payloads

    def prepare(self) -> None: ...

    async def puts(self) -> None:
        await self._floor.put(self._payloads)

    async def takes(self) -> None:
        while await self._floor.take(BATCH):
            pass


async def _floors(stack: AsyncExitStack, kind: str, made: list[Any], *, lists: bool) -> list[tuple[str, Any]]:
    if kind == "postgresql":
        url = await stack.enter_async_context(new_database(kind))
        floor = await stack.enter_async_context(PostgresFloor(url))
        return [("asyncpg", _Postgres(floor, list(map(groups.payload, made))))]

    async def opened(floor_class: type[SqliteFloor], rival: type[_Sqlite], values: list[Any]) -> _Sqlite:
        path = sqlite_path(await stack.enter_async_context(new_database(kind)))
        floor = floor_class(path)
        stack.callback(floor.close)
        return rival(floor, path, values)

    if lists:
        return [("msgpack and sqlite3", await opened(SqliteFloor, _Packed, list(map(groups.plain, made))))]
    payloads = list(map(groups.payload, made))
    return [
        ("sqlite3", await opened(SqliteFloor, _Sqlite, payloads)),
        ("sqlite3 tuned", await opened(TunedSqliteFloor, _Sqlite, payloads)),
    ]


def _rows(kind: str, size: str, what: str, count: int, taken: dict[str, list[Cost]]) -> Iterator[Row]:
    mine = taken.pop("replaybuf")
    cpu = statistics.median(one.cpu for one in mine) / count * 1e6
    aim = CPU_AIMS.get((kind, size, what))
    yield Row(
        "costs",
        f"{kind}: CPU for each of {what} of {size}",
        f"{_cpu(mine, count)}",
        ", ".join(f"{name} {_cpu(theirs, count)}" for name, theirs in taken.items()),
        aim=f"<= {aim} us" if aim else "",
        met=cpu <= aim if aim else None,
    )
    for name, theirs in taken.items():
        ratios = sorted(bare.seconds / ours.seconds for ours, bare in zip(mine, theirs, strict=True))
        bytes_only = ", not decoded" if what == "takes" and "msgpack" not in name else ""
        least = RATE_AIMS.get((kind, size, what, name))
        yield Row(
            "costs",
            f"{kind}: {what} of {size} beside {name}{bytes_only}",
            f"{number(count / statistics.median(one.seconds for one in mine))}/s",
            f"{number(count / statistics.median(one.seconds for one in theirs))}/s",
            f"{number(statistics.median(ratios))} ({number(ratios[0])}..{number(ratios[-1])})",
            f">= {least}" if least else "",
            statistics.median(ratios) >= least if least else None,
        )


def _cpu(costs: list[Cost], count: int) -> str:
    each = [one.cpu / count * 1e6 for one in costs]
    return f"{number(statistics.median(each))} us ({number(min(each))}..{number(max(each))})"
