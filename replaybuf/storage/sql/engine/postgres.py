"""PostgreSQL through asyncpg: transactions, retried after a lost connection (`engine.postgres_recovery`).

Even if a connection is lost at any moment, no put is stored twice, and taken groups reach their taker.
`Notifications` publish this process's commits to other processes, and watch for theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy.engine import URL

from replaybuf.errors import FencedError, ReplayBufError
from replaybuf.passwords import PasswordFunction
from replaybuf.storage.sql.engine import locks
from replaybuf.storage.sql.engine.commit_stamp import confirm, is_raised, raise_stamp
from replaybuf.storage.sql.engine.database import CommitWatch, Database, DependsOn, Function, Steps
from replaybuf.storage.sql.engine.errors import OtherServerError, says_unknown, translated
from replaybuf.storage.sql.engine.hooks import on_statement
from replaybuf.storage.sql.engine.outage import Attempt, Outage
from replaybuf.storage.sql.engine.postgres_connect import Connection, is_other_server
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES
from replaybuf.storage.sql.engine.postgres_pool import Pool, PostgresSession, commit, run, send
from replaybuf.storage.sql.engine.postgres_recovery import CommitWaits, Recovery
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.engine.urls import public_url
from replaybuf.storage.values import RECONNECT_SECONDS

_CHANNEL = "replaybuf"
# Only the notification depends on its commit, so synchronous_commit can be off.
_ANNOUNCE = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{_CHANNEL}', '')"
# Every commit on the server changes its snapshot.
SNAPSHOT = "SELECT CAST(pg_current_snapshot() AS text)"
_LONGEST_SECONDS = 5.0
#: The seconds between two polls: of a server that may not deliver notifications, and once one has been heard.
_POLL_SECONDS, _HEARING_SECONDS = 0.5, 1.0

_logger = logging.getLogger("replaybuf.watch")


class Notifications(CommitWatch):
    """NOTIFY as an immediate hint, and polls of the server's snapshot as the guarantee.

    A notification may be lost with its sender, and a LISTEN connection can die silently. Where a server lacks either
    feature, polling replaces it, with one warning.
    """

    seconds = _POLL_SECONDS
    announces = True

    def __init__(self, url: URL, lock_timeout: float, pool: Pool, hint: Callable[[], object]) -> None:
        self._url, self._lock_timeout = url, lock_timeout
        self._pool = pool
        self._hint = hint
        self._listening: Any = None
        self._snapshot: str | None = None
        self._listens = self._has_snapshots = True

    async def look(self) -> bool:
        with translated(self._url, self._lock_timeout):
            if (old := self._listening) is not None and (old.is_closed() or self._pool.servers.is_left(old.standing)):
                await self.close()
            if self._listening is None and self._listens:
                self._listens = await self._listen()
            return await self._has_changed()

    async def _listen(self) -> bool:
        """LISTEN for notifications; return whether the server supports it."""
        self._listening = await self._pool.take()
        try:
            await self._listening.add_listener(_CHANNEL, self._heard)
        except Exception as error:
            self._do_without("LISTEN", error, "waits notice by polling, within half a second, what others have put")
            await self.close()
            return False
        await self.announce()  # hearing it oneself shows that notifications arrive
        return True

    def _heard(self, *_: object) -> None:
        self.seconds = _HEARING_SECONDS
        self._hint()

    async def _has_changed(self) -> bool:
        if not self._has_snapshots:
            return True  # waiting calls then poll by themselves
        try:
            snapshot: str = await self._ask(lambda connection: connection.fetchval(SNAPSHOT))
        except Exception as error:
            self._do_without("pg_current_snapshot", error, "who waits reads the buffer twice a second")
            self._has_snapshots = False
            return True
        changed, self._snapshot = snapshot != self._snapshot, snapshot
        return changed

    def _do_without(self, what: str, error: Exception, effect: str) -> None:
        """Log once that the server lacks a feature. Reraises any other error."""
        if not says_unknown(error):
            raise error
        _logger.warning("%s has no %s (%s): %s", public_url(self._url), what, error, effect)

    async def announce(self) -> None:
        # Only a hint, and not retried: if it is lost, other processes notice the commit at their next poll.
        with translated(self._url, self._lock_timeout):
            try:
                await self._ask(lambda connection: connection.execute(_ANNOUNCE))
            except Exception as error:
                self._do_without("NOTIFY", error, "others notice by polling what is put here")
                self.announces = False

    async def close(self) -> None:
        connection, self._listening, self._snapshot = self._listening, None, None
        self.seconds = _POLL_SECONDS
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._pool.discard(connection)

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a query as a transaction of its own."""
        async with asyncio.timeout(_LONGEST_SECONDS), self._pool.lend() as connection:
            return await ask(connection)


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

    def __init__(
        self,
        url: URL,
        *,
        lock_timeout: float,
        reconnect_timeout: float = RECONNECT_SECONDS,
        read_only: bool = False,
        password: PasswordFunction | None = None,
        guard: Function[object] | None = None,
    ) -> None:
        super().__init__(url, lock_timeout, guard)
        with translated(url, lock_timeout):
            self.pool = Pool(url, lock_timeout=lock_timeout, read_only=read_only, password=password)
        self._read_only = read_only
        self._pairing = asyncio.Lock()
        self._outage = Outage(self.where, reconnect_timeout)
        self._waits = CommitWaits(self.where, self._outage, self.pool.servers.connect)
        self._recovery = Recovery(self._outage, self._waits, self._connected, lambda: self.opened)

    async def read(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        brief: bool = False,
        single: bool = False,
        depends_on: DependsOn = DependsOn.NOTHING,
    ) -> T:
        async def once(attempt: Attempt[T]) -> T:
            async with self._connected(attempt) as connection:
                self._check_followed(depends_on)
                tx = Transaction(PostgresSession(connection), scope)
                if single:  # a single statement sees one snapshot, too
                    return await run(lambda: function(tx))
                async with self._begun(connection, self._begin(_READS)):
                    result = await run(lambda: function(tx))
                    await commit(connection)
                return result

        return await self._recovery.until_done(once)

    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        fenced: bool = True,
        patience: float | None = None,
        depends_on: DependsOn = DependsOn.NOTHING,
    ) -> T:
        work = self._behind_fence(function) if fenced else function
        bound = "" if patience is None else f"SET LOCAL lock_timeout = {round(patience * 1000)};"

        async def once(attempt: Attempt[T]) -> T:
            def transact(session: PostgresSession) -> Sequence[str] | None:
                tx = Transaction(session, scope)
                attempt.result = work(tx)
                # A take that found no groups needn't wait for the disk.
                return tx.last if session.has_written or tx.last else None

            async with self._connected(attempt) as connection:
                self._check_followed(depends_on)
                async with self._begun_writing(connection, attempt, alone=alone, bound=bound):
                    last: Sequence[str] | None
                    if attempt.stamp is not None and not attempt.is_raised:  # committed by the attempt before
                        last = [confirm(attempt.stamp)]
                    else:
                        session = PostgresSession(connection)
                        last = await run(lambda: transact(session))
                    attempt.committing = last is not None
                    if last is not None:
                        await self._commit(connection, last, attempt.since)
                    else:
                        await send(connection, "ROLLBACK;")
                if attempt.committing:
                    self._committed(attempt, depends_on)
            return attempt.result  # type: ignore[no-any-return]

        # With a bound on lock waits, a locked transaction isn't retried.
        return await self._recovery.until_done(
            once, stored="; nothing of it was stored", repeats_locked=patience is None
        )

    async def _commit(self, connection: Connection, last: Sequence[str] = (), since: float | None = None) -> None:
        """Commit, after last statements. Raises StandbyWaitEnded when the wait for a standby takes too long."""
        async with self._waits.bounded(since, patient=self.opened):
            await commit(connection, last)
        self._waits.end()

    def _check_followed(self, depends_on: DependsOn) -> None:
        if depends_on is DependsOn.SEEN_COMMITS and self.pool.servers.lost:
            raise FencedError(self.pool.servers.lost, reason="commits lost")

    def _committed(self, attempt: Attempt[Any], depends_on: DependsOn) -> None:
        """Record a commit. Raises OSError if this process meanwhile follows another server, which lacks the commit."""
        if self.pool.servers.is_left(attempt.server):
            raise ConnectionResetError("meanwhile another server took over")
        if depends_on is DependsOn.CHECKPOINT:
            self.pool.servers.accept()
        if attempt.stamp is not None:
            self.pool.servers.seen.add(attempt.stamp, attempt.began)

    def _begin(self, level: str) -> str:
        return f"BEGIN ISOLATION LEVEL {level}{' READ ONLY' if self._read_only else ''};"

    @asynccontextmanager
    async def _begun_writing(
        self, connection: Any, attempt: Attempt[Any], *, alone: bool, bound: str = ""
    ) -> AsyncIterator[None]:
        """Begin a write in one message, which takes the locks and raises the stamp; the block must end it.

        Before the tables exist, there are no stamps.
        """
        begin = self._begin(_WRITES) + bound + connection.same_server() + locks.first(alone=alone)
        if self.opened:
            attempt.stamp = attempt.stamp or connection.next_stamp()
            begin += raise_stamp(attempt.stamp)
        async with self._begun(connection, begin) as status:
            attempt.is_raised = is_raised(status)
            yield

    @asynccontextmanager
    async def _begun(self, connection: Connection, begin: str) -> AsyncIterator[str]:
        """Begin a transaction in one message; the block must end it. Rolled back on an exception.

        Yields the server's answer to the last statement of the message.
        """
        try:
            on_statement(begin)
            try:
                status = await send(connection, begin)
            except Exception as error:
                if is_other_server(error):
                    raise OtherServerError from None  # the server's error would mean nothing to a user
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

    # Connections

    @asynccontextmanager
    async def _connected(self, attempt: Attempt[Any]) -> AsyncIterator[Connection]:
        with translated(self.url, self.lock_timeout):
            async with self._outage.connecting(attempt.since) as connected, self.pool.lend() as connection:
                await connected()
                attempt.connected, attempt.server = True, connection.standing
                yield connection

    @asynccontextmanager
    async def transaction(self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False) -> AsyncIterator[Steps]:
        attempt: Attempt[None] = Attempt()
        with translated(self.url, self.lock_timeout):
            async with self.pool.lend() as connection:
                self._check_followed(DependsOn.SEEN_COMMITS if write else DependsOn.NOTHING)
                attempt.server = connection.standing
                async with (
                    self._begun_writing(connection, attempt, alone=alone)
                    if write
                    else self._begun(connection, self._begin(_READS))
                ):
                    session = PostgresSession(connection)
                    steps = Steps(Transaction(session, scope), run, lambda: send(connection, "ROLLBACK;"))
                    yield steps
                    if not steps.is_over:
                        await self._commit(connection)
                        self._committed(attempt, DependsOn.NOTHING)

    def changes(self, hint: Callable[[], object]) -> CommitWatch:
        return Notifications(self.url, self.lock_timeout, self.pool, hint)

    @property
    def lent(self) -> int:
        return self.pool.lent

    async def dispose(self) -> None:
        await self.pool.close()
