"""SQLite through aiosqlite: whole transactions, each run as one call in the connection's own thread.

aiosqlite gives every connection a thread and sends it one call at a time. A transaction of eight calls would switch
threads sixteen times, each time waiting for Python's interpreter lock when the training loop is busy. So a transaction
is sent as one call, and SQLAlchemy runs it there on the thread's `sqlite3` connection.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import StaticPool, event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.port import Changes, Engine, Function, Steps
from replaybuf.storage.sql.engine.sqlite_changes import DataVersion, NoOthers
from replaybuf.storage.sql.engine.sqlite_connections import JSON_OPTIONS, is_memory, sqlite_pool
from replaybuf.storage.sql.engine.sqlite_files import OpenFiles
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction

T = TypeVar("T")


class SqliteEngine(Engine):
    """A SQLite file, or a database in memory."""

    def __init__(self, url: URL, *, durability: str, lock_timeout: float, read_only: bool = False) -> None:
        super().__init__(url, lock_timeout)
        self.memory = is_memory(url)
        self.path = None if self.memory else url.database
        self.pool = sqlite_pool(url, durability=durability, lock_timeout=lock_timeout, read_only=read_only)
        event.listen(self.pool.sync_engine, "begin", _begin)
        # There is one writer at a time: writers of this process queue here, in order, instead of polling for SQLite's
        # lock. A database in memory has a single connection, for which readers have to queue, too.
        self._turn = asyncio.Lock()

    async def read(self, function: Function[T], scope: Scope = DEFAULT) -> T:
        return await self._run(function, scope, write=False)

    async def write(self, function: Function[T], scope: Scope = DEFAULT, *, alone: bool = False) -> T:
        # A commit either succeeds or raises; no answer can be lost, and nothing has to be repeated.
        return await self._run(function, scope, write=True)

    async def write_beside(self, function: Function[T], guard: Function[object], scope: Scope = DEFAULT) -> T:
        return await self._run(function, scope, write=True)

    async def _run(self, function: Function[T], scope: Scope, *, write: bool) -> T:
        with translated(self.url, self.lock_timeout):
            async with self._in_turn(write), self.pool.connect() as connection:
                pooled = await connection.get_raw_connection()
                driver: Any = pooled.driver_connection
                result: T = await driver.in_thread(partial(self._transact, pooled.info, function, scope, write))
                return result

    def _transact(
        self, info: dict[str, Any], function: Function[T], scope: Scope, write: bool, raw: sqlite3.Connection
    ) -> T:
        """Run a transaction and return its result (connection's thread)."""
        files: OpenFiles = info["replaybuf_files"]
        files.check()
        inner = info.get("replaybuf_engine")
        if inner is None:
            inner = info["replaybuf_engine"] = _engine_over(raw)
        with files.read(), inner.connect() as connection:
            connection.execution_options(replaybuf_write=write)
            with connection.begin():
                return function(Transaction(connection, self.dialect, scope))

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Steps]:
        with translated(self.url, self.lock_timeout):
            async with self._in_turn(write), self.pool.connect() as connection:
                await connection.execution_options(replaybuf_write=write)
                async with connection.begin():
                    yield Steps(self, connection, scope)

    def _in_turn(self, write: bool) -> AbstractAsyncContextManager[None]:
        return self._turn if write or self.memory else nullcontext()

    def changes(self, hint: Callable[[], object]) -> Changes:
        return NoOthers() if self.path is None else DataVersion(self.path, self.connect, hint)

    async def connect(self) -> AsyncConnection:
        """Return a separate connection, to be closed by the caller."""
        with translated(self.url, self.lock_timeout):
            return await self.pool.connect().start()

    async def dispose(self) -> None:
        await self.pool.dispose()


def _begin(connection: sqlalchemy.Connection) -> None:
    # A read transaction that turns into a write fails at once when another connection has written in between, whatever
    # the busy timeout; so write transactions say so at the start.
    write = connection.get_execution_options().get("replaybuf_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _engine_over(raw: sqlite3.Connection) -> sqlalchemy.Engine:
    """Return a SQLAlchemy engine whose only connection is this one."""
    engine = sqlalchemy.create_engine(
        "sqlite://", creator=lambda: raw, poolclass=StaticPool, pool_reset_on_return=None, **JSON_OPTIONS
    )
    event.listen(engine, "begin", _begin)
    return engine
