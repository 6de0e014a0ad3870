"""SQLite through aiosqlite: whole transactions, each run in one thread.

aiosqlite gives every connection a thread and sends it one call at a time. A transaction of eight calls would switch
threads sixteen times, each time waiting for Python's interpreter lock when the training loop is busy. So a transaction
is sent as one call; and a brief one isn't sent at all, but run in the store's own thread. All writes of a store share
one connection, whose cache of pages stays true until another process writes.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.port import Changes, Engine, Function, Steps
from replaybuf.storage.sql.engine.sqlite_changes import DataVersion, NoOthers
from replaybuf.storage.sql.engine.sqlite_connections import ThreadedConnection, Workers, sqlite_pool
from replaybuf.storage.sql.engine.sqlite_log import LogCopies, copy_log, flush_log
from replaybuf.storage.sql.engine.sqlite_session import Session, is_busy
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope
from replaybuf.storage.sql.engine.urls import is_memory

T = TypeVar("T")

_ENDING_SECONDS = 1.0


class SqliteEngine(Engine):
    """A SQLite file, or a database in memory."""

    def __init__(self, url: URL, *, durability: str, lock_timeout: float, read_only: bool = False) -> None:
        super().__init__(url, lock_timeout)
        self.memory = is_memory(url)
        self.path = None if self.memory else url.database
        self._workers = Workers()
        self.pool = sqlite_pool(
            url, durability=durability, lock_timeout=lock_timeout, read_only=read_only, workers=self._workers
        )
        event.listen(self.pool.sync_engine, "begin", _begin)
        # There is one writer at a time: writers of this process queue here, in order, instead of polling for SQLite's
        # lock. A database in memory has a single connection, for which readers have to queue, too.
        self._turn = asyncio.Lock()
        self._writing: AsyncConnection | None = None
        self._session: tuple[ThreadedConnection, Session] | None = None
        self._copier: AsyncConnection | None = None
        self._log: LogCopies | None = None
        if self.path is not None:
            log = f"{self.path}-wal"
            self._log = LogCopies(log, alone=partial(self._copy_alone, log), beside=self._copy_beside)

    async def read(
        self, function: Function[T], scope: Scope = DEFAULT, *, brief: bool = False, single: bool = False
    ) -> T:
        with translated(self.url, self.lock_timeout):
            if self.memory or (brief and not self._turn.locked()):
                try:
                    return await self._in_turn(function, scope, write=False, brief=brief)
                except sqlite3.OperationalError as error:
                    if self.memory or not is_busy(error):
                        raise
            async with self.pool.connect() as connection:
                driver, session = await _session_of(connection)
                return await driver.in_thread(lambda _: session.transact(function, scope, write=False))

    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        patience: float | None = None,
    ) -> T:
        # A commit either succeeds or raises; no answer can be lost, and nothing has to be repeated.
        with translated(self.url, self.lock_timeout if patience is None else patience):
            result = await self._in_turn(function, scope, write=True, brief=brief, patience=patience)
        self._committed()
        return result

    async def write_beside(
        self, function: Function[T], guard: Function[object], confirm: Function[object], scope: Scope = DEFAULT
    ) -> T:
        return await self.write(function, scope)

    async def _in_turn(
        self, function: Function[T], scope: Scope, *, write: bool, brief: bool, patience: float | None = None
    ) -> T:
        """Run a transaction on the writer's connection: a brief one in this thread, unless another process writes."""
        async with self._turn:
            driver, session = self._session or await self._open_writer()
            if brief and driver.idle:
                try:
                    return session.transact(function, scope, write=write)
                except sqlite3.OperationalError as error:
                    if not is_busy(error):
                        raise
            patience = self.lock_timeout if patience is None else patience
            return await driver.in_thread(lambda _: session.transact(function, scope, write=write, patience=patience))

    async def _open_writer(self) -> tuple[ThreadedConnection, Session]:
        if self._writing is None:
            self._writing = await self.pool.connect().start()
        self._session = driver, session = await _session_of(self._writing)
        await driver.in_thread(lambda raw: raw.execute("PRAGMA busy_timeout = 0"))  # sessions wait by themselves
        return driver, session

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Steps]:
        with translated(self.url, self.lock_timeout):
            async with self._turn_of(write), self.pool.connect() as connection:
                await connection.execution_options(replaybuf_write=write)
                async with connection.begin():
                    yield Steps(self, connection, scope)
        if write:
            self._committed()

    def _committed(self) -> None:
        if self._log is not None:
            self._log.committed()

    async def _copy_alone(self, log: str) -> int:
        copier, _ = await self._open_copier()
        await copier.in_thread(lambda _: flush_log(log))
        return await self._in_turn(
            lambda _: copy_log(copier.raw), DEFAULT, write=True, brief=False, patience=self.lock_timeout
        )

    async def _copy_beside(self) -> int:
        copier, session = await self._open_copier()
        return await copier.in_thread(lambda _: session.outside(copy_log))

    async def _open_copier(self) -> tuple[ThreadedConnection, Session]:
        """Return the connection that copies the log, which is used for nothing else."""
        if self._copier is None:
            self._copier = await self.pool.connect().start()
        return await _session_of(self._copier)

    def _turn_of(self, write: bool) -> AbstractAsyncContextManager[None]:
        return self._turn if write or self.memory else nullcontext()

    def changes(self, hint: Callable[[], object]) -> Changes:
        return NoOthers() if self.path is None else DataVersion(self.path, self.connect, hint)

    async def connect(self) -> AsyncConnection:
        """Return a separate connection, to be closed by the caller."""
        with translated(self.url, self.lock_timeout):
            return await self.pool.connect().start()

    async def end_writing(self) -> None:
        """Close the connections that the writes share, and copy the log no more; the next write opens others."""
        if self._log is not None:
            await self._log.close()
        async with self._turn:
            connections = (self._copier, self._writing)
            self._copier = self._writing = self._session = None
            for connection in filter(None, connections):
                await connection.invalidate()
                await connection.close()

    async def dispose(self) -> None:
        await self.end_writing()
        await self.pool.dispose()
        await self._workers.ended(_ENDING_SECONDS)


def _begin(connection: sqlalchemy.Connection) -> None:
    write = connection.get_execution_options().get("replaybuf_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


async def _session_of(connection: AsyncConnection) -> tuple[ThreadedConnection, Session]:
    """Return the driver's connection below SQLAlchemy's, and its session."""
    pooled = await connection.get_raw_connection()
    driver: Any = pooled.driver_connection
    session = pooled.info.get("replaybuf_session")
    if session is None:
        session = pooled.info["replaybuf_session"] = Session(driver.raw, pooled.info["replaybuf_files"])
    return driver, session
