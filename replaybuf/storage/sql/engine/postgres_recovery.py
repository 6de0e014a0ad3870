"""Retries after a lost connection: a transaction that wasn't committed is repeated, one that was isn't.

If the answer to a COMMIT is lost, the transaction is repeated with the same commit stamp (`engine.commit_stamp`).

Commits that wait for a synchronous standby are detected, logged, and abandoned after a time. PostgreSQL waits for the
standby after the commit is in the primary's own WAL: without a limit, and with all locks of the transaction. If the
wait is interrupted (a cancelled statement, a lost connection), the commit stays on the primary, visible to all. Later
commits follow it in the WAL, and wait for both. So a confirmed commit is on the standby, and one whose wait was
abandoned is in doubt until a later commit was replicated (`engine.commit_stamp.READ_STAMP`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from replaybuf.errors import FencedError, LockedError, ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.commit_stamp import READ_STAMP
from replaybuf.storage.sql.engine.errors import StandbyWaitEnded, is_conflict, is_lost
from replaybuf.storage.sql.engine.outage import (
    Attempt,
    Outage,
    OutcomeUnknownError,
    Patience,
)
from replaybuf.units import number_of

if TYPE_CHECKING:
    import asyncpg


#: After this time a commit is slow, and a query asks whether it waits for a standby. Shorter waits are ordinary.
SLOW_SECONDS = 2.0
#: Commits that wait longer for a standby explain why other transactions are slow, or wait for locks.
_TELLING_SECONDS = 0.5
#: Timeout of the query for them.
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE = 30.0

_logger = logging.getLogger("replaybuf.database")

#: Query of a primary's `Synchronous`. Roles without rights to other roles' sessions see only their own.
ASK = """
SELECT coalesce(current_setting('synchronous_standby_names', true), ''),
    (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'),
    (SELECT CASE WHEN bool_or(sync_state IS NULL) THEN NULL ELSE
        count(*) FILTER (WHERE state = 'streaming' AND sync_state IN ('sync', 'quorum')) END FROM pg_stat_replication),
    (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'
        AND query_start < clock_timestamp() - make_interval(secs => {seconds}))
"""
_NUMBER = re.compile(r"(?:(?:FIRST|ANY)\s*)?(\d+)\s*\(", re.IGNORECASE)

#: Advice if too few standbys are connected, and if they are connected but lag.
START_ONE = (
    "start the standby, with a name (application_name in its primary_conninfo) that is in this list; or let commits "
    "wait for none: ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf()"
)
HASTEN = "look at the disk and the network of the standby, and at pg_stat_replication on the primary"


class Synchronous(NamedTuple):
    """Synchronous replication as reported by a primary.

    `names` is `synchronous_standby_names`, `standbys` the number of connected standbys of any kind, `there` the number
    of synchronous ones (None if the role may not see it), and `waiting` the number of commits that wait for long.
    """

    names: str
    standbys: int
    there: int | None
    waiting: int

    @property
    def wanted(self) -> int:
        """The number of standbys that must have a commit."""
        found = _NUMBER.match(self.names.strip())
        return int(found[1]) if found else 1 if self.names.strip() else 0

    @property
    def is_short(self) -> bool:
        """Whether too few standbys are connected for commits to succeed; False if not known."""
        return (self.standbys if self.there is None else self.there) < self.wanted

    def __str__(self) -> str:
        """The configured and the connected standbys, as the rest of a sentence."""
        asked = f"synchronous_standby_names = '{self.names}' asks for {number_of(self.wanted, 'standby')}"
        if self.there is None:
            return f"{asked}, and {self.standbys} of any kind {_are(self.standbys)} connected"
        others = f" ({self.standbys} of any kind)" if self.standbys > self.there else ""
        return f"{asked}, and {self.there} {_are(self.there)} connected{others}"

    @property
    def what_to_do(self) -> str:
        """Advice for users whose commits wait."""
        return START_ONE if self.is_short or self.there is None else HASTEN


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


class CommitWaits:
    """Detects a store's commits that wait for a synchronous standby. `connect` makes a connection outside the pool."""

    def __init__(self, where: str, outage: Outage, connect: Callable[[], Awaitable[Any]]) -> None:
        self._where = where
        self._outage = outage
        self._connect = connect
        self._asking = asyncio.Lock()
        self._answer: tuple[float, str] = (-SLOW_SECONDS, "")  # time and result of the last query
        self._since: float | None = None

    @asynccontextmanager
    async def bounded(self, since: float | None = None, *, patient: bool = True) -> AsyncIterator[None]:
        """Abandon a wait for a standby in this block when the time for attempts that began at `since` is over.

        Without `since` it begins now; with `patient` false, the wait ends as soon as its cause is known. A commit that
        is slow for another reason isn't interrupted. Raises StandbyWaitEnded.
        """
        began = time.monotonic()
        watching: list[asyncio.Task[str]] = []
        limit = asyncio.timeout(None)

        def watch() -> None:
            start = (began if since is None else since) if patient else began - self._outage.seconds
            watching.append(asyncio.create_task(self._watch(limit, start)))

        slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, watch)
        try:
            async with limit:
                yield
                if limit.expired():
                    await asyncio.sleep(0)  # lets the pending cancellation arrive
        except TimeoutError:
            if not limit.expired():
                raise
            waited = time.monotonic() - began
            raise StandbyWaitEnded(f"{watching[0].result()}; it waited for {waited:.0f} s") from None
        finally:
            slow.cancel()
            for task in watching:
                task.cancel()
            self._outage.release(limit)

    def end(self) -> None:
        """Record that a commit was confirmed."""
        if self._since is not None:
            since, self._since = self._since, None
            _logger.info(
                "%s: commits wait for no standby any more, after %.1f s", self._where, time.monotonic() - since
            )

    async def why(self) -> str:
        """Return a sentence about commits that currently wait for a standby; an empty string if none does."""
        async with self._asking:
            if time.monotonic() >= self._answer[0] + SLOW_SECONDS:
                found = await self._ask()
                self._answer = time.monotonic(), found
                if found and self._since is None:
                    self._since = time.monotonic()
                    _logger.warning("%s: %s", self._where, found)
            return self._answer[1]

    async def _watch(self, limit: asyncio.Timeout, since: float) -> str:
        """Bound a commit that waits for a standby, and return the sentence about it."""
        pause = SLOW_SECONDS
        while not (said := await self.why()):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._outage.restrict(limit, since)
        return said

    async def _ask(self) -> str:
        # On a separate connection: all of the pool may be in use by waiting commits.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = await self._connect()
                try:
                    found = Synchronous(*await connection.fetchrow(ASK.format(seconds=_TELLING_SECONDS)))
                finally:
                    connection.terminate()
            if found.waiting:
                return f"the commit waits for a synchronous standby: {found}; {found.what_to_do}"
        return ""


T = TypeVar("T")

_ATTEMPTS = 5
#: How long to look for a commit whose wait for a standby was abandoned.
_LOOKING_SECONDS = 5.0


# Retried transactions


class Recovery:
    """Retries a store's transactions until the outcome of each is known.

    `connected(attempt)` lends a connection, and `is_opened()` returns whether the store is open; before that nothing is
    retried.
    """

    def __init__(
        self,
        outage: Outage,
        waits: CommitWaits,
        connected: Callable[[Attempt[Any]], AbstractAsyncContextManager[asyncpg.Connection[Any]]],
        is_opened: Callable[[], bool],
    ) -> None:
        self._outage, self._waits, self._connected, self._is_opened = outage, waits, connected, is_opened

    async def until_done(
        self,
        once: Callable[[Attempt[T]], Awaitable[T]],
        *,
        stored: str = "",
        repeats_locked: bool = True,
    ) -> T:
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
                    if error.reason == "standby awaited":
                        raise await self._not_replicated(attempt, error) from error
                    if self._is_lost(error, attempt):
                        doubtful = attempt
                why = await self._why_again(error, attempt, doubtful, repeats_locked=repeats_locked)
                try:
                    if why is None:
                        raise
                    await patience.wait(why)
                except (TimeoutError, ReplayBufError) as end:
                    if doubtful is not None and not isinstance(end, FencedError):
                        raise self._unknown(doubtful, str(patience if why else error)) from error
                    if why is not None and isinstance(end, TimeoutError):
                        raise patience.given_up(stored) from error
                    raise
            else:
                self._outage.end()
                return result

    async def _why_again(
        self, error: ReplayBufError, attempt: Attempt[Any], doubtful: Attempt[Any] | None, *, repeats_locked: bool
    ) -> ReplayBufError | None:
        """Return the error for which an attempt is repeated; None if it isn't."""
        if not self._is_opened():
            return None
        if self._is_lost(error, attempt):
            return error
        is_locked = isinstance(error, LockedError) or error.reason == "pool busy"
        if is_locked and repeats_locked and (why := await self._waits.why()):
            return UnreachableError(f"{error}; {why}", reason="standby awaited")
        # Perhaps the lock is that of the transaction whose answer was lost.
        return error if is_locked and doubtful is not None else None

    def _is_lost(self, error: ReplayBufError, attempt: Attempt[Any]) -> bool:
        if self._outage.on and not attempt.connected and error.reason == "pool busy":
            return True  # the pool is busy making connections that fail
        # A lost answer to COMMIT counts as a lost connection.
        return is_lost(error, connected=attempt.connected and not attempt.committing)

    async def _not_replicated(self, attempt: Attempt[Any], error: ReplayBufError) -> UnreachableError:
        """Return the error for a commit whose wait for a standby was abandoned, and which its primary should have."""
        known = "It isn't known whether the primary has it"
        with contextlib.suppress(ReplayBufError, TimeoutError):
            async with asyncio.timeout(_LOOKING_SECONDS):
                if not await self._was_committed(attempt, replicated=False):  # another server has taken over
                    return UnreachableError(f"{error}; nothing of it was stored", reason="standby awaited")
                known = "The primary has it, and would lose it if it is lost itself"
        return self._in_doubt(attempt, f"{error}. {known}", "standby awaited")

    def _unknown(self, attempt: Attempt[Any], why: str) -> OutcomeUnknownError:
        lost = "the answer to a commit was lost, and it isn't known whether it succeeded"
        return self._in_doubt(attempt, f"{why}; {lost}")

    def _in_doubt(self, attempt: Attempt[Any], why: str, reason: str = "") -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{why}: a put with key= can be repeated, and what was taken comes back",
            lambda: self._was_committed(attempt),
            attempt.result,
            reason=reason,
        )

    async def _was_committed(self, attempt: Attempt[Any], *, replicated: bool = True) -> bool:
        """Return whether the transaction of an attempt was committed, once it has ended.

        Where commits are replicated, the call waits until the transaction is (`replicated`).
        """
        stamp, asking = attempt.stamp, Attempt[bool]()
        assert stamp is not None
        async with (
            self._connected(asking) as connection,
            self._waits.bounded(asking.since),
            connection.transaction(isolation="read_committed"),
        ):
            if not replicated:
                await connection.execute("SET LOCAL synchronous_commit = local")
            number = await connection.fetchval(READ_STAMP, stamp.row, stamp.number - 1)
        return bool(number == stamp.number)
