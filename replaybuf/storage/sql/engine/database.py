"""Transactions: a plain function over a connection is run in one, whole or not at all.

The functions can't await, so that nothing but the database is ever waited for inside a transaction. All of this runs in
the event loop of one thread (`storage.sql.thread`).

A connection to PostgreSQL may be lost at any moment. A transaction that was not committed then is run again; whether it
was, when the answer to COMMIT is what was lost, is found out by its identity (`storage.sql.identity`). So a put is
stored once, and what was taken reaches its taker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, exc, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine import identity as identities
from replaybuf.storage.sql.engine.errors import is_lost, is_transient, translated
from replaybuf.storage.sql.engine.identity import Identity
from replaybuf.storage.sql.engine.outage import Outage, OutcomeUnknownError, Patience
from replaybuf.storage.sql.engine.postgres import forget_writing, has_written, postgres_engine
from replaybuf.storage.sql.engine.sqlite import is_memory, run_transaction, sqlite_engine
from replaybuf.storage.sql.engine.urls import driver_options, public_url

T = TypeVar("T")

_ATTEMPTS = 5
#: How often, and after what time, a server process that was told to end is looked for again.
_ENDING_LOOKS, _ENDING_SECONDS = 100, 0.02

# Writers share this advisory lock and a staleness refresh takes it alone, so that no group is put or taken against a
# train step that is just being changed. The number is arbitrary.
_ADVISORY_LOCK = 0x5EB0F

_LOCKS = {True: "pg_advisory_xact_lock", False: "pg_advisory_xact_lock_shared"}


@dataclass(slots=True)
class _Attempt(Generic[T]):
    """How far a transaction came."""

    since: float | None = None  # of an operation that had trouble before: when that began
    connected: bool = False
    identity: Identity | None = None
    committing: bool = False
    result: Any = None


def create_engine(url: URL, *, durability: str, lock_timeout: float, read_only: bool = False) -> AsyncEngine:
    """The async engine for a URL from `parse_url`. Connects to nothing yet."""
    if url.get_backend_name() == "sqlite":
        return sqlite_engine(url, durability=durability, lock_timeout=lock_timeout, read_only=read_only)
    bare, options = driver_options(url)
    return postgres_engine(bare, options, lock_timeout=lock_timeout, read_only=read_only)


class Database:
    """One engine, with transactions for reading and for writing.

    Once `opened` is true (the schema is there), operations whose connection was lost are repeated for up to
    `reconnect_timeout` seconds; until then an unreachable server is an error at once.
    """

    def __init__(
        self,
        url: URL,
        *,
        durability: str,
        lock_timeout: float,
        reconnect_timeout: float = 60.0,
        read_only: bool = False,
    ) -> None:
        self.url = url
        self.dialect = url.get_backend_name()
        self.memory = is_memory(url)
        self.lock_timeout = lock_timeout
        self.opened = False
        with translated(url, lock_timeout):
            self.engine = create_engine(url, durability=durability, lock_timeout=lock_timeout, read_only=read_only)
        # SQLite has one writer at a time: those of this process queue here, in order, instead of polling for its lock.
        # A database in memory has a single connection, which readers have to queue for, too.
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if self.dialect == "sqlite" else nullcontext()
        self._pairing = asyncio.Lock()
        self._outage = Outage(public_url(url), reconnect_timeout)

    async def read(self, function: Callable[[Connection], T], *, repeat: bool = True) -> T:
        """Run `function(connection)` in a read transaction: it sees one state of the database."""
        if self.dialect == "sqlite":
            return await self._in_thread(function, write=False)

        async def once(attempt: _Attempt[T]) -> T:
            async with self._connected(attempt) as connection:
                await connection.execution_options(isolation_level="REPEATABLE READ")
                async with connection.begin():
                    return await connection.run_sync(function)

        return await self._until_done(once, repeat=repeat)

    async def write(self, function: Callable[[Connection], T], *, alone: bool = False) -> T:
        """Run `function(connection)` in a write transaction and commit; `alone` keeps out all other writers.

        A transaction that PostgreSQL rolled back for another's sake (deadlock, serialisation), or whose connection was
        lost, is run again; one whose COMMIT has come to its end is not. Raises UnreachableError: then it was not
        committed, or (OutcomeUnknownError) that could not be found out in time. On SQLite a commit has either succeeded
        or raised, and there is nothing to find out.
        """
        if self.dialect == "sqlite":
            return await self._in_thread(function, write=True)

        async def once(attempt: _Attempt[T]) -> T:
            async with self._connected(attempt) as connection:
                return await self._write_once(connection, function, alone, attempt)

        return await self._until_done(once, stored="; nothing of it was stored")

    async def write_from_snapshot(self, function: Callable[[Connection], T], guard: Callable[[Connection], None]) -> T:
        """Run `function(connection)` in a transaction that writes from one state of the database (PostgreSQL).

        That state is younger than the locks that `guard(connection)` takes in a transaction beside it. Both may be run
        again when a connection was lost, also after a commit whose answer was: the function has to allow for that.
        """

        async def once(attempt: _Attempt[T]) -> T:
            # Both connections are there before anything is locked. One at a time: many of those who have one and wait
            # for their second would have taken all that there are.
            async with self._pairing, self._connected(attempt) as guarding, self._connected(attempt) as connection:
                await connection.execution_options(isolation_level="REPEATABLE READ")
                async with guarding.begin():
                    await guarding.execute(text(f"SELECT {_LOCKS[False]}(:key)"), {"key": _ADVISORY_LOCK})
                    await guarding.run_sync(guard)
                    async with connection.begin():
                        return await connection.run_sync(function)

        return await self._until_done(once)

    async def _in_thread(self, function: Callable[[Connection], T], *, write: bool) -> T:
        with translated(self.url, self.lock_timeout):
            async with self._turn if write or self.memory else nullcontext(), self.engine.connect() as connection:
                return await run_transaction(connection, function, write=write)

    async def _write_once(
        self, connection: AsyncConnection, function: Callable[[Connection], T], alone: bool, attempt: _Attempt[T]
    ) -> T:
        def transaction(inner: Connection) -> bool:
            if self.opened:
                attempt.identity = identities.begin(inner, _ADVISORY_LOCK, alone=alone)
            else:
                inner.execute(text(f"SELECT {_LOCKS[alone]}(:key)"), {"key": _ADVISORY_LOCK})
            forget_writing(inner)
            attempt.result = function(inner)
            return has_written(inner)

        async with connection.begin() as begun:
            attempt.committing = await connection.run_sync(transaction)
            if not attempt.committing:
                await begun.rollback()  # a take that found nothing need not wait for the disk
        result: T = attempt.result
        return result

    # Going on after a lost connection

    async def _until_done(
        self, once: Callable[[_Attempt[T]], Awaitable[T]], *, repeat: bool = True, stored: str = ""
    ) -> T:
        patience, conflicts = Patience(self._outage), 0
        while True:
            attempt: _Attempt[T] = _Attempt(patience.since)
            try:
                result = await once(attempt)
            except ReplayBufError as error:
                if is_transient(error) and conflicts + 1 < _ATTEMPTS:
                    conflicts += 1
                    await asyncio.sleep(0.01 * 2**conflicts)
                elif not (repeat and self.opened and self._is_lost(error, attempt)):
                    raise
                elif await self._was_committed(attempt, error, patience, stored):
                    return attempt.result  # type: ignore[no-any-return]
            else:
                self._outage.end()
                return result

    def _is_lost(self, error: ReplayBufError, attempt: _Attempt[Any]) -> bool:
        if self._outage.on and not attempt.connected and isinstance(error.__cause__, exc.TimeoutError):
            return True  # all connections of the pool are just being made, in vain
        # An answer to COMMIT that doesn't come is as good as lost.
        return is_lost(error, connected=attempt.connected and not attempt.committing)

    async def _was_committed(
        self, attempt: _Attempt[Any], error: ReplayBufError, patience: Patience, stored: str
    ) -> bool:
        """After a pause, whether a transaction whose connection was lost was committed; if not, it has ended."""
        while True:
            try:
                await patience.wait(error)
            except TimeoutError:
                if attempt.committing:
                    raise self._unknown(attempt, str(patience)) from error
                raise patience.given_up(stored) from error
            if attempt.identity is None:
                return False
            asking: _Attempt[bool] = _Attempt(patience.since)
            try:
                committed = await self._find_out(attempt.identity, asking)
            except ReplayBufError as later:
                if not self._is_lost(later, asking):
                    if attempt.committing:
                        raise self._unknown(attempt, str(later)) from later
                    raise
                error = later
            else:
                self._outage.end()
                return committed

    def _unknown(self, attempt: _Attempt[Any], why: str) -> OutcomeUnknownError:
        identity = attempt.identity
        assert identity is not None
        return OutcomeUnknownError(
            f"{why}; the answer to a commit was lost, and it isn't known whether it succeeded: a put with "
            "key= can be repeated, and what was taken comes back",
            lambda: self._find_out(identity, _Attempt()),
            attempt.result,
        )

    async def _find_out(self, identity: Identity, attempt: _Attempt[bool]) -> bool:
        """Whether a transaction was committed. One that is still running, without a client, is ended first."""
        async with self._connected(attempt) as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            for _ in range(_ENDING_LOOKS):
                if not await connection.run_sync(identities.end_if_running, identity):
                    return await connection.run_sync(identities.was_committed, identity)
                await asyncio.sleep(_ENDING_SECONDS)
            raise ConnectionError(f"the server process {identity.pid} of a lost connection doesn't end")

    def hurry(self) -> None:
        """The store is being closed: go on for a moment only (database's thread)."""
        self._outage.hurry()

    # Connections

    @asynccontextmanager
    async def _connected(self, attempt: _Attempt[Any]) -> AsyncIterator[AsyncConnection]:
        with translated(self.url, self.lock_timeout):
            async with self._outage.connecting(attempt.since) as connected, self.engine.connect() as connection:
                await connected()
                attempt.connected = True
                try:
                    yield connection
                except OSError as error:
                    if not isinstance(error, ReplayBufError):
                        await connection.invalidate(error)  # what SQLAlchemy doesn't know to mean that
                    raise

    @asynccontextmanager
    async def transaction(self, *, write: bool, alone: bool = False) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed at the end of the block and rolled back by an exception. It is not repeated."""
        turn = self._turn if write or self.memory else nullcontext()
        with translated(self.url, self.lock_timeout):
            async with turn, self.engine.connect() as connection:
                if write:
                    await connection.execution_options(replaybuf_write=True)
                elif self.dialect == "postgresql":
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                async with connection.begin():
                    if write and self.dialect == "postgresql":
                        await connection.execute(text(f"SELECT {_LOCKS[alone]}(:key)"), {"key": _ADVISORY_LOCK})
                    yield connection

    async def connect(self) -> AsyncConnection:
        """A connection of one's own, to be closed by the caller."""
        with translated(self.url, self.lock_timeout):
            return await self.engine.connect().start()

    async def dispose(self) -> None:
        """Close all connections."""
        await self.engine.dispose()
