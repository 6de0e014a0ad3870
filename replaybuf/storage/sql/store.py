"""An open store: the thread, the engine, and the tasks that run beside the operations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.engine import URL

from replaybuf.codec.payload import Codec
from replaybuf.errors import ClosedError, FencedError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.filesystem import refuse_network_filesystem
from replaybuf.storage.sql.engine.sqlite import is_memory
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.sql.engine.urls import public_url
from replaybuf.storage.sql.schema.create import check_schema, create_schema
from replaybuf.storage.sql.statements import put
from replaybuf.storage.sql.statements.fence import check_fence, join
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.race_keys import RaceNotRunError, begin_races
from replaybuf.storage.sql.statements.restore import restore
from replaybuf.storage.sql.statements.rows import EncodedGroup, encode_group
from replaybuf.storage.sql.tasks.group_commit import GroupCommit
from replaybuf.storage.sql.tasks.sweeper import Sweeper
from replaybuf.storage.sql.tasks.watch import Watch
from replaybuf.storage.values import Checkpoint, NewGroup

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How a database is opened; `SQLStorage` says what it means."""

    url: URL
    codec: Codec
    durability: str
    lock_timeout: float
    reconnect_timeout: float
    read_only: bool
    allow_network_filesystem: bool

    @property
    def is_written_file(self) -> bool:
        """Whether it is a SQLite file that is opened for writing."""
        return self.url.get_backend_name() == "sqlite" and not (is_memory(self.url) or self.read_only)


class Opened:
    """What an open store holds: the thread, the engine, and the tasks that run beside the operations."""

    def __init__(self, options: Options, scope: Scope) -> None:
        self._options = options
        self.scope = scope
        self.ready = False
        self.closed = False
        self._closing = threading.Lock()
        self._preparing: asyncio.Lock | None = None
        self._restoring = asyncio.Lock()
        self.database = Database(
            options.url,
            durability=options.durability,
            lock_timeout=options.lock_timeout,
            reconnect_timeout=options.reconnect_timeout,
            read_only=options.read_only,
        )
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="replaybuf-codec")
        self.thread = DatabaseThread("replaybuf-database")
        self.watch = Watch(self.thread, self.database)
        self.sweeper = Sweeper(self.database, self.scope, self.watch.committed)
        self.commits = GroupCommit(self.thread, self._encode, self._commit, self.compute)

    async def prepare(self) -> None:
        """Check the schema, or create it in a new database (database's thread)."""
        if self._preparing is None:
            self._preparing = asyncio.Lock()
        async with self._preparing:
            if self.ready:
                return
            where, options = public_url(self.database.url), self._options
            if options.is_written_file and not options.allow_network_filesystem:
                refuse_network_filesystem(str(options.url.database))
            exists = await self.database.read(lambda connection: check_schema(connection, where))
            if not exists:
                await self.database.write(lambda connection: create_schema(connection, where))
            self.scope = await self.database.read(lambda connection: join(connection, self.scope))
            self.database.opened = True
            if not options.read_only:
                self.sweeper.start()
            self.ready = True

    async def compute(self, function: Callable[[S], T], argument: S) -> T:
        """Run CPU work in another thread."""
        try:
            future = self.thread.loop.run_in_executor(self.executor, function, argument)
        except RuntimeError:  # the interpreter is being shut down: no thread can be had any more
            return function(argument)
        return await future

    def _encode(self, new: NewGroup) -> EncodedGroup:
        return encode_group(self._options.codec, new)

    async def write(
        self,
        function: Callable[[Connection, Scope], T],
        *,
        alone: bool = False,
        announce: Callable[[], bool] = lambda: True,
    ) -> T:
        """Run `function(connection, scope)` in a write transaction, and tell those who wait (database's thread)."""

        async def work(scope: Scope) -> T:
            return await self.database.write(
                lambda connection: function(connection, check_fence(connection, scope)), alone=alone
            )

        while True:
            try:
                result = await self.in_epoch(work)
            except RaceNotRunError as need:
                await self._begin_races(need)
                continue
            if announce():
                self.watch.committed()
            return result

    async def in_epoch(self, work: Callable[[Scope], Awaitable[T]]) -> T:
        """`await work(scope)`; once more when a restore by this store itself has fenced it off (database's thread)."""
        while True:
            scope = self.scope
            try:
                return await work(scope)
            except FencedError:
                async with self._restoring:  # it may be committed, and not yet known to be
                    if self.scope.epoch == scope.epoch:
                        raise

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        """Restore a checkpoint, and go on in the epoch that begins with it (database's thread)."""

        def work(connection: Connection) -> tuple[Checkpoint, Scope]:
            return restore(connection, join(connection, self.scope), step, time.time(), keep_new=keep_new)

        async with self._restoring:
            made, self.scope = await self.database.write(work, alone=True)
        self.watch.committed()
        return made

    async def _begin_races(self, need: RaceNotRunError) -> None:
        await self.database.write(
            lambda connection: begin_races(connection, self.scope, need.names, need.order), alone=True
        )

    async def _commit(self, groups: Sequence[EncodedGroup]) -> list[put.Outcome]:
        return await self.write(lambda connection, scope: put.put_groups(connection, scope, groups, time.time()))

    def close(self) -> None:
        """Commit what waits and let go of everything; blocks. A second call waits for the first."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            try:
                with contextlib.suppress(ClosedError):
                    self.thread.post(self.database.hurry)
                self.thread.close(self._shut_down, timeout=60)
            finally:
                self.executor.shutdown(wait=True)

    def abandon(self) -> None:
        """Close without waiting for it."""
        if self.thread.pid == os.getpid() and not self.closed:
            self.executor.shutdown(wait=False)
            with contextlib.suppress(ClosedError):
                self.thread.post(self.database.hurry)
            self.thread.abandon(self._shut_down, timeout=60)

    async def _shut_down(self) -> None:
        await self.commits.close()
        await self.sweeper.stop()
        await self.watch.stop()
        await self.database.dispose()
