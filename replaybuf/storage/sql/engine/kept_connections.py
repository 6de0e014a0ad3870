"""Connections that stay with an engine between its transactions, the last used first.

SQLAlchemy's pool takes longer to give out a connection, to set its isolation level and to take it back than a server
nearby takes for a statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


class KeptConnections:
    """Up to `most` idle connections of a pool."""

    def __init__(self, pool: AsyncEngine, most: int) -> None:
        self._pool = pool
        self._most = most
        self._idle: list[AsyncConnection] = []
        self._waiting = 0  # for a connection of the pool
        self._closed = False

    def __len__(self) -> int:
        return len(self._idle)

    @asynccontextmanager
    async def connection(self, level: IsolationLevel) -> AsyncIterator[AsyncConnection]:
        """Yield a connection outside any transaction, with this isolation level. Not kept after an exception."""
        connection = await self.take()
        kept = False
        try:
            if connection.sync_connection.get_execution_options().get("isolation_level") != level:  # type: ignore[union-attr]
                await connection.execution_options(isolation_level=level)
            yield connection
            if connection.in_transaction():  # as SQLAlchemy sees it: of statements that began none
                await connection.rollback()
            kept = len(self._idle) < self._most and not (self._waiting or self._closed or connection.invalidated)
        finally:
            if kept:
                self._idle.append(connection)
            else:
                await asyncio.shield(connection.close())

    async def take(self) -> AsyncConnection:
        """Return a connection that the caller closes."""
        while self._idle:
            connection = self._idle.pop()
            if not (await connection.get_raw_connection()).driver_connection.is_closed():  # type: ignore[union-attr]
                return connection
            await connection.close()
        self._waiting += 1
        try:
            return await self._pool.connect()
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Close them, and those in use at their end."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()
