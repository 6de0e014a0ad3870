"""Noticing what other processes commit to a SQLite file."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.storage.sql.engine.port import Changes


class NoOthers(Changes):
    """Changes of a database in memory, which nobody else can open."""

    seconds = 0.02

    async def look(self) -> bool:
        return False

    async def close(self) -> None:
        pass


class DataVersion(Changes):
    """The file's data version, which changes when another connection commits: SQLite has no notifications."""

    seconds = 0.02

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._connect = connect
        self._connection: AsyncConnection | None = None
        self._version: int | None = None

    async def look(self) -> bool:
        if self._connection is None:
            self._connection = await self._connect()
        version = await self._connection.run_sync(_data_version)
        changed, self._version = version != self._version, version
        return changed

    async def close(self) -> None:
        connection, self._connection, self._version = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.invalidate()
                await connection.close()


def _data_version(connection: Any) -> int:
    cursor = connection.connection.cursor()
    try:
        cursor.execute("PRAGMA data_version")
        return int(cursor.fetchone()[0])
    finally:
        cursor.close()
