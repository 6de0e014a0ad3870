"""An open store: the thread, the engine, and the tasks that run alongside the operations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy.engine import URL

from replaybuf.codec.payload import Codec
from replaybuf.errors import ClosedError, FencedError
from replaybuf.storage.sql.engine.filesystem import refuse_network_filesystem
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.opening import open_engine
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.schema.create import check_schema, create_schema
from replaybuf.storage.sql.statements.checkpoints import keep_sweeps_away, make_checkpoint
from replaybuf.storage.sql.statements.fence import check_fence, joined
from replaybuf.storage.sql.statements.lanes import KnownLanes
from replaybuf.storage.sql.statements.race_keys import RaceNotRunError, begin_races
from replaybuf.storage.sql.statements.restore import restore
from replaybuf.storage.sql.tasks.group_commit import GroupCommit
from replaybuf.storage.sql.tasks.making import Making
from replaybuf.storage.sql.tasks.port import LastDraw
from replaybuf.storage.sql.tasks.presence import Presence
from replaybuf.storage.sql.tasks.sweeper import Sweeper
from replaybuf.storage.sql.tasks.watch import Watch
from replaybuf.storage.values import Checkpoint

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How a database is opened; `SQLStorage` explains the options."""

    url: URL
    codec: Codec
    durability: str
    lock_timeout: float
    reconnect_timeout: float
    read_only: bool
    allow_network_filesystem: bool
    history: int | None


class Store:
    """The parts of an open store: the thread, the engine, and the tasks that run alongside the operations."""

    def __init__(self, options: Options, scope: Scope) -> None:
        self._options = options
        self.scope = scope
        self.ready = False
        self.closed = False
        self._closing = threading.Lock()
        self._preparing: asyncio.Lock | None = None
        self._restoring = asyncio.Lock()
        self.engine = open_engine(
            options.url,
            durability=options.durability,
            lock_timeout=options.lock_timeout,
            reconnect_timeout=options.reconnect_timeout,
            read_only=options.read_only,
        )
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="replaybuf-codec")
        self.thread = DatabaseThread("replaybuf-database")
        self.watch = Watch(self.thread, self.engine)
        self.history = options.history
        self.presence = Presence(self.engine, self.scope)
        self.sweeper = Sweeper(self.engine, self.scope, self.watch.committed, options.history, self.presence)
        self.commits = GroupCommit(self, options.codec)
        self.lanes: KnownLanes = {}
        self.last_draw = LastDraw()

    async def prepare(self) -> None:
        """Check the schema, or create it in a new database (database's thread)."""
        if self._preparing is None:
            self._preparing = asyncio.Lock()
        async with self._preparing:
            if self.ready:
                return
            where, options = self.engine.where, self._options
            if self.engine.path is not None and not (options.read_only or options.allow_network_filesystem):
                refuse_network_filesystem(self.engine.path)
            if not await self.engine.read(lambda tx: check_schema(tx.connection, where)):
                await self.engine.write(self._create)
            self.scope = await self.engine.read(joined, self.scope)
            self.engine.opened = True
            if not options.read_only:
                self.sweeper.start()
            self.ready = True

    def _create(self, tx: Transaction) -> None:
        tx.dialect.lock(tx.connection, Lock.SCHEMA)
        create_schema(tx.connection, self.engine.where)

    async def compute(self, function: Callable[[S], T], argument: S) -> T:
        """Run CPU work in another thread and return its result."""
        try:
            future = self.thread.loop.run_in_executor(self.executor, function, argument)
        except RuntimeError:  # the interpreter is shutting down: no new thread can be started
            return function(argument)
        return await future

    # Transactions of the buffer (database's thread)

    async def read(self, function: Callable[[Transaction], T], *, brief: bool = False, single: bool = False) -> T:
        """Run `function(tx)` in a read transaction; `brief` and `single` as in `Engine.read`."""
        return await self.engine.read(function, self.scope, brief=brief, single=single)

    async def write(
        self,
        function: Callable[[Transaction], T],
        *,
        alone: bool = False,
        brief: bool = False,
        fenced: bool = True,
        announce: Callable[[], bool] = lambda: True,
    ) -> T:
        """Run `function(tx)` in a write transaction behind the fence, and wake waiting callers.

        `alone` and `brief` as in `Engine.write`. With `fenced=False` the function checks the fence itself.
        """
        work = partial(_fenced, function) if fenced else function
        while True:
            scope = self.scope
            try:
                result = await self.engine.write(work, scope, alone=alone, brief=brief)
            except RaceNotRunError as need:
                begin = partial(begin_races, names=need.names, order=need.order)
                await self.engine.write(begin, scope, alone=True)
            except FencedError as error:
                await self._rejoin(scope, error)
            else:
                if announce():
                    self.watch.committed()
                return result

    async def check_fence(self) -> None:
        """Raise FencedError when another store has restored the buffer since this one joined it."""
        await self.read_fenced(check_fence)

    async def read_fenced(self, function: Callable[[Transaction], T]) -> T:
        """Run `function(tx)`, one brief statement that checks the fence. Raises what `check_fence` raises."""
        while True:
            scope = self.scope
            try:
                return await self.engine.read(function, scope, brief=True, single=True)
            except FencedError as error:
                await self._rejoin(scope, error)

    async def checkpoint(self, making: Making) -> Checkpoint:
        """Make a checkpoint of the buffer."""
        if not self.engine.dialect.locks_rows:
            return await making.run()
        copy = partial(_fenced, lambda tx: make_checkpoint(tx, making.step, making.keep, time.time()))
        while True:
            scope = self.scope
            try:
                return await self.engine.write_beside(copy, keep_sweeps_away, check_fence, scope)
            except FencedError as error:
                await self._rejoin(scope, error)

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        """Restore a checkpoint, and go on in the epoch that begins with it."""

        def work(tx: Transaction) -> tuple[Checkpoint, Scope]:
            return restore(tx, step, time.time(), keep_new=keep_new), tx.scope

        # A draw that is still to be undone in a checkpoint has to be, before that is restored.
        await self.thread.catch_up(self.engine.lock_timeout)
        async with self._restoring:
            made, self.scope = await self.engine.write(work, self.scope, alone=True)
        self.watch.committed()
        return made

    async def _rejoin(self, scope: Scope, error: FencedError) -> None:
        """Return if this store was fenced off by its own restore; otherwise raise the error."""
        async with self._restoring:  # a restore may be committed, but not yet known to be
            if self.scope.epoch == scope.epoch:
                raise error

    # Closing

    def close(self) -> None:
        """Commit waiting puts and release everything; blocks. A second call waits for the first."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            try:
                with contextlib.suppress(ClosedError):
                    self.thread.post(self.engine.hurry)
                self.thread.close(self._shut_down, timeout=60)
            finally:
                self.executor.shutdown(wait=True)

    def abandon(self) -> None:
        """Close without waiting for it."""
        if self.thread.pid == os.getpid() and not self.closed:
            self.executor.shutdown(wait=False)
            with contextlib.suppress(ClosedError):
                self.thread.post(self.engine.hurry)
            self.thread.abandon(self._shut_down, timeout=60)

    async def _shut_down(self) -> None:
        await self.commits.close()
        await self.sweeper.stop()
        if not self._options.read_only:
            await self.presence.end()
        await self.watch.stop()
        await self.engine.dispose()


def _fenced(function: Callable[[Transaction], T], tx: Transaction) -> T:
    check_fence(tx)
    return function(tx)
