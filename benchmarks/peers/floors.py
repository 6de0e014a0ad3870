"""The floors: bare drivers and a bare file, with the bytes that replaybuf would store. They decode nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from benchmarks import groups
from benchmarks.floor import PostgresFloor, SqliteFloor, TunedSqliteFloor, copy_log_back
from benchmarks.peers.adapter import Adapter, Group


class Floor(Adapter):
    """A peer that keeps bytes."""

    def prepare(self, group: Group) -> Any:
        return groups.payload(groups.rollouts(group))

    def tokens(self, group: Any) -> int:
        return 0


class Sqlite(Floor):
    """`sqlite3`, a transaction for each put. Another process looks every millisecond."""

    floor_class = SqliteFloor

    async def open(self) -> None:
        self._file = f"{self.place.folder}/floor.db"
        self._floor = self.floor_class(self._file)

    async def close(self) -> None:
        self._floor.close()

    async def put(self, prepared: Sequence[Any]) -> None:
        self._floor.put(prepared)

    async def take(self, count: int) -> Sequence[Any]:
        return self._floor.take(count)

    async def wait_for_one(self) -> None:
        while not self._floor.take(1):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def settle(self) -> None:
        copy_log_back(self._file)


class TunedSqlite(Sqlite):
    """The same with 64 puts a transaction and larger pages."""

    floor_class = TunedSqliteFloor


class Asyncpg(Floor):
    """asyncpg, 8 connections, a transaction for each put; LISTEN and NOTIFY wake another process."""

    async def open(self) -> None:
        self._floor = await PostgresFloor(self.place.url).__aenter__()
        self._heard = asyncio.Event()
        self._listening: Any = None

    async def close(self) -> None:
        await self._floor.__aexit__()

    async def put(self, prepared: Sequence[Any]) -> None:
        await self._floor.put(prepared)

    async def put_one(self, prepared: Any) -> None:
        await self._floor.put_one(prepared, notify=True)

    async def take(self, count: int) -> Sequence[Any]:
        return await self._floor.take(count)

    async def wait_for_one(self) -> None:
        if self._listening is None:
            self._listening = await self._floor.listen(self._heard.set)
        while True:
            self._heard.clear()
            if await self._floor.take(1):
                return
            await asyncio.wait_for(self._heard.wait(), 60)


class File(Floor):
    """A file that is appended to, with fdatasync after every 64 groups, and read from its beginning."""

    shared = False

    async def open(self) -> None:
        self._file = os.open(f"{self.place.folder}/groups", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._read = 0

    async def close(self) -> None:
        os.close(self._file)

    async def put(self, prepared: Sequence[Any]) -> None:
        for start in range(0, len(prepared), self.batch):
            for data in prepared[start : start + self.batch]:
                os.writev(self._file, (len(data).to_bytes(4, "little"), data))
            os.fdatasync(self._file)

    async def take(self, count: int) -> Sequence[Any]:
        payloads: list[bytes] = []
        while len(payloads) < count and (head := os.pread(self._file, 4, self._read)):
            length = int.from_bytes(head, "little")
            payloads.append(os.pread(self._file, length, self._read + 4))
            self._read += 4 + length
        return payloads
