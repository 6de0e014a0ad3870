"""Connections to SQLite, each with a thread, which is aiosqlite's.

aiosqlite gives every connection a thread and sends it one call at a time. A transaction of eight calls would switch
threads sixteen times, each time waiting for Python's interpreter lock when the training loop is busy. So a transaction
is sent as one call (`SqliteConnection`, the only place that knows aiosqlite's insides).
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
from sqlalchemy.engine import URL

from replaybuf.errors import LockedError
from replaybuf.storage.sql.engine.sqlite_files import PAGE_SIZE, OpenFiles, quote_path, refuse_others
from replaybuf.storage.sql.engine.sqlite_log import ALONE_PAGES
from replaybuf.storage.sql.engine.sqlite_session import SqliteSession
from replaybuf.storage.sql.engine.urls import is_memory, public_url

T = TypeVar("T")

#: Pages of a write-ahead log that are kept for the next one.
_LOG_PAGES = 4 * ALONE_PAGES
#: Of each connection, SQLite's cache of pages.
CACHE_KIB = 16 * 1024
#: How many connections are lent at the same time, and how many of them stay open.
_MOST_LENT, _MOST_IDLE = 8, 6
_ENDING_SECONDS = 1.0


class SqliteConnection(aiosqlite.Connection):
    """An aiosqlite connection that runs functions in its thread; `connect` makes the one of `sqlite3` there."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], files: OpenFiles | None = None) -> None:
        super().__init__(connect, iter_chunk_size=64)
        self.worker: threading.Thread = getattr(self, "_thread", self)  # type: ignore[arg-type]
        self.worker.daemon = True
        self._files = files
        self._own_session: SqliteSession | None = None
        self._sent = self._done = 0  # each counted by one thread

    @property
    def session(self) -> SqliteSession:
        """The connection of `sqlite3`, which other threads may use while this is idle."""
        if self._own_session is None:
            self._own_session = SqliteSession(self._conn, self._files)
        return self._own_session

    @property
    def idle(self) -> bool:
        """Whether nothing runs in the connection's thread, not even for callers that were cancelled."""
        return self._sent == self._done

    async def in_thread(self, function: Callable[[SqliteSession], T]) -> T:
        """Run `function(session)` in the connection's thread."""
        result: list[T] = []  # which the thread, until it is called again, would keep alive if it were returned
        session = self.session

        def call() -> None:
            try:
                result.append(function(session))
            finally:
                self._done += 1

        execute: Callable[..., Awaitable[None]] = self._execute
        self._sent += 1
        await execute(call)
        return result.pop()


class Connections:
    """Opens the connections to one database, and lends those of readers, which stay open in between."""

    def __init__(
        self, url: URL, *, durability: str, lock_timeout: float, read_only: bool, ours_only: bool = False
    ) -> None:
        memory = is_memory(url)
        path, options = ":memory:" if memory else str(url.database), dict[str, Any]()
        if read_only and not memory:
            path, options = f"file:{quote_path(Path(path).absolute())}?mode=ro", {"uri": True}
        pragmas = _pragmas(durability, read_only)
        check = partial(refuse_others, path, public_url(url)) if ours_only and not memory else None
        self._connect = partial(connect, path, pragmas, lock_timeout, check=check, **options)
        self._files = OpenFiles(None if memory or read_only else url.database)
        self._lock_timeout = lock_timeout
        self._idle: list[SqliteConnection] = []
        self._free = asyncio.Semaphore(_MOST_LENT)
        self._where = path
        self.lent = 0
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    async def open(self) -> SqliteConnection:
        """Return a new connection, to be closed by `close`."""
        self._files.before_opening()
        connection = SqliteConnection(self._connect_read, self._files)
        self._threads.add(connection.worker)
        await connection
        try:
            self._files.opened()
        except BaseException:
            await self.close(connection)
            raise
        return connection

    def _connect_read(self) -> sqlite3.Connection:
        with self._files.read():
            return self._connect()

    async def close(self, connection: SqliteConnection) -> None:
        """Close a connection."""
        self._files.closing()
        await connection.close()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[SqliteConnection]:
        """Lend a connection outside any transaction. Raises LockedError when there is none for too long."""
        try:
            await asyncio.wait_for(self._free.acquire(), self._lock_timeout)
        except TimeoutError as error:
            raise LockedError(
                f"{self._where}: {_MOST_LENT} reads were under way for more than {self._lock_timeout:g} s"
            ) from error
        try:
            connection = self._idle.pop() if self._idle else await self.open()
            self.lent += 1
            try:
                yield connection
            finally:
                self.lent -= 1
                if len(self._idle) < _MOST_IDLE:
                    self._idle.append(connection)  # what a cancelled caller has sent to its thread comes first there
                else:
                    await asyncio.shield(self.close(connection))
        finally:
            self._free.release()

    async def close_all(self) -> None:
        """Close all that aren't in use, and return when the threads of all that were closed have ended.

        The thread of a connection whose opening or closing was cancelled goes on for a moment, and would then answer a
        loop that has been closed.
        """
        while self._idle:
            await self.close(self._idle.pop())
        deadline = time.monotonic() + _ENDING_SECONDS
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def connect(
    path: str,
    pragmas: Sequence[str],
    lock_timeout: float,
    *,
    check: Callable[[], object] | None = None,
    **options: Any,
) -> sqlite3.Connection:
    """Return a connection of `sqlite3` with these settings, which any thread may use; `check()` comes before."""
    if check is not None:
        _patiently(check, lock_timeout)
    raw: sqlite3.Connection = sqlite3.connect(
        path, timeout=lock_timeout, isolation_level=None, check_same_thread=False, **options
    )
    try:
        for pragma in pragmas:
            _patiently(partial(raw.execute, f"PRAGMA {pragma}"), lock_timeout)
    except BaseException:
        raw.close()
        raise
    return raw


def connect_to_write(path: str, lock_timeout: float) -> sqlite3.Connection:
    """Return a connection of `sqlite3` that writes, and waits for the disk at every commit."""
    return connect(path, _pragmas("full", False), lock_timeout)


def _patiently(function: Callable[[], object], seconds: float) -> None:
    """Call the function, repeatedly while the database is locked, for up to `seconds`.

    When several processes create a new database at once, all but the first to switch it to WAL fail immediately: SQLite
    doesn't wait there, whatever its timeout.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            function()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _pragmas(durability: str, read_only: bool) -> list[str]:
    if read_only:
        return [f"cache_size = -{CACHE_KIB}", "query_only = ON"]
    return [
        f"cache_size = -{CACHE_KIB}",
        f"page_size = {PAGE_SIZE}",
        "journal_mode = WAL",
        f"synchronous = {'FULL' if durability == 'full' else 'NORMAL'}",
        "wal_autocheckpoint = 0",  # see `sqlite_log`
        # Some builds overwrite deleted content with zeros; FAST does so only where it costs no extra writing.
        "secure_delete = FAST",
        f"journal_size_limit = {_LOG_PAGES * PAGE_SIZE}",
    ]
