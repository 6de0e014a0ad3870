"""Connections to SQLite, each with a thread of its own.

The thread is sent whole transactions: one of eight statements, each sent by itself, would switch threads sixteen times,
and wait for the GIL each time when the training loop is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy.engine import URL

from replaybuf.errors import LockedError
from replaybuf.storage.sql.engine.sqlite_files import (
    PAGE_SIZE,
    OpenFiles,
    check_version,
    read_only_files,
    refuse_others,
)
from replaybuf.storage.sql.engine.sqlite_session import FORK_GUARD, SqliteSession
from replaybuf.storage.sql.engine.urls import is_memory, public_url

T = TypeVar("T")

#: The size limit of the WAL file after it began anew.
LOG_BYTES = 64 << 20
#: The size of each connection's page cache.
CACHE_KIB = 16 * 1024
#: The most reader connections, which stay open.
_MOST_LENT = 8
_ENDING_SECONDS = 1.0


class SqliteConnection:
    """A connection with a daemon thread of its own, in which functions run one after the other.

    `connect` returns the `sqlite3` connection, and is called in the thread.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], files: OpenFiles | None = None) -> None:
        self._connect, self._files = connect, files
        self._session: SqliteSession | None = None
        self._sent = self._done = 0  # each counted by one thread
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_call_each, args=(self._calls,), daemon=True)
        self._thread.start()

    async def open(self) -> None:
        """Open the connection; it has to be closed, even if this fails."""

        def open_it() -> None:
            with FORK_GUARD:
                self._session = SqliteSession(self._connect(), self._files)

        await self._run(open_it)

    async def close(self) -> None:
        """Close the connection, after the functions that were sent before."""

        def close_it() -> None:
            if self._session is not None:
                with FORK_GUARD:
                    self._session.raw.close()

        try:
            await self._run(close_it)
        finally:
            self._calls.put(None)

    @property
    def session(self) -> SqliteSession:
        """The session on the `sqlite3` connection; other threads may use it while the connection is `idle`."""
        assert self._session is not None
        return self._session

    @property
    def idle(self) -> bool:
        """Whether nothing runs in the connection's thread, not even for cancelled callers."""
        return self._sent == self._done

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    async def in_thread(self, function: Callable[[SqliteSession], T]) -> T:
        """Run `function(session)` in the connection's thread, also if the caller is cancelled."""
        session = self.session
        return await self._run(lambda: function(session))

    async def _run(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            outcome: Any = None
            settle: Callable[[Any], object] = answer.set_result
            try:
                outcome = function()
            except BaseException as error:
                outcome, settle = error, answer.set_exception
            self._done += 1
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_settle, answer, settle, outcome)
            del outcome  # an error refers to this frame

        self._sent += 1
        self._calls.put(run)
        return await answer


def _settle(answer: asyncio.Future[T], settle: Callable[[Any], object], outcome: Any) -> None:
    if not answer.done():
        settle(outcome)


def _call_each(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while call := calls.get():
        call()
        del call  # and all that it refers to


class Connections:
    """Opens the connections to one database, and pools the readers' ones."""

    def __init__(
        self, url: URL, *, durability: str, lock_timeout: float, read_only: bool, ours_only: bool = False
    ) -> None:
        memory = is_memory(url)
        path, options = ":memory:" if memory else str(url.database), dict[str, Any]()
        self._files = OpenFiles(None if memory else path)
        if read_only and not memory:
            self._files, path = read_only_files(path)
            options = {"uri": True}
        pragmas = _pragmas(durability, read_only)
        check = partial(refuse_others, path, public_url(url)) if ours_only and not memory else None
        self._connect = partial(connect, path, pragmas, lock_timeout, check=check, **options)
        self._lock_timeout = lock_timeout
        self._idle: list[SqliteConnection] = []
        self._free = asyncio.Semaphore(_MOST_LENT)
        self._where = path
        self.lent = 0
        self._running: list[SqliteConnection] = []

    async def open(self) -> SqliteConnection:
        """Return a new connection, to be closed by `close`."""
        self._files.before_opening()
        connection = SqliteConnection(self._connect_read, self._files)
        self._running = [*(one for one in self._running if not one.has_ended), connection]
        try:
            await connection.open()
        except BaseException:
            await asyncio.shield(connection.close())
            raise
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
        """Lend a connection outside any transaction. Raises LockedError when none is free within the lock timeout."""
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
                self._idle.append(connection)  # its thread first finishes the work of a cancelled caller
        finally:
            self._free.release()

    async def close_all(self) -> None:
        """Close the idle connections, and wait until the threads of all closed connections have ended.

        The thread of a connection whose opening or closing was cancelled runs for a moment longer, and would then call
        into a closed event loop.
        """
        while self._idle:
            await self.close(self._idle.pop())
        deadline = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < deadline and not all(one.has_ended for one in self._running):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def connect(
    path: str,
    pragmas: Sequence[str],
    lock_timeout: float,
    *,
    check: Callable[[], object] | None = None,
    **options: Any,
) -> sqlite3.Connection:
    """Return a `sqlite3` connection with these pragmas, usable by any thread; `check()` runs before it is opened."""
    check_version()
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
    """Return a `sqlite3` connection for writing, with an fsync at every commit."""
    return connect(path, _pragmas("full", False), lock_timeout)


def _patiently(function: Callable[[], object], seconds: float) -> None:
    """Call the function, and retry while the database is locked, for up to `seconds`.

    When several processes create a database at once, all but the first to switch it to WAL fail immediately: SQLite
    ignores the busy timeout there.
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
        "wal_autocheckpoint = 0",  # see `engine.sqlite`
        # Some builds overwrite deleted content with zeros; FAST does so only where it costs no extra writing.
        "secure_delete = FAST",
        f"journal_size_limit = {LOG_BYTES}",
    ]
