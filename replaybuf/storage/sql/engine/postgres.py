"""PostgreSQL through asyncpg: transactions that go on after a lost connection.

A connection may be lost at any moment. A transaction that was not committed by then is repeated. When the answer to
COMMIT is lost, its identity tells whether it was committed (`engine.identity`). So a put is stored once, and taken
groups reach their taker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import Connection, exc
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine import identity as identities
from replaybuf.storage.sql.engine import locks
from replaybuf.storage.sql.engine.errors import is_conflict, is_lost, translated
from replaybuf.storage.sql.engine.identity import Identity
from replaybuf.storage.sql.engine.kept_connections import KeptConnections
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.outage import Outage, OutcomeUnknownError, Patience
from replaybuf.storage.sql.engine.port import Changes, Engine, Function, Steps
from replaybuf.storage.sql.engine.postgres_changes import Notifications
from replaybuf.storage.sql.engine.postgres_connections import (
    ISOLATION,
    MOST_CONNECTIONS,
    forget_writing,
    has_written,
    postgres_pool,
)
from replaybuf.storage.sql.engine.postgres_driver import PostgresDriver, commit, send
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction

if TYPE_CHECKING:
    import asyncpg

T = TypeVar("T")

_ATTEMPTS = 5
#: How often, and at what interval, to check whether a server process that was told to end is gone.
_ENDING_LOOKS, _ENDING_SECONDS = 100, 0.02


@dataclass(slots=True)
class _Attempt(Generic[T]):
    """How far a transaction got."""

    since: float | None = None  # when the operation's trouble began, if it had any
    connected: bool = False
    identity: Identity | None = None
    committing: bool = False
    last: Sequence[str] = ()
    result: Any = None


class PostgresEngine(Engine):
    """A PostgreSQL database. Lost connections are replaced for up to `reconnect_timeout` seconds."""

    writers = 4

    def __init__(
        self, url: URL, *, lock_timeout: float, reconnect_timeout: float = 60.0, read_only: bool = False
    ) -> None:
        super().__init__(url, lock_timeout)
        with translated(url, lock_timeout):
            self.pool = postgres_pool(url, lock_timeout=lock_timeout, read_only=read_only)
        self.kept = KeptConnections(self.pool, MOST_CONNECTIONS // 2)
        self._begin = f"BEGIN ISOLATION LEVEL {ISOLATION}{' READ ONLY' if read_only else ''};"
        self._pairing = asyncio.Lock()
        self._outage = Outage(self.where, reconnect_timeout)

    async def read(
        self, function: Function[T], scope: Scope = DEFAULT, *, brief: bool = False, single: bool = False
    ) -> T:
        async def once(attempt: _Attempt[T]) -> T:
            # A statement of its own sees one state, too.
            async with self._connected(attempt, "AUTOCOMMIT" if single else "REPEATABLE READ") as connection:
                if single:
                    return await connection.run_sync(lambda inner: function(self._direct(inner, scope)))
                async with connection.begin():
                    return await connection.run_sync(lambda inner: function(self._tx(inner, scope)))

        return await self._until_done(once)

    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        patience: float | None = None,
    ) -> T:
        async def once(attempt: _Attempt[T]) -> T:
            def transact(inner: Connection) -> bool:
                tx = self._direct(inner, scope)
                tx.mark = None if attempt.identity is None else attempt.identity.mark
                forget_writing(inner)
                attempt.result = function(tx)
                if has_written(inner) and tx.mark is not None:
                    tx.finish(identities.mark_statement(tx.mark))
                attempt.last = tx.last
                return has_written(inner)

            # SQLAlchemy would otherwise send a BEGIN of its own.
            async with self._connected(attempt, "AUTOCOMMIT") as connection:
                if self.opened:
                    attempt.identity = await connection.run_sync(identities.next_identity)
                async with self._begun(connection, attempt.identity, alone=alone, patience=patience) as raw:
                    attempt.committing = await connection.run_sync(transact)
                    # A take that found nothing needn't wait for the disk.
                    await (commit(raw, attempt.last) if attempt.committing else send(raw, "ROLLBACK;"))
            result: T = attempt.result
            return result

        return await self._until_done(once, stored="; nothing of it was stored")

    @asynccontextmanager
    async def _begun(
        self, connection: AsyncConnection, identity: Identity | None, *, alone: bool, patience: float | None
    ) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Begin a transaction and take its locks in one message; yields the driver's connection, to end it."""
        raw: Any = (await connection.get_raw_connection()).driver_connection
        try:
            bound = "" if patience is None else f"SET LOCAL lock_timeout = {round(patience * 1000)};"
            await send(raw, self._begin + bound + locks.first(None if identity is None else identity.lock, alone=alone))
            yield raw
        except OSError:  # the connection can't be used any more
            raise
        except Exception:
            try:
                await send(raw, "ROLLBACK;")
            except Exception:  # it was lost, perhaps in the middle of an operation
                await connection.invalidate()
            raise
        except BaseException:  # it isn't known what the server has made of it
            await connection.invalidate()
            raise

    async def write_beside(
        self, function: Function[T], guard: Function[object], confirm: Function[object], scope: Scope = DEFAULT
    ) -> T:
        async def once(attempt: _Attempt[T]) -> T:
            # Both connections are acquired before anything is locked. One operation at a time: many that have one
            # connection and wait for their second would exhaust the pool.
            async with (
                self._pairing,
                self._connected(attempt, ISOLATION) as guarding,
                self._connected(attempt, "REPEATABLE READ") as connection,
            ):
                async with guarding.begin():
                    await guarding.run_sync(lambda inner: guard(self._tx(inner, scope)))
                    async with connection.begin():
                        result = await connection.run_sync(lambda inner: function(self._tx(inner, scope)))
                        # Only now: who wants to write alone would wait for all of it, and all others for them.
                        await guarding.run_sync(_keep_out, alone=False)
                        await guarding.run_sync(lambda inner: confirm(self._tx(inner, scope)))
                return result

        return await self._until_done(once)

    def _tx(self, connection: Connection, scope: Scope) -> Transaction:
        return Transaction(connection, self.dialect, scope)

    def _direct(self, connection: Connection, scope: Scope) -> Transaction:
        """Return a transaction that wasn't begun by SQLAlchemy, which it needn't pass through."""
        return Transaction(connection, self.dialect, scope, PostgresDriver(connection))

    # Going on after a lost connection

    async def _until_done(self, once: Callable[[_Attempt[T]], Awaitable[T]], *, stored: str = "") -> T:
        patience, conflicts = Patience(self._outage), 0
        while True:
            attempt: _Attempt[T] = _Attempt(patience.since)
            try:
                result = await once(attempt)
            except ReplayBufError as error:
                if is_conflict(error) and conflicts + 1 < _ATTEMPTS:
                    conflicts += 1
                    await asyncio.sleep(0.01 * 2**conflicts)
                elif not (self.opened and self._is_lost(error, attempt)):
                    raise
                elif await self._was_committed(attempt, error, patience, stored):
                    return attempt.result  # type: ignore[no-any-return]
            else:
                self._outage.end()
                return result

    def _is_lost(self, error: ReplayBufError, attempt: _Attempt[Any]) -> bool:
        if self._outage.on and not attempt.connected and isinstance(error.__cause__, exc.TimeoutError):
            return True  # the pool is busy making connections that fail
        # An answer to COMMIT that doesn't arrive counts as lost.
        return is_lost(error, connected=attempt.connected and not attempt.committing)

    async def _was_committed(
        self, attempt: _Attempt[Any], error: ReplayBufError, patience: Patience, stored: str
    ) -> bool:
        """Pause, then return whether a transaction that lost its connection was committed; if not, it has ended."""
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
        """Return whether a transaction was committed. If it still runs, without a client, it is ended first."""
        async with self._connected(attempt, "AUTOCOMMIT") as connection:
            for _ in range(_ENDING_LOOKS):
                if not await connection.run_sync(identities.end_if_running, identity):
                    return await connection.run_sync(identities.was_committed, identity)
                await asyncio.sleep(_ENDING_SECONDS)
            raise ConnectionError("the server process of a lost connection doesn't end")

    def hurry(self) -> None:
        self._outage.hurry()

    # Connections

    @asynccontextmanager
    async def _connected(self, attempt: _Attempt[Any], level: IsolationLevel) -> AsyncIterator[AsyncConnection]:
        with translated(self.url, self.lock_timeout):
            async with self._outage.connecting(attempt.since) as connected, self.kept.connection(level) as connection:
                await connected()
                attempt.connected = True
                try:
                    yield connection
                except OSError as error:
                    if not isinstance(error, ReplayBufError):
                        await connection.invalidate(error)  # SQLAlchemy doesn't recognise all such errors
                    raise

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Steps]:
        with translated(self.url, self.lock_timeout):
            level: IsolationLevel = ISOLATION if write else "REPEATABLE READ"
            async with self.kept.connection(level) as connection, connection.begin():
                if write:
                    await connection.run_sync(_keep_out, alone=alone)
                yield Steps(self, connection, scope)

    def changes(self, hint: Callable[[], object]) -> Changes:
        return Notifications(self.connect, self.kept, hint)

    async def connect(self) -> AsyncConnection:
        """Return a separate connection, to be closed by the caller."""
        with translated(self.url, self.lock_timeout):
            return await self.kept.take()

    async def dispose(self) -> None:
        await self.kept.close()
        await self.pool.dispose()


def _keep_out(connection: Connection, *, alone: bool) -> None:
    """Keep out other writers, or only exclusive ones."""
    connection.execute(locks.TAKE if alone else locks.TAKE_SHARED, {"key": Lock.WRITERS})
