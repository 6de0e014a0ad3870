"""Connections to PostgreSQL: the pool of a store, and statements from synchronous functions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from pydantic_core import from_json
from sqlalchemy.util import await_only, greenlet_spawn

from replaybuf.errors import ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine import dialect
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.postgres_connect import Connection
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES, inlined
from replaybuf.storage.sql.engine.postgres_servers import Servers
from replaybuf.storage.sql.engine.transaction import Row, Session, after_commit, on_commit, on_statement

T = TypeVar("T")

#: Connections per store at most, and seconds after which an idle one is closed.
MOST_CONNECTIONS = 16
KEPT_SECONDS = 60.0
#: How many are made as soon as they are asked for, and how long others are waited for before there is one more.
_QUICKLY_MADE, _PATIENCE_SECONDS = 4, 0.2
#: How long a graceful close may take before the connection is terminated.
_CLOSING_SECONDS = 2.0


class Pool:
    """A pool of up to MOST_CONNECTIONS connections; the most recently used idle one is lent first."""

    def __init__(self, access: Access) -> None:
        self._lock_timeout = access.lock_timeout
        self.servers = Servers(access)
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []  # the most recently used one last
        self._is_making = False
        self._freed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """The number of open connections."""
        return len(self._open)

    @property
    def lent(self) -> int:
        """The number of connections in use."""
        return len(self._open) - len(self._idle)

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

        A new one costs the server more than many transactions. So one is made at a time, beyond the first few only for
        somebody who has waited, and all others may be served by those that are given back meanwhile.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self._idle:
            left = 0.0 if self.size < _QUICKLY_MADE else until - time.monotonic()
            if left <= 0 and not self._is_making and self.size < MOST_CONNECTIONS:
                self._is_making = True
                try:
                    connection = await self.servers.connect()
                    self._open.add(connection)
                    return connection
                finally:
                    self._is_making = False
                    self._freed.set()
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), left if left > 0 else None)
        return self._idle.pop()

    async def discard(self, connection: Connection) -> None:
        """Close an unusable connection, and free its place."""
        await asyncio.shield(self._close(connection))

    async def _close(self, connection: Connection) -> None:
        try:
            await connection.end(_CLOSING_SECONDS)
        finally:
            self._open.discard(connection)
            self._freed.set()

    @asynccontextmanager
    async def lend(self, bound: AbstractAsyncContextManager[object] | None = None) -> AsyncIterator[Connection]:
        """Lend a connection, taken within `bound`. It is closed after an error that leaves its state unknown."""
        async with bound or nullcontext():
            connection = await self.take()
        try:
            yield connection
        except BaseException as error:
            known = isinstance(error, ReplayBufError) or isinstance(getattr(error, "sqlstate", None), str)
            await (self._give_back(connection) if known else self.discard(connection))
            raise
        await self._give_back(connection)

    async def _give_back(self, connection: Connection) -> None:
        if connection.is_closed() or connection.is_in_transaction():
            await self.discard(connection)
            return
        connection.used_at = time.monotonic()
        self._idle.append(connection)
        self._freed.set()
        # Background work gives connections back all the time, so that no timer is needed.
        if self._idle[0].used_at < connection.used_at - KEPT_SECONDS:
            self._closing = asyncio.create_task(self._close(self._idle.pop(0)))

    async def close(self) -> None:
        """Close all connections."""
        self._idle.clear()
        await asyncio.gather(*map(self._close, [*self._open]))


# Statements


class PostgresSession(Session):
    """Runs statements on an asyncpg connection, which caches prepared ones; only in functions called by `run`.

    Errors are asyncpg's; raises OSError when the connection can't be used any more. `waiting` are statements to be sent
    with the next one; None where nobody sends them with COMMIT.
    """

    dialect = POSTGRES

    def __init__(self, connection: Connection, waiting: list[str] | None = None) -> None:
        self._raw = connection
        self.waiting = waiting
        #: Whether any statement but queries was sent.
        self.has_written = False

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        self._check(sql, values)
        return self._answer(self._raw.fetch, sql, *values)  # type: ignore[no-any-return]

    def change(self, sql: str, values: Row = ()) -> int:
        self._check(sql, values)
        status: str = self._answer(self._raw.execute, sql, *values)
        return int(status.rpartition(" ")[2])

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        on_statement(sql, rows, many=True)
        self.has_written = True
        self._answer(self._many, sql, rows)

    def send(self, sql: str, rows: Sequence[Row]) -> None:
        if self.waiting is None:
            self.run_many(sql, rows)
        else:
            self.has_written = True
            self.waiting += [inlined(sql, row) for row in rows]

    def _answer(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the server's answer, once those that wait are sent."""
        if self.waiting:
            message = _message(self.waiting)
            self.waiting.clear()
            await_only(_answered(self._raw, self._raw.execute, message))
        return await_only(_answered(self._raw, ask, *arguments))

    async def _many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run a statement for each row. (`executemany` alone may wait on after the connection was lost.)"""
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(_: object) -> None:
            if not lost.done():
                lost.set_result(None)

        self._raw.add_termination_listener(hear)
        sending = asyncio.ensure_future(self._raw.executemany(sql, rows))
        try:
            await asyncio.wait({sending, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ConnectionResetError("the connection was lost")
            await sending
        finally:
            sending.cancel()
            self._raw.remove_termination_listener(hear)

    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        self._check(sql, values)
        prepared: Any = self._answer(self._raw.prepare, sql)
        rows: list[Row] = self._answer(prepared.fetch, *values)
        columns = prepared.get_attributes()
        for at, column in enumerate(columns):
            if column.type.name in ("json", "jsonb"):
                rows = [(*row[:at], None if row[at] is None else from_json(row[at]), *row[at + 1 :]) for row in rows]
        return [column.name for column in columns], rows

    def _check(self, sql: str, values: Row) -> None:
        on_statement(sql, values)
        if not sql.startswith("SELECT"):
            self.has_written = True
        # Otherwise the server would close the connection, and retries would send the same again and again. (The size of
        # groups, which are sent as rows of executemany, is checked where they are encoded.)
        if any(isinstance(value, (bytes, str)) and 4 * len(value) > dialect.MOST_ROW_BYTES for value in values):
            dialect.check_row("what was to be stored", values)


async def run(function: Callable[[], T]) -> T:
    """Run a synchronous function that uses a PostgresSession, in a greenlet, so that its waits don't block the loop."""
    return await greenlet_spawn(function)


async def _answered(connection: Connection, ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return await ask(*arguments)
    except Exception as error:
        if connection.is_closed() and not isinstance(error, OSError):
            raise ConnectionResetError(str(error)) from error
        raise


async def send(connection: Connection, message: str) -> str:
    """Send one message; return the answer to its last statement. Raises OSError when the connection is lost."""
    try:
        return await connection.execute(message)
    except Exception as error:
        if isinstance(error, OSError) or isinstance(getattr(error, "sqlstate", None), str):
            raise
        raise ConnectionResetError(str(error)) from error  # it was closed while idle


async def commit(connection: Connection, waiting: Sequence[str] = ()) -> None:
    """Send the statements that wait and COMMIT in one message."""
    message = _message(waiting) if waiting else ""
    on_commit()
    await send(connection, f"{message}COMMIT;")
    after_commit()


def _message(statements: Iterable[str]) -> str:
    message = "".join(f"{statement};" for statement in statements)
    on_statement(message)
    return message
