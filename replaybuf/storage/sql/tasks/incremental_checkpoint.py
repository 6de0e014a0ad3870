"""An incremental checkpoint, made in short transactions, so that no write waits longer than for one of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from replaybuf.errors import LockedError, ReplayBufError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.checkpoints import (
    DroppedError,
    Mark,
    copy_groups,
    forget,
    is_any_made,
    make_beginning,
    next_bound,
    publish_alone,
)
from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import Checkpoint

T = TypeVar("T")

#: Groups copied in one transaction: at first, at least and at most.
FIRST, FEWEST, MOST = 2_000, 500, 16_000
#: Target time of one transaction, in seconds.
_PIECE_SECONDS = 0.01
#: Pause after a transaction, as a multiple of its time: other processes poll for the write lock, and need to find it
#: free.
_PAUSE = 0.5
_TURN_SECONDS = 0.02


class _StoppedError(Exception):
    """The caller no longer waits for the checkpoint."""


class IncrementalCheckpoint:
    """Makes an incremental checkpoint: its row first, then the groups in batches; then it is published."""

    def __init__(self, transactions: Transactions, step: int, keep: int | None) -> None:
        self._transactions = transactions
        self.step = step
        self.keep = keep
        self._stopped = False

    def stop(self) -> None:
        """Abandon the checkpoint after the current transaction (any thread)."""
        self._stopped = True

    async def run(self) -> Checkpoint:
        """Make the checkpoint (database's thread)."""
        while True:
            made = await self._begin()
            if isinstance(made, Checkpoint):
                return made
            try:
                return await self._go_on(made)
            except DroppedError:  # by a restore here, or by another process after missed heartbeats
                continue
            except Exception:
                # If this fails, too, another process drops the checkpoint after missed heartbeats.
                with contextlib.suppress(ReplayBufError):
                    await self._write(partial(forget, ids=[made.id]))
                raise

    async def _begin(self) -> Mark | Checkpoint:
        """Wait until no other checkpoint is being made, and begin."""
        engine = self._transactions.engine
        deadline = time.monotonic() + engine.lock_timeout
        while True:
            self._check()
            if not await self._transactions.read(lambda tx: is_any_made(tx, time.time())):
                begun = await self._write(lambda tx: make_beginning(tx, self.step, self.keep, time.time(), FIRST))
                if begun is not None:
                    return begun
            if time.monotonic() > deadline:
                raise LockedError(
                    f"{engine.where}: somebody else has been making checkpoints for more than {engine.lock_timeout:g} "
                    "s; make this one later, or raise lock_timeout"
                )
            await asyncio.sleep(_TURN_SECONDS)

    async def _go_on(self, mark: Mark) -> Checkpoint:
        groups = FIRST
        while mark.copied_to < mark.last:
            self._check()
            bound = await self._transactions.read(partial(next_bound, mark=mark, groups=groups))
            mark, seconds = await self._write(partial(_copy, mark=mark, up_to=bound))
            if seconds > _PIECE_SECONDS:
                groups = max(FEWEST, groups // 2)
            elif seconds < _PIECE_SECONDS / 2:
                groups = min(MOST, groups * 2)
            await self._pause(_PAUSE * seconds)
        return await self._write(partial(publish_alone, mark=mark, keep=self.keep))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _check(self) -> None:
        if self._stopped:
            raise _StoppedError

    async def _write(self, function: Callable[[Transaction], T]) -> T:
        return await self._transactions.write(function, announce=lambda: False)


def _copy(tx: Transaction, mark: Mark, up_to: int) -> tuple[Mark, float]:
    """Copy groups; return the new state of the checkpoint, and the seconds that this took."""
    started = time.monotonic()
    mark = copy_groups(tx, mark, up_to, time.time())
    return mark, time.monotonic() - started
