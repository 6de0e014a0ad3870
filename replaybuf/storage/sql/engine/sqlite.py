"""SQLite: whole transactions, each run in one thread.

A transaction is sent to its connection's thread as one call; a brief one runs in the store's own thread. All writes of
a store share one connection, whose page cache stays valid until another process writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy.engine import URL

from replaybuf.storage.sql.engine.database import CommitWatch, Database, Function, Steps
from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.sqlite_connection import Connections, SqliteConnection
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE
from replaybuf.storage.sql.engine.sqlite_log import WalCheckpoints, checkpoint_wal, sync_wal
from replaybuf.storage.sql.engine.sqlite_session import FORK_GUARD, is_busy
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.engine.urls import is_memory

T = TypeVar("T")


class SqliteDatabase(Database):
    """A SQLite file, or a database in memory."""

    dialect = SQLITE

    def __init__(
        self,
        url: URL,
        *,
        durability: str,
        lock_timeout: float,
        read_only: bool = False,
        ours_only: bool = False,
    ) -> None:
        super().__init__(url, lock_timeout)
        self.memory = is_memory(url)
        self.path = None if self.memory else url.database
        self.connections = Connections(
            url, durability=durability, lock_timeout=lock_timeout, read_only=read_only, ours_only=ours_only
        )
        # There is one writer at a time: writers of this process queue here, in order, instead of polling for SQLite's
        # lock. A database in memory has a single connection, for which readers queue, too.
        self._turn = asyncio.Lock()
        self._writer: SqliteConnection | None = None
        self._checkpointer: SqliteConnection | None = None
        self._log: WalCheckpoints | None = None
        if self.path is not None:
            self._log = WalCheckpoints(f"{self.path}-wal", self._checkpoint)

    async def read(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        brief: bool = False,
        single: bool = False,
        follows: bool = False,
    ) -> T:
        with translated(self.url, self.lock_timeout):
            if self.memory or (brief and not self._turn.locked()):
                try:
                    return await self._in_turn(function, scope, write=False, brief=brief)
                except sqlite3.OperationalError as error:
                    if self.memory or not is_busy(error):
                        raise
            async with self.connections.lend() as connection:
                return await connection.in_thread(lambda session: session.transact(function, scope, write=False))

    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        patience: float | None = None,
        follows: bool = False,
        accepts: bool = False,
    ) -> T:
        # A commit either succeeds or raises: no unknown outcome, no retry.
        with translated(self.url, self.lock_timeout if patience is None else patience):
            result = await self._in_turn(function, scope, write=True, brief=brief, patience=patience)
        self._committed()
        return result

    async def _in_turn(
        self, function: Function[T], scope: Scope, *, write: bool, brief: bool, patience: float | None = None
    ) -> T:
        """Run a transaction on the writer's connection; a brief one in this thread, unless the database is locked."""
        async with self._turn:
            writer = self._writer or await self._open_writer()
            if brief and writer.idle:
                try:
                    return writer.session.transact(function, scope, write=write)
                except sqlite3.OperationalError as error:
                    if not is_busy(error):
                        raise
            bound = self.lock_timeout if patience is None else patience
            return await writer.in_thread(lambda own: own.transact(function, scope, write=write, patience=bound))

    async def _open_writer(self) -> SqliteConnection:
        self._writer = writer = await self.connections.open()
        pragma = "PRAGMA busy_timeout = 0"  # `begin` polls by itself
        await writer.in_thread(lambda own: own.outside(lambda raw: raw.execute(pragma)))
        return writer

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Steps]:
        with translated(self.url, self.lock_timeout):
            async with self._connection(write) as connection:
                await connection.in_thread(lambda own: own.begin(write=write, patience=self.lock_timeout))
                steps = Steps(
                    Transaction(connection.session, scope),
                    lambda function: connection.in_thread(lambda _: function()),
                    lambda: connection.in_thread(lambda own: own.roll_back()),
                )
                try:
                    yield steps
                    if not steps.is_over:
                        await connection.in_thread(lambda own: own.commit())
                except BaseException:
                    await asyncio.shield(connection.in_thread(lambda own: own.roll_back()))
                    raise
        if write:
            self._committed()

    @asynccontextmanager
    async def _connection(self, write: bool) -> AsyncIterator[SqliteConnection]:
        if write or self.memory:
            async with self._turn:
                yield self._writer or await self._open_writer()
        else:
            async with self.connections.lend() as connection:
                yield connection

    async def outside(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Return `function(connection)`, run outside any transaction, on a reader's connection."""
        with translated(self.url, self.lock_timeout):
            async with self.connections.lend() as connection:
                return await connection.in_thread(lambda session: session.outside(function))

    def _committed(self) -> None:
        if self._log is not None:
            self._log.committed()

    async def _checkpoint(self) -> int:
        if self._checkpointer is None:
            self._checkpointer = await self.connections.open()
        copier = self._checkpointer
        await copier.in_thread(lambda _: sync_wal(f"{self.path}-wal"))
        return await self._in_turn(
            lambda _: checkpoint_wal(copier.session.raw), DEFAULT, write=True, brief=False, patience=self.lock_timeout
        )

    def changes(self, hint: Callable[[], object]) -> CommitWatch:
        return CommitWatch() if self.path is None else DataVersion(self.path, self.connections, hint)

    @property
    def lent(self) -> int:
        return self.connections.lent

    async def end_writing(self) -> None:
        """Stop WAL checkpoints and close the write connections; the next write opens new ones."""
        if self._log is not None:
            await self._log.close()
        async with self._turn:
            connections = (self._checkpointer, self._writer)
            self._checkpointer = self._writer = None
            for connection in filter(None, connections):
                await self.connections.close(connection)

    async def dispose(self) -> None:
        await self.end_writing()
        await self.connections.close_all()


# Commits of other processes

#: The interval between two looks at the WAL while somebody waits, and that between two reads of `data_version`, which
#: cost some ten times as much.
_LOOK_SECONDS, _POLL_SECONDS = 0.006, 0.1
#: A commit is visible some time after its first page was written to the WAL.
_LATER_SECONDS = 0.015


class DataVersion(CommitWatch):
    """Polls the file's `data_version`, which changes when another connection commits.

    It is read at intervals, and soon after the WAL's time of modification has changed. That time alone would not be
    enough: it is as coarse as the kernel's clock.
    """

    seconds = _POLL_SECONDS

    def __init__(self, path: str, connections: Connections, hint: Callable[[], object]) -> None:
        self._log, self._connections, self._hint = f"{os.path.abspath(path)}-wal", connections, hint
        self._connection: SqliteConnection | None = None
        self._version: int | None = None
        self._written = 0
        self._until = 0.0  # the time of the last read of `data_version` after the last write
        self._next: asyncio.TimerHandle | None = None

    async def look(self) -> bool:
        if self._connection is None:
            self._connection = await self._connections.open()
            self._connection.session.outside(lambda raw: raw.execute("PRAGMA busy_timeout = 0"))
        return self._has_changed()

    def switch(self, on: bool) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if on:
            self._next = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._glance)

    def _glance(self) -> None:
        """Read `data_version` if the WAL was written to a short time ago."""
        self.switch(True)
        now = asyncio.get_running_loop().time()
        try:
            written = os.stat(self._log).st_mtime_ns
            if written != self._written:
                self._written, self._until = written, now + _LATER_SECONDS
            changed = now <= self._until and self._connection is not None and self._has_changed()
        except (OSError, sqlite3.Error):  # the next poll will say why
            return
        if changed:
            self.switch(False)  # until somebody waits again
            self._hint()

    def _has_changed(self) -> bool:
        assert self._connection is not None
        try:
            with FORK_GUARD:
                version: int = self._connection.session.raw.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.OperationalError as error:
            if is_busy(error):  # the WAL is being recovered
                return False
            raise
        changed, self._version = version != self._version, version
        return changed

    async def close(self) -> None:
        self.switch(False)
        connection = self._connection
        self._connection = self._version = None
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._connections.close(connection)
