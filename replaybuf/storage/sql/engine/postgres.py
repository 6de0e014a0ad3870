"""PostgreSQL through asyncpg: transactions, repeated until the outcome of each is known; polls for commits.

A transaction that wasn't committed is repeated, one that was isn't: if the answer to a COMMIT is lost, the transaction
is repeated with the same commit stamp (`engine.locks`). So even if a connection is lost at any moment, no put is
stored twice, and taken groups reach their taker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from replaybuf.errors import FencedError, LockedError, ReplayBufError
from replaybuf.storage.sql.engine import locks
from replaybuf.storage.sql.engine.database import Access, CommitWatch, Database, Function, Step
from replaybuf.storage.sql.engine.driver_errors import (
    CommitUnansweredError,
    is_conflict,
    is_lost,
    translated,
)
from replaybuf.storage.sql.engine.locks import READ_STAMP, is_raised, raise_stamp
from replaybuf.storage.sql.engine.outage import COMMIT_SECONDS, Attempt, Outage, OutcomeUnknownError, Patience
from replaybuf.storage.sql.engine.postgres_connect import Connection, is_other_server
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES
from replaybuf.storage.sql.engine.postgres_pool import Pool
from replaybuf.storage.sql.engine.postgres_transaction import PostgresTransaction, commit, run, send
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, on_statement

#: How often a transaction is tried that the server rolls back in favour of another.
_ATTEMPTS = 5

T = TypeVar("T")

#: For all write transactions. After a wait for a lock, a statement must see concurrent commits: fences, counts and the
#: creation of the schema depend on that.
_WRITES = "READ COMMITTED"
#: For all reads, which see one snapshot of the database.
_READS = "REPEATABLE READ"


class PostgresDatabase(Database):
    """A PostgreSQL database. Lost connections are replaced for up to `reconnect_timeout` seconds."""

    dialect = POSTGRES
    writers = 4

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        with translated(access):
            self.pool = Pool(access)
        self._outage = Outage(self.where, access.reconnect_timeout)

    async def read(self, function: Function[T], scope: Scope = DEFAULT, *, single: bool = False) -> T:
        async def once(attempt: Attempt[T]) -> T:
            async with self._lent_connection(attempt) as connection:
                tx = PostgresTransaction(connection, scope)
                if single:  # a single statement sees one snapshot, too
                    return await run(lambda: function(tx))
                async with self._transaction(connection, self._begin(_READS)):
                    result = await run(lambda: function(tx))
                    await commit(connection)
                return result

        return await self._repeat_until_done(once)

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
        bound = "" if patience is None else f"SET LOCAL lock_timeout = {round(patience * 1000)};"

        async def once(attempt: Attempt[T]) -> T:
            async with self._lent_connection(attempt) as connection:
                self._refuse_lost(accepts_loss=accepts_loss)
                async with self._write_transaction(connection, attempt, alone=alone, bound=bound):
                    waiting: list[str] = []
                    tx = PostgresTransaction(connection, scope, waiting)
                    was_committed = attempt.stamp is not None and not attempt.is_raised  # by the attempt before
                    if not was_committed:
                        attempt.result = await run(lambda: function(tx))
                        # Sent with COMMIT, they would be given up while they wait for a lock, and be in doubt.
                        if waiting and self.access.lock_timeout >= max(
                            COMMIT_SECONDS, self._outage.remaining(attempt.since)
                        ):
                            await run(lambda: tx.flush(waiting))
                    # A take that found no groups needn't wait for the disk.
                    attempt.committing = was_committed or connection.has_written
                    if attempt.committing:
                        await self._commit(connection, waiting, attempt.since)
                    else:
                        await send(connection, "ROLLBACK;")
                if attempt.committing:
                    self._note_commit(attempt, accepts_loss=accepts_loss)
            return attempt.result  # type: ignore[no-any-return]

        return await self._repeat_until_done(once, stored="; nothing of it was stored")

    async def _commit(self, connection: Connection, last: Sequence[str] = (), since: float | None = None) -> None:
        """Commit, after last statements, in the time for attempts that began at `since`, by default now.

        Raises CommitUnansweredError.
        """
        async with self._commit_answered(since):
            await commit(connection, last)

    @asynccontextmanager
    async def _commit_answered(self, since: float | None = None) -> AsyncIterator[None]:
        began = time.monotonic()
        try:
            async with self._outage.bounded(began if since is None else since, began + COMMIT_SECONDS):
                yield
        except TimeoutError:
            raise CommitUnansweredError(f"a commit had no answer for {time.monotonic() - began:.0f} s") from None

    @property
    def missing_commits(self) -> str:
        return self.pool.servers.lost

    def _refuse_lost(self, *, accepts_loss: bool = False) -> None:
        if self.missing_commits and not accepts_loss:
            raise FencedError(self.missing_commits, reason="commits lost")

    def _note_commit(self, attempt: Attempt[Any], *, accepts_loss: bool = False) -> None:
        """Record a commit. Raises OSError if this process meanwhile follows another server, which lacks the commit."""
        if attempt.server is not None and self.pool.servers.is_superseded(attempt.server):
            raise ConnectionResetError("meanwhile another server took over")
        if accepts_loss:
            self.pool.servers.accept()
        if attempt.stamp is not None:
            self.pool.servers.note_commit(attempt.stamp)

    def _begin(self, level: str) -> str:
        return f"BEGIN ISOLATION LEVEL {level}{' READ ONLY' if self.access.read_only else ''};"

    @asynccontextmanager
    async def _write_transaction(
        self, connection: Any, attempt: Attempt[Any], *, alone: bool, bound: str = ""
    ) -> AsyncIterator[None]:
        """Begin a write in one message, which takes the locks and raises the stamp; the block must end it.

        Before the tables exist, there are no stamps.
        """
        begin = self._begin(_WRITES) + bound + connection.same_server() + locks.first(alone=alone)
        if self.opened:
            attempt.stamp = attempt.stamp or connection.next_stamp()
            begin += raise_stamp(attempt.stamp)
        async with self._transaction(connection, begin) as status:
            attempt.is_raised = is_raised(status)
            yield

    @asynccontextmanager
    async def _transaction(self, connection: Connection, begin: str) -> AsyncIterator[str]:
        """Begin a transaction in one message; the block must end it. Rolled back on an exception.

        Yields the server's answer to the last statement of the message.
        """
        try:
            on_statement(begin)
            try:
                status = await send(connection, begin)
            except Exception as error:
                if is_other_server(error):
                    raise ConnectionResetError("another server than before answers on a connection") from None
                raise
            yield status
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, ReplayBufError):
                raise  # the connection can't be used any more; errors like FullError come from the transaction itself
            try:
                await send(connection, "ROLLBACK;")
            except Exception:  # lost, perhaps in the middle of an operation
                await self.pool.discard(connection)
            raise

    def cut_retries(self) -> None:
        self._outage.cut_retries()

    # Retries

    async def _repeat_until_done(self, once: Callable[[Attempt[T]], Awaitable[T]], *, stored: str = "") -> T:
        """Run `once` until it returns. If the answer to COMMIT was lost, the next attempt has its stamp and result."""
        patience, conflicts = Patience(self._outage), 0
        doubtful: Attempt[T] | None = None
        while True:
            attempt: Attempt[T] = Attempt(patience.since)
            if doubtful is not None:
                attempt.stamp, attempt.result = doubtful.stamp, doubtful.result
            try:
                result = await once(attempt)
            except ReplayBufError as error:
                if attempt.is_raised:  # so the attempt before wasn't committed
                    doubtful = None
                if is_conflict(error) and conflicts + 1 < _ATTEMPTS:
                    conflicts += 1
                    await asyncio.sleep(0.01 * 2**conflicts)
                    continue
                if attempt.committing and attempt.stamp is not None:
                    if error.reason == "commit unanswered":
                        raise self._doubt_error(attempt, f"{error}. The primary may have it", error.reason) from error
                    if self._is_lost(error, attempt):
                        doubtful = attempt
                cause = self._repeatable_error(error, attempt, doubtful)
                try:
                    if cause is None:
                        raise
                    await patience.wait(cause)
                except (TimeoutError, ReplayBufError) as end:
                    if doubtful is not None and not isinstance(end, FencedError):
                        sentence = "the answer to a commit was lost, and it isn't known whether it succeeded"
                        raise self._doubt_error(doubtful, f"{patience if cause else error}; {sentence}") from error
                    if cause is not None and isinstance(end, TimeoutError):
                        raise patience.given_up(stored) from error
                    raise
            else:
                self._outage.end()
                return result

    def _repeatable_error(
        self, error: ReplayBufError, attempt: Attempt[Any], doubtful: Attempt[Any] | None
    ) -> ReplayBufError | None:
        """Return the error for which an attempt is repeated; None if it isn't."""
        if not self.opened:
            return None
        # Perhaps a lock is that of the transaction whose answer was lost.
        waits = doubtful is not None and (isinstance(error, LockedError) or error.reason == "pool busy")
        return error if waits or self._is_lost(error, attempt) else None

    def _is_lost(self, error: ReplayBufError, attempt: Attempt[Any]) -> bool:
        if self._outage.on and not attempt.connected and error.reason == "pool busy":
            return True  # the pool is busy making connections that fail
        # A lost answer to COMMIT counts as a lost connection.
        return is_lost(error, connected=attempt.connected and not attempt.committing)

    def _doubt_error(self, attempt: Attempt[Any], sentence: str, reason: str = "") -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{sentence}: a put with key= can be repeated, and what was taken comes back",
            lambda: self._was_committed(attempt),
            attempt.result,
            reason=reason,
        )

    async def _was_committed(self, attempt: Attempt[Any]) -> bool:
        """Return whether the transaction of an attempt was committed, once it has ended, and is replicated."""
        stamp, asking = attempt.stamp, Attempt[bool]()
        assert stamp is not None
        async with (
            self._lent_connection(asking) as connection,
            self._commit_answered(),
            connection.transaction(isolation="read_committed"),
        ):
            number = await connection.fetchval(READ_STAMP, stamp.row, stamp.number - 1)
        return bool(number == stamp.number)

    # Connections

    @asynccontextmanager
    async def _lent_connection(self, attempt: Attempt[Any]) -> AsyncIterator[Connection]:
        with translated(self.access):
            async with self.pool.lend(self._outage.bounded(attempt.since)) as connection:
                attempt.connected, attempt.server = True, connection.server
                yield connection

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Step]:
        attempt: Attempt[None] = Attempt()
        with translated(self.access):
            async with self.pool.lend() as connection:
                if write:
                    self._refuse_lost()
                attempt.server = connection.server
                async with (
                    self._write_transaction(connection, attempt, alone=alone)
                    if write
                    else self._transaction(connection, self._begin(_READS))
                ):
                    tx = PostgresTransaction(connection, scope)
                    yield lambda function, *args: run(partial(function, tx, *args))
                    await self._commit(connection)
                    self._note_commit(attempt)

    def changes(self) -> CommitWatch:
        return Stamps(self.pool)

    async def dispose(self) -> None:
        await self.pool.close()


# Commits of other processes

# Every commit of an open buffer raises it, and nothing that is rolled back does.
_STAMPS = "SELECT sum(number) FROM rb_info"
#: The seconds of a poll at most.
_LONGEST_SECONDS = 5.0


class Stamps(CommitWatch):
    """Polls the commit stamps (`engine.locks`)."""

    longest_gap = 0.1

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._sum: Any = None

    async def poll(self) -> bool:
        async with asyncio.timeout(_LONGEST_SECONDS), self._pool.lend() as connection:
            previous, self._sum = self._sum, await connection.fetchval(_STAMPS)
        return self._sum != previous  # type: ignore[no-any-return]
