"""How long operations are tried again: after a lost connection, and while commits wait for a synchronous standby."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from replaybuf.common.units import number_of
from replaybuf.errors import (
    AccessError,
    ClosedError,
    ReplayBufError,
    StorageError,
    UnreachableError,
    reason_of,
)
from replaybuf.storage.sql.engine.commit_stamp import Stamp
from replaybuf.storage.sql.engine.errors import StandbyWaitEnded

if TYPE_CHECKING:  # it needs asyncpg
    from replaybuf.storage.sql.engine.postgres_connect import Standing
    from replaybuf.storage.sql.engine.postgres_servers import Servers

T = TypeVar("T")

#: The longest pause between two attempts.
_LONGEST_PAUSE = 1.0
_FIRST_PAUSE = 0.02
#: The same after a refused password: servers may lock roles out after frequent attempts.
_LONGEST_PAUSE_REFUSED = 8.0
#: No second warning about exhausted connections within this time, since they come and go.
_SILENT_SECONDS = 60.0
#: How long attempts continue while a store is being closed.
_CLOSING_SECONDS = 2.0

_logger = logging.getLogger("replaybuf.database")


class OutcomeUnknownError(UnreachableError):
    """A transaction whose outcome is unknown. `was_committed` queries it again; raises ReplayBufError."""

    in_doubt = True

    def __init__(
        self, message: str, was_committed: Callable[[], Awaitable[bool]], result: object, *, reason: str = ""
    ) -> None:
        super().__init__(message, reason=reason)
        self.was_committed = was_committed
        self.result = result


class CutShortError(UnreachableError, ClosedError):
    """The buffer was closed while its server was out of reach: both are true, and callers catch either."""


class Outage:
    """The state of an unreachable server, shared by the operations of a store."""

    def __init__(self, where: str, seconds: float) -> None:
        self.where = where
        self.seconds = seconds
        self._since: float | None = None
        self._announced = False
        self._silent_until = 0.0
        self._hurried = asyncio.Event()
        self._hurried_at = 0.0
        self._restricted: set[asyncio.Timeout] = set()

    @property
    def on(self) -> bool:
        return self._since is not None

    @property
    def hurried(self) -> bool:
        return self._hurried.is_set()

    def begin(self, error: BaseException) -> None:
        """Record that a connection was lost, or that none is available."""
        if self._since is not None or reason_of(error) == "standby awaited":  # it isn't an outage, and was logged
            return
        self._since = time.monotonic()
        self._announced = reason_of(error) != "no connection left"
        if self._announced:
            _logger.warning("the connection was lost and will be made again: %s", error)
        elif self._since >= self._silent_until:
            self._silent_until = self._since + _SILENT_SECONDS
            _logger.warning("operations wait for a connection: %s", error)

    def end(self) -> None:
        """Record that an operation succeeded."""
        if self._since is not None:
            since, self._since = self._since, None
            if self._announced:
                _logger.info("connected to %s again after %.1f s", self.where, time.monotonic() - since)

    def cut_retries(self) -> None:
        """Shorten the retries, because the store is being closed."""
        if not self._hurried.is_set():
            self._hurried_at = time.monotonic()
            self._hurried.set()
            for limit in self._restricted:
                self._limit(limit, None)

    def deadline(self, since: float) -> float:
        """Return the time until which to retry after a failure at `since`."""
        end = since + self.seconds
        return min(end, max(since, self._hurried_at) + _CLOSING_SECONDS) if self.hurried else end

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), seconds) if not self.hurried else await asyncio.sleep(seconds)

    @asynccontextmanager
    async def bounded(self, since: float | None) -> AsyncIterator[None]:
        """Bound the time until there is a connection; `since` is the time of the operation's first failure.

        Raises TimeoutError.
        """
        async with asyncio.timeout(None) as limit:
            self.restrict(limit, since)
            try:
                yield
            finally:
                self.release(limit)

    def restrict(self, limit: asyncio.Timeout, since: float | None) -> None:
        """Bound a wait by the time for attempts that began at `since`, or shortly if the store is being closed."""
        self._restricted.add(limit)
        self._limit(limit, since)

    def release(self, limit: asyncio.Timeout) -> None:
        """Stop bounding a wait that has ended."""
        self._restricted.discard(limit)

    def _limit(self, limit: asyncio.Timeout, since: float | None) -> None:
        if limit.expired() or (since is None and not self.hurried):
            return
        now = time.monotonic()
        end = self.deadline(now if since is None else since)
        limit.reschedule(asyncio.get_running_loop().time() + end - now)


@dataclass(slots=True)
class Attempt(Generic[T]):
    """One attempt to run a transaction, and its progress."""

    since: float | None = None  # time of the operation's first failure
    began: float = field(default_factory=time.monotonic)
    connected: bool = False
    server: Standing | None = None
    stamp: Stamp | None = None
    is_raised: bool = False  # the stamp; if not, a transaction with this stamp was committed before
    committing: bool = False
    result: Any = None


class Patience:
    """The retries of one operation."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self._pause = _FIRST_PAUSE
        self.since: float | None = None  # time of the first failure
        self.reason: ReplayBufError | None = None  # the last informative error

    async def wait(self, error: ReplayBufError) -> None:
        """Pause before the next attempt. Raises TimeoutError when the time for attempts is over."""
        self._outage.begin(error)
        if self.reason is None or not isinstance(error.__cause__, TimeoutError):  # perhaps only our own deadline
            self.reason = error
        now = time.monotonic()
        if self.since is None:
            self.since = now
        if (remaining := self._outage.deadline(self.since) - now) <= 0:
            raise TimeoutError
        await self._outage.pause(min(remaining, self._pause * random.uniform(0.5, 1)))
        refused = error.reason == "not admitted"
        self._pause = min(_LONGEST_PAUSE_REFUSED if refused else _LONGEST_PAUSE, 2 * self._pause)

    def given_up(self, stored: str) -> StorageError:
        """Return the error for an operation that certainly stored nothing."""
        said = f"{self}{stored}"
        if self._outage.hurried:
            return CutShortError(said)
        reason = reason_of(self.reason)
        if reason == "not admitted":
            return AccessError(said, reason=reason)
        return UnreachableError(said, reason=reason if reason == "standby awaited" else "")

    def __str__(self) -> str:
        """The last error and the duration of the attempts, for messages."""
        if self._outage.hurried:
            return f"{self.reason}; the buffer was being closed"
        if self._outage.seconds <= 0 or self.since is None:
            return str(self.reason)
        elapsed = time.monotonic() - self.since
        return f"{self.reason}; tried again for {elapsed:.0f} s (reconnect_timeout={self._outage.seconds:g})"


def until_committed(write: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    """Return a function that attempts a write once; when it returns, the write was committed exactly once.

    It raises ReplayBufError when it must be called again.
    """
    doubt: OutcomeUnknownError | None = None

    async def attempt() -> None:
        nonlocal doubt
        if doubt is not None:
            if await doubt.was_committed():
                return
            doubt = None
        try:
            await write()
        except OutcomeUnknownError as error:
            doubt = error
            raise

    return attempt


# Commits that wait for a synchronous standby
#
# PostgreSQL waits for the standby after the commit is in the primary's own WAL: without a limit, and with all locks of
# the transaction. If the wait is interrupted (a cancelled statement, a lost connection), the commit stays on the
# primary, visible to all. Later commits follow it in the WAL, and wait for both. So a confirmed commit is on the
# standby, and one whose wait was abandoned is in doubt until a later commit was replicated
# (`engine.commit_stamp.READ_STAMP`).

#: After this time a commit is slow, and a query asks whether it waits for a standby. Shorter waits are ordinary.
SLOW_SECONDS = 2.0
#: Commits that wait longer for a standby explain why other transactions are slow, or wait for locks.
_TELLING_SECONDS = 0.5
#: Timeout of the query for them.
_ANSWER_SECONDS = 5.0
_LONGEST_WATCH_PAUSE = 30.0

#: Query of a primary's `Synchronous`. Roles without rights to other roles' sessions see only their own.
ASK = """
SELECT coalesce(current_setting('synchronous_standby_names', true), ''),
    (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'),
    (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'
        AND query_start < clock_timestamp() - make_interval(secs => {seconds}))
"""
_NUMBER = re.compile(r"(?:(?:FIRST|ANY)\s*)?(\d+)\s*\(", re.IGNORECASE)

#: Advice for users whose commits wait.
WHAT_TO_DO = (
    "start the standby, with a name (application_name in its primary_conninfo) that is in this list, and look at its "
    "disk and network; or let commits wait for none: ALTER SYSTEM SET synchronous_standby_names = ''; "
    "SELECT pg_reload_conf()"
)


class Synchronous(NamedTuple):
    """Synchronous replication as reported by a primary.

    `names` is `synchronous_standby_names`, `standbys` the number of connected standbys of any kind, and `waiting` the
    number of commits that wait for long.
    """

    names: str
    standbys: int
    waiting: int

    @property
    def wanted(self) -> int:
        """The number of standbys that must have a commit."""
        found = _NUMBER.match(self.names.strip())
        return int(found[1]) if found else 1 if self.names.strip() else 0

    def __str__(self) -> str:
        """The configured and the connected standbys, as the rest of a sentence."""
        are = "is" if self.standbys == 1 else "are"
        asked = f"synchronous_standby_names = '{self.names}' asks for {number_of(self.wanted, 'standby')}"
        return f"{asked}, and {self.standbys} {are} connected"


class CommitWaits:
    """Detects a store's commits that wait for a synchronous standby."""

    def __init__(self, where: str, outage: Outage, servers: Servers) -> None:
        self._where = where
        self._outage = outage
        self._servers = servers
        self._asking = asyncio.Lock()
        self._answer: tuple[float, str] = (-SLOW_SECONDS, "")  # time and result of the last query
        self._said = False

    @asynccontextmanager
    async def bounded(self, since: float | None = None) -> AsyncIterator[None]:
        """Abandon a wait for a standby in this block when the time for attempts that began at `since` is over.

        Without `since` it begins now. A commit that is slow for another reason isn't interrupted. Raises
        StandbyWaitEnded.
        """
        began = time.monotonic()
        watching: list[asyncio.Task[str]] = []
        limit = asyncio.timeout(None)

        def watch() -> None:
            watching.append(asyncio.create_task(self._watch(limit, began if since is None else since)))

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

    async def why(self) -> str:
        """Return a sentence about commits that currently wait for a standby; an empty string if none does."""
        async with self._asking:
            if time.monotonic() >= self._answer[0] + SLOW_SECONDS:
                found = await self._ask()
                self._answer = time.monotonic(), found
                if found and not self._said:
                    _logger.warning("%s: %s", self._where, found)
                self._said = bool(found)
            return self._answer[1]

    async def _watch(self, limit: asyncio.Timeout, since: float) -> str:
        """Bound a commit that waits for a standby, and return the sentence about it."""
        pause = SLOW_SECONDS
        while not (said := await self.why()):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_WATCH_PAUSE)
        self._outage.restrict(limit, since)
        return said

    async def _ask(self) -> str:
        # On a separate connection: all of the pool may be in use by waiting commits.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = await self._servers.connect()
                try:
                    row: Any = await connection.fetchrow(ASK.format(seconds=_TELLING_SECONDS))
                    found = Synchronous(*row)
                finally:
                    connection.terminate()
            if found.waiting:
                return f"the commit waits for a synchronous standby: {found}; {WHAT_TO_DO}"
        return ""
