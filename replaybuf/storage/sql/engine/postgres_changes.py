"""Noticing what other processes commit to PostgreSQL, and telling them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.storage.sql.engine.kept_connections import KeptConnections
from replaybuf.storage.sql.engine.port import Changes

_CHANNEL = "replaybuf"
# Nothing but the announcement depends on its commit, which needn't wait for the disk.
_ANNOUNCE = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{_CHANNEL}', '')"
# Every commit on the server changes its snapshot.
_SNAPSHOT = "SELECT CAST(pg_current_snapshot() AS text)"
_LONGEST_SECONDS = 5.0


class Notifications(Changes):
    """NOTIFY as an immediate hint, and the server's snapshot as the guarantee.

    An announcement may be lost with its sender, and a LISTEN connection can die silently.
    """

    seconds = 0.5
    announces = True

    def __init__(
        self,
        connect: Callable[[], Awaitable[AsyncConnection]],
        kept: KeptConnections,
        hint: Callable[[], object],
    ) -> None:
        self._connect = connect
        self._kept = kept
        self._hint = hint
        self._connection: AsyncConnection | None = None
        self._listening: Any = None
        self._snapshot: str | None = None

    async def look(self) -> bool:
        if self._connection is not None and self._listening.is_closed():
            await self.close()
        if self._connection is None:
            self._connection = await self._connect()
            raw = await self._connection.get_raw_connection()
            self._listening = raw.driver_connection
            await self._listening.add_listener(_CHANNEL, lambda *_: self._hint())
        snapshot: str = await self._ask(lambda raw: raw.fetchval(_SNAPSHOT))
        changed, self._snapshot = snapshot != self._snapshot, snapshot
        return changed

    async def announce(self) -> None:
        # Only a hint, and not repeated: if it is lost, the others notice at their next look.
        await self._ask(lambda raw: raw.execute(_ANNOUNCE))

    async def close(self) -> None:
        connection, self._connection, self._snapshot = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.invalidate()
                await connection.close()

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the answer to what is a transaction of its own, and asked of the driver's connection."""
        async with asyncio.timeout(_LONGEST_SECONDS), self._kept.connection("AUTOCOMMIT") as connection:
            try:
                raw = await connection.get_raw_connection()
                return await ask(raw.driver_connection)
            except BaseException:
                await connection.invalidate()
                raise
