"""Going on after a lost connection: a transaction that wasn't committed is repeated, and one that was isn't.

When the answer to a commit is lost, the identity of the transaction tells what became of it (`engine.outage`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from replaybuf.errors import LockedError, PoolBusyError, ReplayBufError, StandbyAwaitedError
from replaybuf.storage.sql.engine import outage as identities
from replaybuf.storage.sql.engine.database import Follows
from replaybuf.storage.sql.engine.errors import is_conflict, is_lost
from replaybuf.storage.sql.engine.outage import (
    Attempt,
    Identity,
    NotReplicatedError,
    Outage,
    OutcomeUnknownError,
    Patience,
)
from replaybuf.storage.sql.engine.postgres_pool import PostgresSession, run
from replaybuf.storage.sql.engine.standbys import CommitWaits
from replaybuf.storage.sql.engine.transaction import Transaction

if TYPE_CHECKING:
    import asyncpg

T = TypeVar("T")

_ATTEMPTS = 5
#: How often, and at what interval, to check whether a server process that was told to end is gone.
_ENDING_LOOKS, _ENDING_SECONDS = 100, 0.02
#: How long to look for a commit whose wait for a standby was given up.
_LOOKING_SECONDS = 5.0


class Recovery:
    """Repeats the transactions of a store until each is certainly committed, or certainly not.

    `connected(attempt)` lends a connection, `is_opened()` says whether the store was opened (before that nothing is
    repeated), and `note(attempt, follows)` is called for a transaction that was found to be committed.
    """

    def __init__(
        self,
        outage: Outage,
        waits: CommitWaits,
        connected: Callable[[Attempt[Any]], AbstractAsyncContextManager[asyncpg.Connection[Any]]],
        is_opened: Callable[[], bool],
        note: Callable[[Attempt[Any], Follows], None],
    ) -> None:
        self._outage, self._waits, self._connected = outage, waits, connected
        self._is_opened, self._note = is_opened, note

    async def until_done(
        self,
        once: Callable[[Attempt[T]], Awaitable[T]],
        *,
        stored: str = "",
        follows: Follows = Follows.NOTHING,
        repeats_locked: bool = True,
    ) -> T:
        patience, conflicts = Patience(self._outage), 0
        while True:
            attempt: Attempt[T] = Attempt(patience.since)
            try:
                result = await once(attempt)
            except ReplayBufError as error:
                if is_conflict(error) and conflicts + 1 < _ATTEMPTS:
                    conflicts += 1
                    await asyncio.sleep(0.01 * 2**conflicts)
                elif isinstance(error, StandbyAwaitedError) and attempt.committing and attempt.identity is not None:
                    raise await self._not_replicated(attempt, error) from error
                elif repeats_locked and self._is_opened() and isinstance(error, (LockedError, PoolBusyError)):
                    await self._wait_behind(error, attempt, patience, stored)
                elif not (self._is_opened() and self._is_lost(error, attempt)):
                    raise
                elif await self._was_committed(attempt, error, patience, stored):
                    self._note(attempt, follows)
                    return attempt.result  # type: ignore[no-any-return]
            else:
                self._outage.end()
                return result

    def _is_lost(self, error: ReplayBufError, attempt: Attempt[Any]) -> bool:
        if self._outage.on and not attempt.connected and isinstance(error, PoolBusyError):
            return True  # the pool is busy making connections that fail
        # An answer to COMMIT that doesn't arrive counts as lost.
        return is_lost(error, connected=attempt.connected and not attempt.committing)

    async def _was_committed(
        self, attempt: Attempt[Any], error: ReplayBufError, patience: Patience, stored: str
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
            asking: Attempt[bool] = Attempt(patience.since)
            try:
                committed = await self._find_out(attempt.identity, asking, replicated=attempt.committing, lost=attempt)
            except ReplayBufError as later:
                if isinstance(later, StandbyAwaitedError):
                    raise await self._not_replicated(attempt, later) from later
                if not self._is_lost(later, asking):
                    if attempt.committing:
                        raise self._unknown(attempt, str(later)) from later
                    raise
                error = later
            else:
                self._outage.end()
                return committed

    async def _wait_behind(self, error: ReplayBufError, attempt: Attempt[Any], patience: Patience, stored: str) -> None:
        """Pause if what is held by others may be held by commits that wait for a standby; otherwise raise the error."""
        if why := await self._waits.why():
            error = StandbyAwaitedError(f"{error}; {why}")
        elif not self._is_lost(error, attempt):
            raise error
        try:
            await patience.wait(error)
        except TimeoutError:
            raise patience.given_up(stored) from error

    async def _not_replicated(self, attempt: Attempt[Any], error: StandbyAwaitedError) -> StandbyAwaitedError:
        """Return the error for a commit whose wait for a standby was given up, which its primary should have."""
        identity, known = attempt.identity, "It isn't known whether the primary has it"
        assert identity is not None
        with contextlib.suppress(ReplayBufError, TimeoutError):
            async with asyncio.timeout(_LOOKING_SECONDS):
                if not await self._find_out(identity, Attempt(), replicated=False):  # another server has taken over
                    return StandbyAwaitedError(f"{error}; nothing of it was stored")
                known = "The primary has it, and would lose it if it is lost itself"
        return NotReplicatedError(
            f"{error}. {known}: a put with key= can be repeated, and what was taken comes back",
            lambda: self._find_out(identity, Attempt()),
            attempt.result,
        )

    def _unknown(self, attempt: Attempt[Any], why: str) -> OutcomeUnknownError:
        identity = attempt.identity
        assert identity is not None
        return OutcomeUnknownError(
            f"{why}; the answer to a commit was lost, and it isn't known whether it succeeded: a put with "
            "key= can be repeated, and what was taken comes back",
            lambda: self._find_out(identity, Attempt()),
            attempt.result,
        )

    async def _find_out(
        self, identity: Identity, asking: Attempt[bool], *, replicated: bool = True, lost: Attempt[Any] | None = None
    ) -> bool:
        """Return whether a transaction was committed. If it still runs, without a client, it is ended first.

        It is waited for until it is `replicated`, where commits are. What a function answered that was called in a
        `lost` attempt is its result from then on.
        """
        async with self._connected(asking) as connection:
            tx = Transaction(PostgresSession(connection))
            for _ in range(_ENDING_LOOKS):
                if not await run(lambda: identities.end_if_running(tx, identity)):
                    async with self._waits.bounded(asking.since):
                        committed = await run(lambda: identities.was_committed(tx, identity, replicated=replicated))
                    if committed and lost is not None and lost.called:
                        lost.result = await run(lambda: identities.answer(tx, identity))
                    return committed
                await asyncio.sleep(_ENDING_SECONDS)
            raise ConnectionError("the server process of a lost connection doesn't end")
