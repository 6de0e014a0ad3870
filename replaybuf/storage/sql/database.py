"""Transactions: a plain function over a connection is run in one, whole or not at all.

The functions can't await, so that nothing but the database is ever waited for inside a transaction. All of this runs in
the event loop of one thread (`storage.sql.thread`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.driver import create_engine, is_transient, translated
from replaybuf.storage.sql.sqlite import is_memory, run_transaction

T = TypeVar("T")

_ATTEMPTS = 5

# Writers share this advisory lock and a staleness refresh takes it alone, so that no group is put or taken against a
# train step that is just being changed. The number is arbitrary.
_ADVISORY_LOCK = 0x5EB0F


class Database:
    """One engine, with transactions for reading and for writing."""

    def __init__(self, url: URL, *, durability: str, lock_timeout: float, read_only: bool = False) -> None:
        self.url = url
        self.dialect = url.get_backend_name()
        self.memory = is_memory(url)
        self.lock_timeout = lock_timeout
        with translated(url, lock_timeout):
            self.engine = create_engine(url, durability=durability, lock_timeout=lock_timeout, read_only=read_only)
        # SQLite has one writer at a time: those of this process queue here, in order, instead of polling for its lock.
        # A database in memory has a single connection, which readers have to queue for, too.
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if self.dialect == "sqlite" else nullcontext()

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run `function(connection)` in a read transaction: it sees one state of the database."""
        if self.dialect == "sqlite":
            return await self._in_thread(function, write=False)
        async with self.transaction(write=False) as connection:
            return await connection.run_sync(function)

    async def write(self, function: Callable[[Connection], T], *, alone: bool = False) -> T:
        """Run `function(connection)` in a write transaction and commit; `alone` keeps out all other writers.

        A transaction that PostgreSQL rolled back for another's sake (deadlock, serialisation) is run again.
        """
        if self.dialect == "sqlite":
            return await self._in_thread(function, write=True)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self.transaction(write=True, alone=alone) as connection:
                    return await connection.run_sync(function)
            except ReplayBufError as error:
                if attempt == _ATTEMPTS or not is_transient(error):
                    raise
                await asyncio.sleep(0.01 * 2**attempt)
        raise AssertionError("unreachable")

    async def _in_thread(self, function: Callable[[Connection], T], *, write: bool) -> T:
        with translated(self.url, self.lock_timeout):
            async with self._turn if write or self.memory else nullcontext(), self.engine.connect() as connection:
                return await run_transaction(connection, function, write=write)

    @asynccontextmanager
    async def transaction(self, *, write: bool, alone: bool = False) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed at the end of the block and rolled back by an exception."""
        turn = self._turn if write or self.memory else nullcontext()
        with translated(self.url, self.lock_timeout):
            async with turn, self.engine.connect() as connection:
                if write:
                    await connection.execution_options(replaybuf_write=True)
                elif self.dialect == "postgresql":
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                async with connection.begin():
                    if write and self.dialect == "postgresql":
                        lock = "pg_advisory_xact_lock" if alone else "pg_advisory_xact_lock_shared"
                        await connection.execute(text(f"SELECT {lock}(:key)"), {"key": _ADVISORY_LOCK})
                    yield connection

    async def connect(self) -> AsyncConnection:
        """A connection of one's own, to be closed by the caller."""
        with translated(self.url, self.lock_timeout):
            return await self.engine.connect().start()

    async def dispose(self) -> None:
        """Close all connections."""
        await self.engine.dispose()
