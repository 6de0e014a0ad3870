"""How long operations are tried again, and commits waited for: after a lost connection, or for an absent standby."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from replaybuf.errors import AccessError, ClosedError, ReplayBufError, StorageError, UnreachableError, reason_of
from replaybuf.storage.sql.engine.locks import Stamp

T = TypeVar("T")

#: The longest pause between two attempts.
_LONGEST_PAUSE = 1.0
_FIRST_PAUSE = 0.02
#: The same after a refused password: servers may lock roles out after frequent attempts.
_LONGEST_PAUSE_REFUSED = 8.0
#: How long attempts continue while a store is being closed.
_CLOSING_SECONDS = 2.0
#: How long a commit may take at least, however short the time for attempts is, also while a store is being closed.
COMMIT_SECONDS = 10.0
#: Seconds between warnings of outages: a server that flaps would fill the log.
_QUIET_SECONDS = 10.0

_logger = logging.getLogger("replaybuf.database")
_random = random.SystemRandom()


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
    """The state of an unreachable server, shared by the operations of a store, which are retried for `seconds`."""

    def __init__(self, where: str, seconds: float) -> None:
        self._where = where
        self.seconds = seconds
        self._broken_since: float | None = None
        # When an outage was logged last, and whether this one was.
        self._logged_at, self._is_logged = -_QUIET_SECONDS, False
        self._hurry = asyncio.Event()
        self._hurried_at = 0.0
        self._limits: dict[asyncio.Timeout, tuple[float | None, float]] = {}

    @property
    def on(self) -> bool:
        return self._broken_since is not None

    @property
    def hurried(self) -> bool:
        return self._hurry.is_set()

    def begin(self, error: BaseException) -> None:
        """Record that a connection was lost, or that none is available. Of many losses the log has a few."""
        now = time.monotonic()
        if self._broken_since is None:
            self._broken_since, self._is_logged = now, False
        if not self._is_logged and now - self._logged_at >= _QUIET_SECONDS:
            self._logged_at, self._is_logged = now, True
            _logger.warning("operations wait for a connection: %s", error)

    def end(self) -> None:
        """Record that an operation succeeded."""
        if self._broken_since is not None:
            since, self._broken_since = self._broken_since, None
            level = logging.INFO if self._is_logged else logging.DEBUG
            _logger.log(level, "connected to %s again after %.1f s", self._where, time.monotonic() - since)

    def cut_retries(self) -> None:
        """Shorten the retries, because the store is being closed."""
        if not self.hurried:
            self._hurried_at = time.monotonic()
            self._hurry.set()
            for limit in self._limits:
                self._limit(limit)

    def deadline(self, since: float) -> float:
        """Return the time until which to retry after a failure at `since`."""
        end = since + self.seconds
        return min(end, max(since, self._hurried_at) + _CLOSING_SECONDS) if self.hurried else end

    def remaining(self, since: float | None) -> float:
        """Return how long to retry from now on after a failure at `since`, by default now."""
        now = time.monotonic()
        return self.deadline(now if since is None else since) - now

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds) if not self.hurried else await asyncio.sleep(seconds)

    @asynccontextmanager
    async def bounded(self, since: float | None, least: float = 0.0) -> AsyncIterator[asyncio.Timeout]:
        """Bound a block by the time for attempts that began at `since` (None: only if the store is being closed).

        It has until `least` in any case. Raises TimeoutError.
        """
        async with asyncio.timeout(None) as limit:
            self._limits[limit] = since, least
            self._limit(limit)
            try:
                yield limit
            finally:
                del self._limits[limit]

    def _limit(self, limit: asyncio.Timeout) -> None:
        since, least = self._limits[limit]
        if limit.expired() or (since is None and not self.hurried):
            return
        now = time.monotonic()
        end = max(least, self.deadline(now if since is None else since))
        limit.reschedule(asyncio.get_running_loop().time() + end - now)


@dataclass(slots=True)
class Attempt(Generic[T]):
    """One attempt to run a transaction, and its progress. `server` is the `ServerState` of its server."""

    since: float | None = None  # time of the operation's first failure
    connected: bool = False
    server: Any = None
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
        await self._outage.pause(min(remaining, self._pause * _random.uniform(0.5, 1)))
        refused = error.reason == "not admitted"
        self._pause = min(_LONGEST_PAUSE_REFUSED if refused else _LONGEST_PAUSE, 2 * self._pause)

    def given_up(self, stored: str) -> StorageError:
        """Return the error for an operation that certainly stored nothing."""
        text = f"{self}{stored}"
        if self._outage.hurried:
            return CutShortError(text)
        reason = reason_of(self.reason)
        kind = AccessError if reason in AccessError.REASONS else UnreachableError
        return kind(text, reason=reason if reason in kind.REASONS else "")

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
