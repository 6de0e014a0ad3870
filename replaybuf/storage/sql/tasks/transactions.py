"""Fenced transactions of one buffer, and a thread pool for the CPU work beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from replaybuf.errors import FencedError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements.checkpoints import restore
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.ordering import RaceNotRunError, begin_races
from replaybuf.storage.sql.tasks.commit_watch import Watch
from replaybuf.storage.values import Checkpoint

S = TypeVar("S")
T = TypeVar("T")


class Transactions:
    """Runs transactions of one buffer, all in the database's thread.

    Writes raise FencedError when another process has restored the buffer since it was opened here, and FencedError
    after a failover to a server that lacks commits which this process has seen. `scope` is the buffer in its current
    epoch.
    """

    def __init__(self, engine: Database, thread: DatabaseThread, watch: Watch, scope: Scope) -> None:
        self.engine = engine
        self.thread = thread
        self.scope = scope
        self._watch = watch
        self._writes = 0
        self._restoring = asyncio.Lock()
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="replaybuf-codec")

    async def read(self, function: Callable[[Transaction], T], *, single: bool = False) -> T:
        """Run `function(tx)` in a read transaction; `single` as in `Database.read`."""
        return await self.engine.read(function, self.scope, single=single)

    async def write(
        self,
        function: Callable[[Transaction], T],
        *,
        alone: bool = False,
        brief: bool = False,
        fenced: bool = True,
        wakes: bool = True,
    ) -> T:
        """Run `function(tx)` in a write transaction behind the fence; with `wakes`, wake callers that wait.

        `alone` and `brief` as in `Database.write`. With `fenced=False` the function checks the fence itself.
        """
        work = _behind_fence(function) if fenced else function
        while True:
            scope = self.scope
            try:
                result = await self.engine.write(work, scope, alone=alone, brief=brief)
            except RaceNotRunError:
                await self.write(begin_races, alone=True)
            except FencedError as error:
                await self._rejoin(scope, error)
            else:
                self._writes += 1
                if wakes:
                    self._watch.committed()
                return result

    async def read_fenced(self, function: Callable[[Transaction], T]) -> T:
        """Run `function(tx)`, a single statement that checks the fence. Raises FencedError."""
        while True:
            scope = self.scope
            try:
                result = await self.engine.read(function, scope, single=True)
                if self.engine.missing_commits:
                    raise FencedError(self.engine.missing_commits, reason="commits lost")
                return result
            except FencedError as error:
                await self._rejoin(scope, error)

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        """Restore a checkpoint, and continue in the epoch that begins with it."""

        def work(tx: Transaction) -> tuple[Checkpoint, Scope]:
            return restore(tx, step, time.time(), keep_new=keep_new), tx.scope

        # Draws still to be undone in a checkpoint must be undone before it is restored.
        await self.thread.catch_up(self.engine.lock_timeout)
        async with self._restoring:
            made, self.scope = await self.engine.write(work, self.scope, alone=True, accepts_loss=True)
        self._watch.committed()
        return made

    async def _rejoin(self, scope: Scope, error: FencedError) -> None:
        """Return if the buffer was fenced off by a restore through this object; otherwise raise the error."""
        async with self._restoring:  # a restore may be committed, but not yet known to be
            if self.scope.epoch == scope.epoch:
                raise error

    @property
    def version(self) -> int:
        """A number that grows with every write of this buffer here, and with every commit that `Watch` notices."""
        return self._writes + self._watch.version()

    def committed(self) -> None:
        """Wake callers that wait for a change of the buffer."""
        self._watch.committed()

    async def compute(self, function: Callable[[S], T], argument: S) -> T:
        """Run CPU work in another thread and return its result."""
        try:
            future = self.thread.loop.run_in_executor(self._executor, function, argument)
        except RuntimeError:  # the interpreter is shutting down: no new thread can be started
            return function(argument)
        return await future

    def end_computing(self, *, wait: bool) -> None:
        """End the threads of `compute` (any thread)."""
        self._executor.shutdown(wait=wait)


def _behind_fence(function: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    """Return the function with a check of the fence before it."""

    def guarded(tx: Transaction) -> T:
        check_fence(tx)
        return function(tx)

    return guarded
