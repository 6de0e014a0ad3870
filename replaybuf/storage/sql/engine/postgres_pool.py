"""Connections to PostgreSQL: asyncpg's pool, connection settings, and statements from synchronous functions.

Client and server notice within `SILENCE_SECONDS` that the other is silent (a cut network, a host without power), so
that the client doesn't wait forever for an answer, and the server holds no locks for a dead client.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
from pydantic_core import from_json
from sqlalchemy.engine import URL
from sqlalchemy.util import await_only, greenlet_spawn

from replaybuf.errors import ReplayBufError, UnreachableError
from replaybuf.passwords import PasswordFunction
from replaybuf.storage.sql.engine import postgres_dialect
from replaybuf.storage.sql.engine.hooks import after_commit, on_commit, on_statement
from replaybuf.storage.sql.engine.postgres_connect import Connection, Connector, connector
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES
from replaybuf.storage.sql.engine.postgres_servers import Servers
from replaybuf.storage.sql.engine.transaction import Row, Session
from replaybuf.storage.sql.engine.urls import hosts_of, url_at

T = TypeVar("T")

#: TCP timeout: how long the other side may fail to answer before the connection is closed.
SILENCE_SECONDS = 20
#: Idle-in-transaction timeout: a transaction with a silent client (a stopped process) is rolled back, to free its
#: locks. The longest pause of a working client is a snapshot's write of a batch to a slow disk.
_IDLE_SECONDS = 300
#: Connections per store at most, and seconds after which an idle one is closed.
MOST_CONNECTIONS = 16
KEPT_SECONDS = 60.0
#: How many are made as soon as they are asked for, and how long others are waited for before there is one more.
_QUICKLY_MADE, _PATIENCE_SECONDS = 4, 0.2
#: How long a graceful close may take before the connection is terminated.
_CLOSING_SECONDS = 2.0
#: Texts and byte strings up to this length are sent without a check of the row's size.
LARGE = 1 << 26


class Pool:
    """A pool of up to MOST_CONNECTIONS connections; the most recently used idle one is lent first."""

    def __init__(
        self, url: URL, *, lock_timeout: float, read_only: bool, password: PasswordFunction | None = None
    ) -> None:
        self._lock_timeout = lock_timeout
        options, makes = _connect_options(url, lock_timeout=lock_timeout, read_only=read_only, password=password)
        self.servers = Servers(url, makes.connect, writes=not read_only)
        self._options = {**options, "connect": self.servers.connect}
        self._pool: Any = None
        self._is_making = False
        self._freed = asyncio.Event()

    @property
    def size(self) -> int:
        """The number of open connections."""
        return 0 if self._pool is None else int(self._pool.get_size())

    @property
    def lent(self) -> int:
        """The number of connections in use."""
        return 0 if self._pool is None else int(self._pool.get_size() - self._pool.get_idle_size())

    async def take(self) -> asyncpg.Connection[Any]:
        """Return a connection outside any transaction, to be released or discarded. Raises UnreachableError."""
        if self._pool is None:  # asyncpg's pool is bound to the event loop that creates it
            self._pool = asyncpg.create_pool(**self._options)
            await self._pool
        self.servers.look_out()
        async with asyncio.timeout(self._lock_timeout) as limit:
            try:
                while self.servers.is_left((connection := await self._idle_or_new()).standing):
                    await self.discard(connection)
                return connection  # type: ignore[no-any-return]
            except asyncio.CancelledError as error:
                if self.size == MOST_CONNECTIONS and limit.expired():
                    raise UnreachableError(
                        f"all {MOST_CONNECTIONS} connections of this buffer were in use for more than "
                        f"{self._lock_timeout:g} s",
                        reason="pool busy",
                    ) from error
                raise

    async def _idle_or_new(self) -> Any:
        """Return an idle connection, or a new one; wait while all are in use.

        A new one costs the server more than many transactions. So one is made at a time, beyond the first few only for
        somebody who has waited, and all others may be served by those that are given back meanwhile.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self._pool.get_idle_size():
            left = 0.0 if self.size < _QUICKLY_MADE else until - time.monotonic()
            if left <= 0 and not self._is_making and self.size < MOST_CONNECTIONS:
                self._is_making = True
                try:
                    return await self._pool.acquire()
                finally:
                    self._is_making = False
                    self._freed.set()
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), left if left > 0 else None)
        return await self._pool.acquire()

    async def _release(self, connection: asyncpg.Connection[Any]) -> None:
        await self._pool.release(connection)
        self._freed.set()

    async def discard(self, connection: asyncpg.Connection[Any]) -> None:
        """Close an unusable connection, and return its slot to the pool."""
        await asyncio.shield(self._close(connection))

    async def _close(self, connection: asyncpg.Connection[Any]) -> None:
        if not is_closed(connection):
            try:
                await connection.close(timeout=_CLOSING_SECONDS)  # cancels a query still running there
            except Exception:
                if not is_closed(connection):
                    connection.terminate()
        await self._release(connection)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Lend a connection. It is closed after an error that leaves its state unknown."""
        connection = await self.take()
        try:
            yield connection
        except BaseException as error:
            known = isinstance(error, ReplayBufError) or isinstance(getattr(error, "sqlstate", None), str)
            await (self._give_back_idle(connection) if known else self.discard(connection))
            raise
        await self._give_back_idle(connection)

    async def _give_back_idle(self, connection: asyncpg.Connection[Any]) -> None:
        if is_closed(connection) or connection.is_in_transaction():
            await self.discard(connection)
        else:
            await self._release(connection)

    async def close(self) -> None:
        """Close all connections."""
        await self.servers.close()
        if self._pool is not None:
            try:
                await asyncio.wait_for(self._pool.close(), _CLOSING_SECONDS)
            except Exception:
                self._pool.terminate()


async def one_server(url: URL, *, lock_timeout: float) -> URL:
    """Return the URL of the server that a writer would use, out of the hosts of a URL."""
    if not hosts_of(url):
        return url
    pool = Pool(url, lock_timeout=lock_timeout, read_only=False)
    try:
        async with pool.lend():
            return url_at(url, pool.servers.last)
    finally:
        await pool.close()


def is_closed(connection: asyncpg.Connection[Any]) -> bool:
    """Return whether a connection was closed by either side, and so released to the pool already."""
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        return True


def _connect_options(
    url: URL, *, lock_timeout: float, read_only: bool, password: PasswordFunction | None
) -> tuple[dict[str, Any], Connector]:
    url, options, makes = connector(url, password=password, writes=not read_only)
    settings = {"application_name": options.pop("application_name", "replaybuf"), "jit": "off"}
    idle, interval, count = _keepalive()
    settings |= {
        "lock_timeout": str(max(1, int(lock_timeout * 1000))),
        "tcp_keepalives_idle": str(idle),
        "tcp_keepalives_interval": str(interval),
        "tcp_keepalives_count": str(count),
        "tcp_user_timeout": str(SILENCE_SECONDS * 1000),
        "idle_in_transaction_session_timeout": str(_IDLE_SECONDS * 1000),
    }
    # (Reads use the server's own synchronous_commit.)
    settings["default_transaction_read_only" if read_only else "synchronous_commit"] = "on"
    # Every BEGIN has the isolation level and READ ONLY: a database or role may have other defaults, and a connection
    # pooler such as PgBouncer may drop a connection's settings.
    options.pop("target_session_attrs", None)  # `Servers` chooses among several servers
    url = url.difference_update_query(["host", "port"]) if hosts_of(url) else url
    _, target = POSTGRES.compiler.create_connect_args(url)  # type: ignore[no-untyped-call]
    arguments = {
        **target,
        "command_timeout": 600,
        **options,
        "server_settings": settings,
        "connection_class": Connection,
        "min_size": 0,
        "max_size": MOST_CONNECTIONS,
        "max_inactive_connection_lifetime": KEPT_SECONDS,
        "max_queries": 1 << 62,
        "init": _watch,
        "reset": _leave_as_it_is,
    }
    return arguments, makes


def _keepalive() -> tuple[int, int, int]:
    """Return the TCP keepalive parameters: idle seconds, probe interval in seconds, and number of probes."""
    return max(1, SILENCE_SECONDS // 2), max(1, SILENCE_SECONDS // 4), 2


async def _leave_as_it_is(_: asyncpg.Connection[Any]) -> None:
    """Skip asyncpg's reset queries: every transaction is ended explicitly and leaves no session settings."""


async def _watch(connection: asyncpg.Connection[Any]) -> None:
    """Set up loss detection on a new connection."""
    if (protocol := getattr(connection, "_protocol", None)) is not None:
        # Otherwise an executemany blocked on flow control would stay blocked when the connection is lost.
        connection.add_termination_listener(lambda _: protocol.resume_writing())
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    for name, value in zip(names, (*_keepalive(), SILENCE_SECONDS * 1000), strict=True):
        if hasattr(socket, name):  # not every system has all options
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Statements


class PostgresSession(Session):
    """Runs statements on an asyncpg connection, which caches prepared ones; only in functions called by `run`.

    Errors are asyncpg's; raises OSError when the connection can't be used any more.
    """

    dialect = POSTGRES

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._raw = connection
        #: Whether any statement but queries was sent.
        self.has_written = False

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        self._check(sql, values)
        return await_only(_answered(self._raw, self._raw.fetch, sql, *values))

    def change(self, sql: str, values: Row = ()) -> int:
        self._check(sql, values)
        status: str = await_only(_answered(self._raw, self._raw.execute, sql, *values))
        return int(status.rpartition(" ")[2])

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        on_statement(sql, rows, many=True)
        self.has_written = True
        await_only(_answered(self._raw, self._raw.executemany, sql, rows))

    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        self._check(sql, values)
        prepared: Any = await_only(_answered(self._raw, self._raw.prepare, sql))
        rows: list[Row] = await_only(_answered(self._raw, prepared.fetch, *values))
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
        # groups, which are sent as rows of executemany, is checked before.)
        if any(isinstance(value, (bytes, str)) and len(value) > LARGE for value in values):
            postgres_dialect.ROW_LIMIT.check("what was to be stored", values)


async def run(function: Callable[[], T]) -> T:
    """Run a synchronous function that uses a PostgresSession, in a greenlet, so that its waits don't block the loop."""
    return await greenlet_spawn(function)


async def _answered(connection: asyncpg.Connection[Any], ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return await ask(*arguments)
    except Exception as error:
        if is_closed(connection) and not isinstance(error, OSError):
            raise ConnectionResetError(str(error)) from error
        raise


async def send(connection: asyncpg.Connection[Any], message: str) -> str:
    """Send one message; return the answer to its last statement. Raises OSError when the connection is lost."""
    try:
        return await connection.execute(message)
    except Exception as error:
        if isinstance(error, OSError) or isinstance(getattr(error, "sqlstate", None), str):
            raise
        raise ConnectionResetError(str(error)) from error  # it was closed while idle


async def commit(connection: asyncpg.Connection[Any], last: Sequence[str] = ()) -> None:
    """Send the last statements and COMMIT in one message."""
    on_commit()
    await send(connection, "".join(f"{statement};" for statement in (*last, "COMMIT")))
    after_commit()
