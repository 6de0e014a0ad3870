"""Noticing what other processes commit to PostgreSQL, and telling them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.storage.sql.engine.port import Changes

_CHANNEL = "replaybuf"
# Nothing but the announcement depends on its commit, which needn't wait for the disk.
_ANNOUNCE = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{_CHANNEL}', '')"
# Every commit on the server changes its snapshot.
_SNAPSHOT = text("SELECT CAST(pg_current_snapshot() AS text)")
_LONGEST_SECONDS = 5.0


class Notifications(Changes):
    """NOTIFY as an immediate hint, and the server's snapshot as the guarantee.

    An announcement may be lost with its sender, and a LISTEN connection can die silently.
    """

    seconds = 0.5
    announces = True

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]], hint: Callable[[], object]) -> None:
        self._connect = connect
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
        snapshot: str = await self._ask(_SNAPSHOT)
        changed, self._snapshot = snapshot != self._snapshot, snapshot
        return changed

    async def announce(self) -> None:
        # Only a hint, and not repeated: if it is lost, the others notice at their next look.
        async with asyncio.timeout(_LONGEST_SECONDS):
            connection = await self._connect()
            try:
                raw: Any = (await connection.get_raw_connection()).driver_connection
                await raw.execute(_ANNOUNCE)  # those who wait have it sooner than by way of SQLAlchemy
            except BaseException:
                await connection.invalidate()
                raise
            finally:
                await connection.close()

    async def close(self) -> None:
        connection, self._connection, self._snapshot = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.invalidate()
                await connection.close()

    async def _ask(self, statement: TextClause) -> Any:
        """Return the answer to a statement that is a transaction of its own: one round trip."""
        async with asyncio.timeout(_LONGEST_SECONDS):
            connection = await self._connect()
            try:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                return (await connection.execute(statement)).scalar()
            finally:
                await connection.close()
