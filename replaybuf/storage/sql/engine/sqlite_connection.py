"""Connections to SQLite, each with aiosqlite's thread.

aiosqlite gives every connection a thread and sends it one statement at a time. A transaction of eight statements would
switch threads sixteen times, each time waiting for the GIL when the training loop is busy. So a transaction is sent as
one script: a function in the place of its text (`Script`), which our class of `sqlite3` connections calls.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import aiosqlite

from replaybuf.errors import LockedError, StorageError
from replaybuf.storage.sql.engine.database import Access, Function
from replaybuf.storage.sql.engine.sqlite_dialect import SqliteTransaction
from replaybuf.storage.sql.engine.sqlite_files import (
    PAGE_SIZE,
    OpenFiles,
    check_version,
    read_only_uri,
    refuse_foreign_file,
)
from replaybuf.storage.sql.engine.sqlite_raw import FORK_GUARD, RawConnection, Script, open_files, patiently
from replaybuf.storage.sql.engine.transaction import Scope, after_commit, on_commit

T = TypeVar("T")

#: The size limit of the WAL file after it began anew.
LOG_BYTES = 64 << 20
#: The size of each connection's page cache.
CACHE_KIB = 16 * 1024
#: The most reader connections, which stay open.
_MOST_LENT = 8
_ENDING_SECONDS = 1.0


class SqliteConnection:
    """A connection with a thread of its own, in which functions run one after the other.

    `connect` returns the `sqlite3` connection, and is called in the thread. The process doesn't wait for the thread
    when it ends.
    """

    def __init__(self, connect: Callable[[], RawConnection], files: OpenFiles | None = None) -> None:
        self._connect, self._files = connect, files or OpenFiles(None)
        self._worker: threading.Thread | None = None
        self._raw: RawConnection | None = None
        self._sent_count = self._done_count = 0  # each counted by one thread
        self._connection = _make_in_daemon(lambda: aiosqlite.Connection(self._connect_here, iter_chunk_size=64))

    def _connect_here(self) -> RawConnection:
        self._worker = threading.current_thread()
        with FORK_GUARD:
            self._raw = self._connect()
        return self._raw

    async def open(self) -> None:
        """Open the connection; it has to be closed, even if this fails."""
        await self._connection

    async def close(self) -> None:
        """Close the connection, after the functions that were sent before."""
        await self._connection.close()

    @property
    def idle(self) -> bool:
        """Whether nothing runs in the connection's thread, not even for cancelled callers."""
        return self._sent_count == self._done_count

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self._worker is not None and not self._worker.is_alive()

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run `function()` in the connection's thread."""
        result: list[T] = []

        def call() -> None:
            try:
                result.append(function())
            finally:
                self._done_count += 1

        self._sent_count += 1
        await self._connection.executescript(Script(call))
        return result.pop()

    # In the connection's thread, or in another one while the connection is `idle`

    @property
    def raw(self) -> RawConnection:
        """The `sqlite3` connection."""
        assert self._raw is not None
        return self._raw

    def transact(self, function: Function[T], scope: Scope, *, write: bool, patience: float = 0.0) -> T:
        """Run a transaction and return its result; wait for the write lock for up to `patience` seconds."""
        with FORK_GUARD, self._files.read():
            tx = self.begin(scope, write=write, patience=patience)
            try:
                result = function(tx)
                self.commit()
            except BaseException:
                self.roll_back()
                raise
            return result

    def begin(self, scope: Scope, *, write: bool, patience: float) -> SqliteTransaction:
        """Begin a transaction in the files that were opened. Raises StorageError if they have gone."""
        self._files.check()
        tx = SqliteTransaction(self.raw, scope)
        # A read transaction that is upgraded to a write fails at once when another connection has written in between,
        # whatever the busy timeout; so write transactions begin with BEGIN IMMEDIATE.
        patiently(partial(tx.execute, "BEGIN IMMEDIATE" if write else "BEGIN"), patience)
        return tx

    def commit(self) -> None:
        """Commit the transaction."""
        on_commit()
        self.raw.commit()
        after_commit()

    def roll_back(self) -> None:
        """Roll the transaction back, unless SQLite already has."""
        if self.raw.in_transaction:
            self.raw.rollback()


def _make_in_daemon(make: Callable[[], T]) -> T:
    """Call `make` in a daemon thread, so that the threads that it starts are daemons; return its result."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(make()), daemon=True)
    thread.start()
    thread.join()
    return results[0]


class Connections:
    """Opens the connections to one database, and pools the readers' ones."""

    def __init__(self, access: Access) -> None:
        self._access, self._files = access, OpenFiles(access.path)
        uri = read_only_uri(access.path) if access.path is not None and access.read_only else None
        self._connect = partial(connect, access, uri)
        self._idle: list[SqliteConnection] = []
        self._is_closed = False
        self._free_slots = asyncio.Semaphore(_MOST_LENT)
        self._running: list[SqliteConnection] = []

    async def open(self) -> SqliteConnection:
        """Return a new connection, to be closed by `close`."""
        self._files.before_opening()
        connection = SqliteConnection(self._connect_read, self._files)
        self._running = [*(running for running in self._running if not running.has_ended), connection]
        try:
            await connection.open()
            self._files.opened()
        except BaseException:
            await asyncio.shield(connection.close())
            raise
        return connection

    def _connect_read(self) -> RawConnection:
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
            await asyncio.wait_for(self._free_slots.acquire(), self._access.lock_timeout)
        except TimeoutError as error:
            raise LockedError(
                f"{self._access.path}: {_MOST_LENT} reads were under way for more than {self._access.lock_timeout:g} "
                "s; raise lock_timeout, or start fewer at once"
            ) from error
        try:
            connection = self._idle.pop() if self._idle else await self.open()
            try:
                yield connection
            finally:
                self._idle.append(connection)  # its thread first finishes the work of a cancelled caller
                if self._is_closed:
                    await asyncio.shield(self.close_all())
        finally:
            self._free_slots.release()

    async def close_all(self) -> None:
        """Close the idle connections, and wait until the threads of all closed connections have ended.

        The thread of a connection whose opening or closing was cancelled runs for a moment longer, and would then call
        into a closed event loop.
        """
        self._is_closed = True
        while self._idle:
            await self.close(self._idle.pop())
        deadline = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < deadline and not all(running.has_ended for running in self._running):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def connect(access: Access, uri: str | None = None) -> RawConnection:
    """Return a `sqlite3` connection, usable by any thread, to the file of an access, or to that of a URI."""
    check_version()
    path, patience = access.path, access.lock_timeout
    real_path = "" if path is None else os.path.realpath(path)
    if FORK_GUARD.is_unlocked(real_path):
        raise StorageError(
            f"{path}: this process was forked from one that had the database open, when no file descriptor was free or "
            "a signal interrupted the fork. So it has no locks of the database, and what it commits might be lost: "
            "raise the limit of open files (ulimit -n), or start another process",
            reason="forked",
        )
    raw = sqlite3.connect(
        uri or path or ":memory:",
        uri=uri is not None,
        timeout=patience,
        isolation_level=None,
        check_same_thread=False,
        factory=RawConnection,
    )
    if path is not None and access.is_inherited:
        open_files[raw] = real_path
    try:
        if access.ours_only and path is not None and uri is None:
            patiently(partial(refuse_foreign_file, raw, path, access.where), patience)
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
