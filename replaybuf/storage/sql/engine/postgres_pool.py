"""The pool of a store's connections to PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from replaybuf.errors import ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.postgres_connect import Connection
from replaybuf.storage.sql.engine.postgres_servers import Servers

#: Connections per store at most, and seconds after which an idle one is closed.
MOST_CONNECTIONS = 16
KEPT_SECONDS = 60.0
#: Numbers of connections, and for how many seconds one of up to so many is waited for before one more is made.
_PATIENCE = ((0, 0.0), (3, 0.01), (MOST_CONNECTIONS, 0.2))
#: How long a graceful close may take before the connection is terminated.
_CLOSING_SECONDS = 2.0


class Pool:
    """A pool of up to MOST_CONNECTIONS connections; the most recently used idle one is lent first."""

    def __init__(self, access: Access) -> None:
        self._lock_timeout = access.lock_timeout
        self.servers = Servers(access)
        self._open_connections: set[Connection] = set()
        self._idle_connections: list[Connection] = []  # the most recently used one last
        self._is_making = False
        self._freed = asyncio.Event()
        self._closing_task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """The number of open connections."""
        return len(self._open_connections)

    async def take(self) -> Connection:
        """Return a connection outside any transaction, to be given back or discarded. Raises UnreachableError."""
        async with asyncio.timeout(self._lock_timeout) as limit:
            try:
                while (connection := await self._idle_or_new()).is_closed() or self.servers.is_superseded(
                    connection.server
                ):
                    await self.discard(connection)
                return connection
            except asyncio.CancelledError as error:
                if self.size == MOST_CONNECTIONS and limit.expired():
                    raise UnreachableError(
                        f"all {MOST_CONNECTIONS} connections of this buffer were in use for more than "
                        f"{self._lock_timeout:g} s",
                        reason="pool busy",
                    ) from error
                raise

    async def _idle_or_new(self) -> Connection:
        """Return an idle connection, or a new one; wait while all are in use.

        A new one costs the server more than many transactions. So one is made at a time, only for somebody who has
        waited, and all others may be served by those that are given back meanwhile.
        """
        begun = time.monotonic()
        while not self._idle_connections:
            patience = next(seconds for connections, seconds in _PATIENCE if self.size <= connections)
            remaining = begun + patience - time.monotonic()
            if remaining <= 0 and not self._is_making and self.size < MOST_CONNECTIONS:
                self._is_making = True
                try:
                    connection = await self.servers.connect()
                    self._open_connections.add(connection)
                    return connection
                finally:
                    self._is_making = False
                    self._freed.set()
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining if remaining > 0 else None):
                    await self._freed.wait()
        return self._idle_connections.pop()

    async def discard(self, connection: Connection) -> None:
        """Close an unusable connection, and free its place."""
        await asyncio.shield(self._close(connection))

    async def _close(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(Exception):  # then it was aborted
                await connection.close(timeout=_CLOSING_SECONDS)  # also in the middle of a query
        finally:
            self._open_connections.discard(connection)
            self._freed.set()

    @asynccontextmanager
    async def lend(self, bound: AbstractAsyncContextManager[object] | None = None) -> AsyncIterator[Connection]:
        """Lend a connection, taken within `bound`. It is closed after an error that leaves its state unknown."""
        async with bound or nullcontext():
            connection = await self.take()
        try:
            yield connection
        except BaseException as error:
            is_known = isinstance(error, ReplayBufError) or isinstance(getattr(error, "sqlstate", None), str)
            await (self._give_back(connection) if is_known else self.discard(connection))
            raise
        await self._give_back(connection)

    async def _give_back(self, connection: Connection) -> None:
        if connection.is_closed() or connection.is_in_transaction():
            await self.discard(connection)
            return
        connection.used_at = time.monotonic()
        self._idle_connections.append(connection)
        self._freed.set()
        # Background work gives connections back all the time, so that no timer is needed.
        if self._idle_connections[0].used_at < connection.used_at - KEPT_SECONDS:
            self._closing_task = asyncio.create_task(self._close(self._idle_connections.pop(0)))

    async def close(self) -> None:
        """Close all connections."""
        self._idle_connections.clear()
        await asyncio.gather(*map(self._close, [*self._open_connections]))
