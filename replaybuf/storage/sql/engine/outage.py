"""Retry policy after a lost connection: duration, pauses and final error; and the commit stamps of transactions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sqlalchemy import Select, bindparam
from sqlalchemy.dialects.postgresql import insert

from replaybuf.errors import (
    AccessError,
    ClosedError,
    ReplayBufError,
    StorageError,
    UnreachableError,
    reason_of,
)
from replaybuf.storage.sql.engine.servers import UNKNOWN, Standing
from replaybuf.storage.sql.schema.tables import counter

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction


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
    async def connecting(self, since: float | None) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Bound the time until there is a connection; yields the function to call then.

        `since` is the time of the operation's first failure. Raises TimeoutError.
        """
        async with asyncio.timeout(None) as limit:

            async def connected() -> None:
                self.release(limit)
                if limit.expired():
                    await asyncio.sleep(0)  # lets the pending cancellation arrive
                limit.reschedule(None)

            self.restrict(limit, since)
            try:
                yield connected
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
    server: Standing = UNKNOWN
    identity: Identity | None = None
    committing: bool = False
    called: bool = False  # committed by the call of a server function
    last: Sequence[str] = ()
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


#: The name prefix of connections' rows in `rb_counter`.
PREFIX = "connection "
#: The beginning of every query of `marking`.
MARKING = "WITH mark AS"


class Identity(NamedTuple):
    """A transaction's commit stamp: its connection's row, its number there, and the advisory lock it holds."""

    row: str
    number: int
    lock: int

    @property
    def mark(self) -> tuple[str, int]:
        """The values of `MARK`."""
        return self.row, self.number


def next_identity(last: Identity | None) -> Identity:
    """Return the identity of the next transaction of a connection, after its last one."""
    # Numbers are microseconds since 1970, which also give a row's age; they increase even if the clock is set back.
    now = int(time.time() * 1_000_000)
    if last is None:
        drawn = uuid.uuid4()
        return Identity(f"{PREFIX}{drawn.hex}", now, drawn.int >> 65)
    return last._replace(number=max(last.number + 1, now))


#: The parameters of `marking`.
MARK = ("mark_row", "mark_number")


def marking(query: Select[Any]) -> Select[Any]:
    """Return the query as a statement that also writes the transaction's commit stamp."""
    mark = insert(counter).values({"name": bindparam(MARK[0]), "value": bindparam(MARK[1])})
    mark = mark.on_conflict_do_update(index_elements=[counter.c.name], set_={"value": mark.excluded.value})
    return query.add_cte(mark.cte("mark"))


def mark_statement(mark: tuple[str, int]) -> str:
    """Return the statement that writes a commit stamp, with its values inlined."""
    row, number = mark
    values = f"('{row}', {number:d}) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    return f"INSERT INTO rb_counter (name, value) VALUES {values}"  # noqa: S608


# `pg_locks` shows an advisory lock of 64 bits as two numbers.
_END = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid = $1 AND objid = $2
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def end_if_running(tx: Transaction, identity: Identity) -> bool:
    """Terminate a transaction whose server process hasn't noticed the lost client; return whether it was running."""
    high, low = divmod(identity.lock, 1 << 32)
    [(ended,)] = tx.run(_END, high, low)
    return bool(ended)


def was_committed(tx: Transaction, identity: Identity, *, replicated: bool) -> bool:
    """Return whether an ended transaction was committed; `replicated`: also on a synchronous standby.

    A commit whose wait for the standby was interrupted is visible at once. The update here follows it in the WAL, and
    waits for both.
    """
    ask = "SELECT value FROM rb_counter WHERE name = $1"
    if replicated:
        ask = "UPDATE rb_counter SET value = value WHERE name = $1 RETURNING value"
    return [number for (number,) in tx.run(ask, identity.row)] == [identity.number]


def answer(tx: Transaction, identity: Identity) -> list[int]:
    """Return the answer that a committed function call stored with its commit stamp (`engine.server_function`)."""
    [(numbers,)] = tx.run("SELECT value FROM rb_info WHERE name = $1", identity.row)
    return [int(number) for number in numbers.split()]
