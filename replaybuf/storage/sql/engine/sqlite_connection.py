"""Connections to SQLite, each with a thread of its own.

A transaction is one call of that thread: sent statement by statement, one of eight would switch threads sixteen times,
each time waiting for the GIL when the training loop is busy.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from replaybuf.errors import LockedError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.sqlite_files import (
    PAGE_SIZE,
    OpenFiles,
    check_version,
    read_only_files,
    refuse_foreign_file,
)
from replaybuf.storage.sql.engine.sqlite_session import FORK_GUARD, SqliteSession, patiently

T = TypeVar("T")

#: The size limit of the WAL file after it began anew.
LOG_BYTES = 64 << 20
#: The size of each connection's page cache.
CACHE_KIB = 16 * 1024
#: The most reader connections, which stay open.
_MOST_LENT = 8


class SqliteConnection:
    """A connection with a thread of its own, in which functions run one after the other.

    `connect` returns the `sqlite3` connection, and is called in the thread. The process doesn't wait for the thread
    when it ends.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], files: OpenFiles | None = None) -> None:
        self._connect, self._files = connect, files
        self._session: SqliteSession | None = None
        self._sent = self._done = 0  # each counted by one thread
        self._calls = SimpleQueue[Callable[[], object] | None]()
        self._thread = threading.Thread(target=self._work, name="replaybuf-sqlite", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it refers to may be freed while this waits

    async def open(self) -> None:
        """Open the connection; it has to be closed, even if this fails."""
        await self._call(self._open)

    def _open(self) -> None:
        with FORK_GUARD:
            self._session = SqliteSession(self._connect(), self._files)

    async def close(self) -> None:
        """Close the connection, after the functions that were sent before, even if the caller is cancelled."""
        closing = self._call(self._close)
        self._calls.put(None)
        await closing
        self._thread.join()

    def _close(self) -> None:
        if self._session is not None:
            with FORK_GUARD:
                self._session.raw.close()

    @property
    def session(self) -> SqliteSession:
        """The session on the `sqlite3` connection; other threads may use it while the connection is `idle`."""
        assert self._session is not None
        return self._session

    @property
    def idle(self) -> bool:
        """Whether nothing runs in the connection's thread, not even for cancelled callers."""
        return self._sent == self._done

    async def in_thread(self, function: Callable[[SqliteSession], T]) -> T:
        """Run `function(session)` in the connection's thread."""
        session = self.session
        result: list[T] = []  # not a future's, which asyncio's debug log would show
        await self._call(lambda: result.append(function(session)))
        return result.pop()

    def _call(self, function: Callable[[], None]) -> asyncio.Future[None]:
        """Send a function to the thread; return a future of its end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            try:
                function()
            except BaseException as error:
                tell(error)
            else:
                tell(None)

        def tell(error: BaseException | None) -> None:
            self._done += 1
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_end, ended, error)

        self._sent += 1
        self._calls.put(call)
        return ended


def _end(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():  # its caller was cancelled
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


class Connections:
    """Opens the connections to one database, and pools the readers' ones."""

    def __init__(self, access: Access) -> None:
        self._access, self._files = access, OpenFiles(access.path)
        self._connect = partial(connect, access)
        if access.path is not None and access.read_only:
            self._files, uri = read_only_files(access.path)
            self._connect = partial(connect, access, uri)
        self._idle: list[SqliteConnection] = []
        self._free = asyncio.Semaphore(_MOST_LENT)
        self.lent = 0

    async def open(self) -> SqliteConnection:
        """Return a new connection, to be closed by `close`."""
        self._files.before_opening()
        connection = SqliteConnection(self._connect_read, self._files)
        try:
            await connection.open()
        except BaseException:
            await connection.close()
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
            await asyncio.wait_for(self._free.acquire(), self._access.lock_timeout)
        except TimeoutError as error:
            raise LockedError(
                f"{self._access.path}: {_MOST_LENT} reads were under way for more than {self._access.lock_timeout:g} s"
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
        """Close the idle connections."""
        while self._idle:
            await self.close(self._idle.pop())


def connect(access: Access, uri: str | None = None) -> sqlite3.Connection:
    """Return a `sqlite3` connection, usable by any thread, to the file of an access, or to that of a URI."""
    check_version()
    path, patience = access.path, access.lock_timeout
    if access.ours_only and path is not None and uri is None:
        patiently(partial(refuse_foreign_file, path, access.where), patience)
    raw = sqlite3.connect(
        uri or path or ":memory:",
        uri=uri is not None,
        timeout=patience,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        for pragma in _pragmas(access):
            patiently(partial(raw.execute, f"PRAGMA {pragma}"), patience)
    except BaseException:
        raw.close()
        raise
    return raw


def _pragmas(access: Access) -> list[str]:
    if access.read_only:
        return [f"cache_size = -{CACHE_KIB}", "query_only = ON"]
    return [
        f"cache_size = -{CACHE_KIB}",
        f"page_size = {PAGE_SIZE}",
        "journal_mode = WAL",
        f"synchronous = {'FULL' if access.durability == 'full' else 'NORMAL'}",
        "wal_autocheckpoint = 0",  # see `engine.sqlite`
        # Some builds overwrite deleted content with zeros; FAST does so only where it costs no extra writing.
        "secure_delete = FAST",
        f"journal_size_limit = {LOG_BYTES}",
    ]
