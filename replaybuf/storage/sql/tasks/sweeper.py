"""Background work in small transactions: sweeps, ends of leases, pruning of the archive and batches, heartbeats.

Payloads of removed groups, and what only a dropped checkpoint had, are deleted later: that costs more than the rest of
a take or a checkpoint, so it is deferred to idle times. A grace time keeps payloads of groups that may be returned by
the undo of a cancelled take.

What is due is read every other second, when the next lease ends, and soon if there was too much of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from functools import partial

from replaybuf.errors import FencedError, LockedError, ReplayBufError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.batches import last_beyond, newest_batch, prune_batches
from replaybuf.storage.sql.statements.leases import end_leases
from replaybuf.storage.sql.statements.parts import find_orphans, remove_orphans
from replaybuf.storage.sql.statements.past import pass_on, sweep
from replaybuf.storage.sql.statements.upkeep import (
    Chores,
    any_to_prune,
    clear_what_is_left,
    find_chores,
    is_anything_left,
    prune,
)
from replaybuf.storage.sql.tasks.filling import Filling
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.payload_files import PayloadFiles
from replaybuf.storage.sql.tasks.transactions import Transactions

#: Seconds for which the payloads of taken groups are kept, for the undo of a take.
GRACE_SECONDS = 2.0
_LONGEST_SECONDS = 0.02
# On a busy machine even the smallest sweep takes longer than that. With fewer payloads per sweep, it would fall behind
# the takes for good: 150 payloads/s with 4 in a sweep, more than 1,600 with 64.
_LEAST_LIMIT = 64
_NARROW_ROWS = 8  # rows of metadata changed in the time of deleting one payload
_IDLE_SECONDS = 0.5
#: The mean time between two polls of a process. One takes a third of a millisecond, so that those of 64 processes take
#: some 1 % of a processor.
_POLL_SECONDS = 2.0
_TIDY_SECONDS = 30.0
_BATCHES, _PRUNING_SECONDS = 20, 0.5  # pruned in one transaction, and the time for all of them in one poll
_PATIENCE = 1.0  # lock timeout of tidying
# Programs seed the one that all share.
_random = random.SystemRandom()

_logger = logging.getLogger("replaybuf.sweep")


class Sweeper:
    """Sweeps in the background as long as the store is open."""

    def __init__(
        self,
        transactions: Transactions,
        history: int | None,
        presence: Presence,
        files: PayloadFiles,
        filling: Filling,
        *,
        maintains: bool,
    ) -> None:
        self._transactions = transactions
        self._engine = transactions.engine
        self._history = history
        self._presence = presence
        self._files = files
        self._filling = filling
        self._maintains = maintains
        self._limit = _LEAST_LIMIT
        self._chores = Chores()
        self._poll_at = self._tidy_at = 0.0
        self._pruned_at = 0  # the newest batch at the last time
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop at the next pause; a running sweep is committed first."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        failing = full = False
        # Not at once: beside the first calls it would need another connection. But of many short-lived processes, some
        # have to sweep.
        pause = _random.uniform(0, 2 * _IDLE_SECONDS)
        while not await self._is_stopped(pause):
            try:
                changed = full
                if self._maintains and time.monotonic() >= self._poll_at:
                    changed = True
                    with contextlib.suppress(FencedError):  # those who use the restored buffer look after it
                        await self.maintain_groups()
                full = await self._step()
                full |= await self._files.maintain(changed)
                failing = False
            except Exception as error:  # the next sweep may succeed
                level, is_known = logging.DEBUG if failing else logging.WARNING, isinstance(error, ReplayBufError)
                _logger.log(level, "sweeping failed and will be tried again: %s", error, exc_info=not is_known)
                full, failing = False, True
            await self._presence.beat()
            # Writers get at least as much of the write lock's time as the sweep.
            pause = _LONGEST_SECONDS if full else _IDLE_SECONDS

    async def _is_stopped(self, seconds: float) -> bool:
        """Wait so long, or until the store is closed; return whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def maintain_groups(self) -> None:
        """Poll for due work, end expired leases, and prune the groups outside the capacity. Raises FencedError."""
        transactions, limits = self._transactions, self._transactions.scope.rules.limits
        look = partial(find_chores, grace=GRACE_SECONDS, now=time.time())
        self._poll_at = time.monotonic() + _POLL_SECONDS * _random.uniform(0.8, 1.2)
        self._chores = await transactions.read(look, single=True)
        self._poll_at = min(self._poll_at, time.monotonic() + self._chores.next)
        now = self._chores.now
        if self._chores.overdue:
            returned = await transactions.write(end_leases, wakes=False)
            if returned:
                transactions.committed()
        bounded, more = bool(limits.bounded_aside), False
        if bounded and await transactions.read(lambda tx: any_to_prune(tx, now)):
            more = await transactions.write(lambda tx: prune(tx, now, self._limit), wakes=False) >= self._limit
        if limits.fill_seconds is not None:
            more |= await self._filling.give_up(now, limits.fill_seconds)
        if more:
            self._poll_at = 0.0
        if time.monotonic() > self._tidy_at:
            self._tidy_at = time.monotonic() + _TIDY_SECONDS
            await self._tidy()

    async def _tidy(self) -> None:
        if self._engine.dialect.is_remote and await self._engine.read(is_anything_left, single=True):
            with contextlib.suppress(LockedError):  # leases that end don't wait for the locks of others
                await self._engine.write(clear_what_is_left, patience=_PATIENCE)
        if await self._transactions.read(find_orphans):
            await self._transactions.write(remove_orphans, wakes=False)
        await self.prune_history()

    async def prune_history(self) -> None:
        """Remove batches beyond the retention limit, some at a time, after each 1 % of them. Raises FencedError.

        What there is no time for is removed after the next poll.
        """
        keep, pruned = self._history, _BATCHES
        if keep is None:
            return
        newest = await self._transactions.read(newest_batch, single=True)
        if newest - self._pruned_at < max(1, keep // 100):
            return
        until = await self._transactions.read(lambda tx: last_beyond(tx, keep))
        end = time.monotonic() + _PRUNING_SECONDS
        while until is not None and pruned == _BATCHES:
            prune_some = partial(prune_batches, until=until, limit=_BATCHES)
            pruned = await self._transactions.write(prune_some, wakes=False)
            if pruned == _BATCHES and (self._stopping.is_set() or time.monotonic() > end):
                self._tidy_at = 0.0
                return
        if until is None or pruned:
            self._pruned_at = newest

    async def _step(self) -> bool:
        """Run one small sweep of each kind that is due; return whether more is due."""
        now = self._chores.now
        cutoff = now - GRACE_SECONDS
        due = dropped = False
        if self._chores.due:
            due = await self._sweep(lambda tx, limit: sweep(tx, cutoff, limit) == limit)
        if self._chores.dropped:
            dropped = await self._sweep(lambda tx, limit: pass_on(tx, limit * _NARROW_ROWS) > 0)
        self._chores = Chores(due=due, dropped=dropped, now=now)
        return due or dropped

    async def _sweep(self, work: Callable[[Transaction, int], bool]) -> bool:
        """Run one small sweep; return whether more is due."""
        limit, started = self._limit, time.monotonic()
        more = await self._engine.write(lambda tx: work(tx, limit))
        elapsed = time.monotonic() - started
        self._limit = max(_LEAST_LIMIT, limit // 2) if elapsed > _LONGEST_SECONDS else min(512, limit * 2)
        return more
