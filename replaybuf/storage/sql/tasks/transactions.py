"""Fenced transactions of one buffer, and the encoding of groups for them, beside them in a pool of threads.

Arrays that are kept apart are written before the transaction that names them begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from replaybuf.common.progress import in_pieces
from replaybuf.errors import DecodeError, FencedError, ReplayBufError, StorageError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements.checkpoints import restore
from replaybuf.storage.sql.statements.eviction import decode_removed, read_removed
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.new_rows import EncodedGroup, encode_group
from replaybuf.storage.sql.statements.ordering import RaceNotRunError, begin_races
from replaybuf.storage.sql.statements.rows import GroupRow, decode_leniently
from replaybuf.storage.sql.tasks.commit_watch import Watch
from replaybuf.storage.sql.tasks.payload_files import PayloadFiles
from replaybuf.storage.values import Checkpoint, NewGroup, StorageItem
from replaybuf.values.codec.payload import Codec

S = TypeVar("S")
T = TypeVar("T")

#: Groups are read in pieces of so many, and of payloads of so many bytes.
PIECE_GROUPS, PIECE_BYTES = 256, 8 * 1024 * 1024

#: How long closing waits for work in other threads that nobody waits for any more.
_ENDING_SECONDS = 10.0

#: Slightly less than the largest block of memory whose release changes glibc's thresholds, with its header.
_LARGEST_BLOCK = (32 << 20) - 4096


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
        self._restore_lock = asyncio.Lock()
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="replaybuf-codec")

    async def read(self, function: Callable[[Transaction], T], *, single: bool = False, fenced: bool = False) -> T:
        """Run `function(tx)` in a read transaction; `single` as in `Database.read`.

        With `fenced` the function checks the fence. Raises FencedError.
        """
        while True:
            scope = self.scope
            try:
                result = await self.engine.read(function, scope, single=single)
                if fenced and self.engine.missing_commits:
                    raise FencedError(self.engine.missing_commits, reason="commits lost")
                return result
            except FencedError as error:
                await self._rejoin(scope, error)

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
                if wakes:
                    self._watch.committed()
                return result

    async def restore(self, step: int) -> Checkpoint:
        """Restore a checkpoint, and continue in the epoch that begins with it."""

        def work(tx: Transaction) -> tuple[Checkpoint, Scope]:
            return restore(tx, step, time.time()), tx.scope

        # Draws still to be undone in a checkpoint must be undone before it is restored.
        await self.thread.catch_up(self.engine.lock_timeout)
        async with self._restore_lock:
            checkpoint, self.scope = await self.engine.write(work, self.scope, alone=True, accepts_loss=True)
        self._watch.committed()
        return checkpoint

    async def _rejoin(self, scope: Scope, error: FencedError) -> None:
        """Return if the buffer was fenced off by a restore through this object; otherwise raise the error."""
        async with self._restore_lock:  # a restore may be committed, but not yet known to be
            if self.scope.epoch == scope.epoch:
                raise error

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

    def end_computing(self) -> None:
        """End the threads of `compute` (any thread); one in which a user's converter hangs is left to itself."""
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down, and has ended them
            ending = threading.Thread(target=self._executor.shutdown, name="replaybuf-ending", daemon=True)
            ending.start()
            ending.join(_ENDING_SECONDS)


class Encoding:
    """Encodes and decodes the groups of an open buffer, in other threads (called in the database's thread)."""

    def __init__(self, codec: Codec, transactions: Transactions, files: PayloadFiles) -> None:
        self.codec = codec
        self.files = files
        self._transactions = transactions
        _keep_freed_memory()

    async def write(self, groups: Sequence[NewGroup], function: Callable[[Transaction, list[EncodedGroup]], T]) -> T:
        """Encode groups and return `function(tx, encoded)`, run in a fenced write transaction.

        None must mean that nothing was stored.
        """
        batch = self.files.batch()
        encode = partial(encode_group, self.codec, apart=batch)
        encoded = await self._transactions.compute(lambda new: [*map(encode, new)], groups)
        await self.files.write(batch)
        try:
            result = await self._transactions.write(lambda tx: function(tx, encoded))
        except ReplayBufError as error:
            if not isinstance(error, StorageError):  # refused, and rolled back
                self.files.discard(encoded)
            raise
        if result is None:
            self.files.discard(encoded)
        return result

    async def read(self, read: Callable[[Transaction], list[GroupRow]], deferred: frozenset[str]) -> list[StorageItem]:
        """Return groups that a transaction reads with their payloads; undecodable ones have an `error`."""
        rows = await self._transactions.read(read)
        await self.files.fetch(rows, deferred)
        if any(isinstance(row.tail, DecodeError) for row in rows):  # or the group was removed, or its payload moved
            rows = await self._transactions.read(read)
            await self.files.fetch(rows, deferred)
        decode = partial(decode_leniently, codec=self.codec, deferral=self.files.deferral(deferred))
        return await self._transactions.compute(decode, rows)

    async def decode(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        """Return groups, whose tails that are kept apart are read. Raises DecodeError."""
        await self.files.fetch(rows)
        return await self._transactions.compute(lambda chunk: [row.decode(self.codec) for row in chunk], rows)

    async def decode_removed(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        """Return removed groups for their caller, whose payloads are read now, in pieces."""
        items: list[StorageItem] = []
        for piece in in_pieces(rows, lambda row: row.column("bytes"), PIECE_GROUPS, PIECE_BYTES):
            try:  # the removal is committed, and can't fail any more
                await self._transactions.read(partial(read_removed, rows=piece))
                await self.files.fetch(piece)
            except ReplayBufError as error:
                for row in piece:
                    row.tail = row.tail if row.tail is not None or not row.is_apart else DecodeError(str(error))
            items += await self._transactions.compute(partial(decode_removed, codec=self.codec), piece)
            self.files.read(row.uid for row in piece)
            for row in piece:
                row.payload = row.tail = None
        return items


def _behind_fence(function: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    """Return the function with a check of the fence before it."""

    def guarded(tx: Transaction) -> T:
        check_fence(tx)
        return function(tx)

    return guarded


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory for the next batch of payloads.

    By default it returns the memory of a batch to the kernel, and each page of the next batch is a page fault: a tenth
    of the processor's time of puts and takes of 100 KB. It raises its thresholds when a large block is freed
    (mallopt(3), M_MMAP_THRESHOLD). This block consists of zeros that are never touched, so that it takes no memory.
    """
    bytes(_LARGEST_BLOCK)
