"""SQLite: whole transactions, each in one thread; copying the WAL back; polls for commits of other processes.

A transaction is sent to its connection's thread as one call; a brief one runs in the store's own thread. All writes of
a store share one connection, whose page cache stays valid until another process writes.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from replaybuf.storage.sql.engine.database import HINT_SECONDS, Access, CommitWatch, Database, Function, Step
from replaybuf.storage.sql.engine.driver_errors import translated
from replaybuf.storage.sql.engine.sqlite_connection import Connections, SqliteConnection
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE
from replaybuf.storage.sql.engine.sqlite_raw import FORK_GUARD, is_busy
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope

T = TypeVar("T")

_logger = logging.getLogger("replaybuf.sqlite")


class SqliteDatabase(Database):
    """A SQLite file, or a database in memory."""

    dialect = SQLITE

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self.memory = self.path is None
        self.connections = Connections(access)
        # There is one writer at a time: writers of this process queue here, in order, instead of polling for SQLite's
        # lock. A database in memory has a single connection, for which readers queue, too.
        self._turn = asyncio.Lock()
        self._writer: SqliteConnection | None = None
        self._checkpointer: SqliteConnection | None = None
        self._wal_checkpoints = WalCheckpoints(None if self.path is None else f"{self.path}-wal", self._checkpoint)

    async def read(self, function: Function[T], scope: Scope = DEFAULT, *, single: bool = False) -> T:
        with translated(self.access):
            if self.memory or (single and not self._turn.locked()):
                try:
                    return await self._run_in_turn(function, scope, write=False, brief=single)
                except sqlite3.OperationalError as error:
                    if self.memory or not is_busy(error):
                        raise
            async with self.connections.lend() as connection:
                return await connection.in_thread(lambda: connection.transact(function, scope, write=False))

    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        patience: float | None = None,
        accepts_loss: bool = False,
    ) -> T:
        # A commit either succeeds or raises: no unknown outcome, no retry.
        with translated(self.access, patience):
            result = await self._run_in_turn(function, scope, write=True, brief=brief, patience=patience)
        self._wal_checkpoints.committed()
        return result

    async def _run_in_turn(
        self, function: Function[T], scope: Scope, *, write: bool, brief: bool, patience: float | None = None
    ) -> T:
        """Run a transaction on the writer's connection; a brief one in this thread, unless the database is locked."""
        async with self._turn:
            writer = self._writer or await self._open_writer()
            if brief and writer.idle:
                try:
                    return writer.transact(function, scope, write=write)
                except sqlite3.OperationalError as error:
                    if not is_busy(error):
                        raise
            bound = self.lock_timeout if patience is None else patience
            return await writer.in_thread(lambda: writer.transact(function, scope, write=write, patience=bound))

    async def _open_writer(self) -> SqliteConnection:
        self._writer = writer = await self.connections.open()
        await writer.in_thread(lambda: writer.raw.execute("PRAGMA busy_timeout = 0"))  # `begin` polls by itself
        return writer

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Step]:
        with translated(self.access):
            async with self._connection(write) as connection:
                begin = partial(connection.begin, scope, write=write, patience=self.lock_timeout)
                try:
                    # If this is cancelled, the thread begins the transaction nevertheless: it is rolled back below.
                    tx = await connection.in_thread(begin)
                    yield lambda function, *args: connection.in_thread(partial(function, tx, *args))
                    await connection.in_thread(connection.commit)
                except BaseException:
                    await asyncio.shield(connection.in_thread(connection.roll_back))
                    raise
        if write:
            self._wal_checkpoints.committed()

    @asynccontextmanager
    async def _connection(self, write: bool) -> AsyncIterator[SqliteConnection]:
        if write or self.memory:
            async with self._turn:
                yield self._writer or await self._open_writer()
        else:
            async with self.connections.lend() as connection:
                yield connection

    async def _checkpoint(self) -> None:
        if self._checkpointer is None:
            self._checkpointer = await self.connections.open()
        copier = self._checkpointer
        await copier.in_thread(partial(sync_wal, f"{self.path}-wal"))
        await self._run_in_turn(
            lambda _: checkpoint_wal(copier.raw), DEFAULT, write=True, brief=False, patience=self.lock_timeout
        )

    def changes(self, hint: Callable[[], object]) -> CommitWatch:
        return CommitWatch() if self.path is None else DataVersion(self._data_version, self.path)

    async def _data_version(self) -> int | None:
        """Return a number that changes when another connection than the writer's commits; None while that is busy."""

        def read() -> int:
            with FORK_GUARD:
                return int(writer.raw.execute("PRAGMA data_version").fetchone()[0])

        if self._turn.locked():  # perhaps waiting for the write lock
            return None
        async with self._turn:
            writer = self._writer or await self._open_writer()
            return read() if writer.idle else await writer.in_thread(read)

    async def dispose(self) -> None:
        await self._wal_checkpoints.close()
        async with self._turn:
            connections = (self._checkpointer, self._writer)
            self._checkpointer = self._writer = None
            for connection in filter(None, connections):
                await self.connections.close(connection)
        await self.connections.close_all()


# WAL checkpoints: copying the write-ahead log (WAL) back into the database file.
#
# SQLite's automatic checkpoint runs after the commit that made the WAL too long, while other connections may commit.
# Before version 3.51.3 such commits can be lost: a checkpoint that begins right after another may take the next WAL for
# the old one, and mark its pages as copied (https://sqlite.org/wal.html#the_wal_reset_bug). So replaybuf switches
# automatic checkpoints off, and checkpoints while it holds the write lock, after which the WAL can begin anew.

#: A checkpoint is due after so many commits of this process, or once the WAL has grown by so many bytes.
_COMMITS, _GROWTH_BYTES = 128, 16 << 20


def sync_wal(path: str) -> None:
    """Fsync the WAL, so that a checkpoint under the write lock doesn't block writers for its fsync as well."""
    with open(path, "r+b", buffering=0) as file:  # Windows flushes no read-only file handle
        os.fsync(file.fileno())


def checkpoint_wal(connection: sqlite3.Connection) -> None:
    """Checkpoint as much of the WAL as readers allow."""
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


class WalCheckpoints:
    """Schedules checkpoints of the WAL at this path by `copy`; None for a database in memory."""

    def __init__(self, path: str | None, copy: Callable[[], Awaitable[object]]) -> None:
        self._path, self._copy = path, copy
        self._copy_task: asyncio.Task[None] | None = None
        self._commits = self._bytes = 0  # since the last checkpoint, and the size of the WAL file then
        self._closed = False

    def committed(self) -> None:
        """Count a commit, and checkpoint the WAL in a task of its own if that is due (database's thread)."""
        if self._path is None:
            return
        self._commits += 1
        try:
            size = os.stat(self._path).st_size
        except OSError:  # no WAL at the moment
            return
        self._bytes = min(self._bytes, size)  # a WAL that begins anew is shortened
        is_due = self._commits >= _COMMITS or size >= self._bytes + _GROWTH_BYTES
        if is_due and self._copy_task is None and not self._closed:
            self._commits, self._bytes = 0, size
            self._copy_task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._copy()
        except Exception as error:  # a later commit tries again
            _logger.debug("can't copy the log of %s: %s", self._path, error)
        finally:
            self._copy_task = None

    async def close(self) -> None:
        """Start no more checkpoints, and wait for the running one (database's thread)."""
        self._closed = True
        if self._copy_task is not None:
            await asyncio.wait([self._copy_task])


# Commits of other processes


#: The seconds between two polls after a write, at first, and the longest ones.
_FIRST_POLL, _LONGEST_POLL = 0.002, 0.5
#: The seconds between two polls where the system doesn't tell who writes to a file (it isn't Linux).
_BLIND_POLL = 0.01
_IN_MODIFY = 2


class DataVersion(CommitWatch):
    """Polls the writer's `data_version`, which changes when others commit, after writes to the WAL.

    While the writer is busy, a write to the WAL may be a commit of others.
    """

    def __init__(self, read: Callable[[], Awaitable[int | None]], path: str) -> None:
        self._read_version, self._wal_path = read, f"{path}-wal"
        self._version: int | None = None
        self._writes_fd: int | None = None  # a descriptor that can be read after writes to the WAL
        self._has_changed = False
        self._hint_gap = 0.0
        self._seconds = _LONGEST_POLL

    async def poll(self) -> bool:
        if self._writes_fd is None:
            self._writes_fd = _writes_to(self._wal_path)
        previous, version = self._version, await self._read_version()
        if version is not None:
            self._version = version
        self._has_changed = version is not None and version != previous
        return version is None or self._has_changed

    async def pause(self) -> None:
        if self._has_changed:  # all of these milliseconds' commits are one hint
            self._hint_gap = 0.0
            await asyncio.sleep(HINT_SECONDS)
            return
        if self._writes_fd is None:
            await asyncio.sleep(_BLIND_POLL)
            return
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._writes_fd, written.set)
        try:
            await asyncio.wait_for(written.wait(), self._seconds)
        except TimeoutError:
            self._seconds, self._hint_gap = min(_LONGEST_POLL, 2 * self._seconds), 0.0
            return
        finally:
            loop.remove_reader(self._writes_fd)
        os.read(self._writes_fd, 1 << 16)
        # A commit can be seen some time after its last write, at least that of an fsync; a long one writes often.
        await asyncio.sleep(self._hint_gap)
        self._seconds, self._hint_gap = _FIRST_POLL, min(_FIRST_POLL, self._hint_gap + _FIRST_POLL / 4)

    async def close(self) -> None:
        writes, self._writes_fd, self._version = self._writes_fd, None, None
        if writes is not None:
            os.close(writes)


def _writes_to(path: str) -> int | None:
    """Return a descriptor that can be read once the file was written to; None where the system has none (inotify)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1") or (watch := libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)) < 0:
        return None
    if libc.inotify_add_watch(watch, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(watch)
        return None
    return int(watch)
