"""Group commit: puts that are pending at the same time are committed in one transaction.

Each put returns only after its own commit, a lone put isn't delayed, and a put that can't be stored fails alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from replaybuf.errors import ClosedError
from replaybuf.storage.places.store import FileBatch
from replaybuf.storage.sql.engine.driver_errors import is_refusal
from replaybuf.storage.sql.engine.thread import ENDED_EARLY, Call, DatabaseThread
from replaybuf.storage.sql.statements.new_rows import EncodedGroup, encode_group
from replaybuf.storage.sql.statements.put import put_groups
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.transactions import Encoding, Transactions
from replaybuf.storage.values import NewGroup, StorageItem
from replaybuf.values.codec.library_values import UnfetchedError

#: The most groups, and bytes of payloads, of one commit.
MAX_GROUPS = 512
MAX_BYTES = 16 * 1024 * 1024
#: Pending bytes from which a concurrent transaction pays off, and the bytes of one.
ENOUGH_BYTES, SHARE_BYTES = 256 * 1024, 4 * 1024 * 1024
#: Up to this size, a batch is written in milliseconds.
BRIEF_BYTES = 4 * 1024 * 1024
#: Encoding up to this long costs less than a thread switch and back.
LIGHT_SECONDS = 0.0005

Outcome = int | BaseException


class _Put(Call[list[int | BaseException]]):
    """A call that puts groups; it is answered with their uids or errors when all of them have outcomes."""

    __slots__ = ("left", "pending")

    def __init__(self, thread: DatabaseThread, groups: Sequence[NewGroup]) -> None:
        super().__init__(thread)
        self.left = len(groups)
        self.pending = [_Pending(group, self) for group in groups]

    def finish(self) -> None:
        """Make the answer of the outcomes of all groups (database's thread)."""
        self.outcome, pending, self.pending = [], self.pending, []
        for put in pending:
            if put.group.dropped is not None:
                put.group.dropped += put.dropped
            assert put.outcome is not None
            self.outcome.append(put.outcome)


@dataclass(slots=True, eq=False)
class _Pending:
    group: NewGroup
    call: _Put
    outcome: Outcome | None = None
    encoded: EncodedGroup | None = None
    dropped: Sequence[StorageItem] = ()


class GroupCommit:
    """The queue of pending puts, and the workers that commit them."""

    def __init__(self, transactions: Transactions, encoding: Encoding, presence: Presence) -> None:
        self._transactions = transactions
        self._encoding = encoding
        self._codec = encoding.codec
        self._files = encoding.files
        self._presence = presence
        self._thread = transactions.thread
        self._writers = transactions.engine.writers
        self._lock = threading.Lock()
        self._queue: deque[_Pending] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._most_workers = max(self._writers, 2)  # workers: as many as can commit, or encode, at the same time
        self._is_waking = False  # a worker is about to start
        self._closed = False
        self._taking_lock = asyncio.Lock()
        self._passed = asyncio.Event()  # whether the last commit lets the next one begin
        self._passed.set()
        self._seconds = 1.0  # to encode a group, in the last batch
        self._bytes = 0.0  # of a payload, in the last batch

    def put(self, groups: Sequence[NewGroup]) -> Coroutine[Any, Any, list[int | BaseException]]:
        """Commit groups together with other pending puts; return the uid or the error of each, at least one.

        The groups of one call are in as few transactions as their sizes allow. When the call is cancelled, each group
        is committed wholly or not at all.
        """
        call = _Put(self._thread, groups)
        with self._lock:
            if self._closed:
                raise ClosedError
            self._queue.extend(call.pending)
            wake = not self._is_waking and self._needs_worker()
            self._is_waking |= wake
        if wake:
            self._thread.post(self._start)
        return call.result()

    async def close(self) -> None:
        """Accept no more puts, and wait until all are committed (database's thread)."""
        with self._lock:
            self._closed = True
        while self._workers or self._queue:
            self._start()
            await asyncio.wait(self._workers)

    def _start(self) -> None:
        """Start a worker, unless there are as many as there may be (database's thread)."""
        with self._lock:
            self._is_waking = False
            if len(self._workers) < self._most_workers:
                self._workers.add(self._thread.loop.create_task(self._work()))

    async def _work(self) -> None:
        """Commit batches as long as this worker is needed; batches are encoded one by one, and committed in order.

        A light batch, such as a lone small group, is encoded in this thread: a thread switch would cost more.
        """
        try:
            while True:
                async with self._taking_lock:
                    batch = self._next_batch()
                    if batch is None:
                        return
                    light = len(self._workers) == 1 and len(batch) * self._seconds < LIGHT_SECONDS
                    encoded = await self._encode_batch(batch, here=light and self._may_be_light) if batch else []
                    previous, self._passed = self._passed, asyncio.Event()
                    passed = self._passed
                    if self._needs_worker():
                        self._start()
                try:
                    await previous.wait()
                    await self._commit_batch(encoded, passed.set)
                except BaseException as error:
                    self._fail(encoded, error)
                    if not isinstance(error, Exception):
                        raise
                finally:
                    passed.set()
        finally:
            with self._lock:
                self._workers.discard(asyncio.current_task())

    @property
    def _may_be_light(self) -> bool:
        return not (self._codec.runs_code or self._files.writes)

    def _needs_worker(self) -> bool:
        """Return whether another worker is wanted: the first, or one to encode meanwhile or to commit concurrently."""
        return not self._workers or (len(self._workers) < self._most_workers and self._is_enough_pending())

    def _is_enough_pending(self) -> bool:
        """Return whether enough is pending for another worker."""
        pending = len(self._queue)
        return pending * self._seconds > LIGHT_SECONDS if self._writers == 1 else pending * self._bytes >= ENOUGH_BYTES

    def _next_batch(self) -> list[_Pending] | None:
        """Return the next batch; None if this worker isn't needed any more."""
        with self._lock:
            has_others = len(self._workers) > 1
            if not self._queue or (has_others and not self._is_enough_pending()):
                self._workers.discard(asyncio.current_task())
                return None
            batch = [self._queue.popleft() for _ in range(min(MAX_GROUPS, len(self._queue)))]
        return self._drop_gone(batch)

    def _drop_gone(self, batch: list[_Pending]) -> list[_Pending]:
        """Drop the puts of callers that have gone, and return those that have no outcome yet."""
        self._answer([(put, ClosedError()) for put in batch if put.call.is_gone and put.outcome is None])
        return [put for put in batch if put.outcome is None]

    async def _encode_batch(self, batch: list[_Pending], *, here: bool) -> list[_Pending]:
        try:
            file_batch = self._files.batch()
            encode = partial(self._encode_all, file_batch)
            failed = encode(batch) if here else await self._transactions.compute(encode, batch)
            try:
                await self._files.write(file_batch)
            except Exception as error:
                failed += _fail_unwritten(batch, error)
            self._answer(failed)
        except BaseException as error:
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise
            return []
        return [pending for pending in batch if pending.encoded is not None]

    async def _encode_anew(self, pending: _Pending) -> list[_Pending]:
        """Encode a group again, whose arrays have to be in another file."""
        pending.encoded = None
        return await self._encode_batch([pending], here=False)

    def _encode_all(self, apart: FileBatch | None, batch: list[_Pending]) -> list[tuple[_Pending, Outcome]]:
        failed: list[tuple[_Pending, Outcome]] = []
        size, count, began = 0, 0, time.thread_time()
        for place, pending in enumerate(batch):
            if size > (MAX_BYTES if self._writers == 1 else SHARE_BYTES):
                # The rest goes back to the head of the queue, for the next transaction.
                with self._lock:
                    self._queue.extendleft(reversed(batch[place:]))
                break
            count += 1
            try:
                pending.encoded = encode_group(self._codec, pending.group, apart)
                size += pending.encoded.nbytes
            except UnfetchedError as error:  # without traceback, whose frames would keep the objects alive
                failed.append((pending, error.with_traceback(None)))
            except Exception as error:
                failed.append((pending, error))
        self._seconds, self._bytes = (time.thread_time() - began) / count, size / count
        return failed

    async def _commit_batch(self, batch: list[_Pending], passed: Callable[[], None] = lambda: None) -> None:
        """Commit a batch. If the database refuses it, commit its groups one by one, so that only the bad ones fail."""
        members = self._drop_gone(batch)
        groups = [pending.encoded for pending in members if pending.encoded is not None]
        if len(members) < len(batch):
            self._files.discard([pending.encoded for pending in batch if pending.encoded is not None], groups)
        if not groups:
            return
        try:
            put = partial(put_groups, groups=groups, reserved=passed)
            brief = sum(len(encoded.payload) for encoded in groups) <= BRIEF_BYTES
            outcomes: Sequence[Outcome] = await self._transactions.write(put, brief=brief, fenced=False, wakes=False)
            if any(isinstance(outcome, int) for outcome in outcomes):  # else a put that waits for room woke itself
                self._transactions.committed()
        except Exception as error:
            refused = is_refusal(error)
            if refused:
                self._files.discard(groups)
            if not refused or len(members) == 1:
                self._fail(members, error)
                return
            for pending, group in zip(members, groups, strict=True):  # a file is named by one transaction only
                await self._commit_batch([pending] if group.extent is None else await self._encode_anew(pending))
        else:
            results = list(zip(members, outcomes, strict=True))
            self._files.discard(groups, self._count(results))
            await self._add_dropped(results)
            self._answer(results)

    def _count(self, results: Sequence[tuple[_Pending, Outcome]]) -> list[EncodedGroup]:
        """Count the stored groups, and return them."""
        stored = [put.encoded for put, outcome in results if put.encoded and not isinstance(outcome, BaseException)]
        self._presence.count_puts(stored)
        return stored

    async def _add_dropped(self, results: Sequence[tuple[_Pending, Outcome]]) -> None:
        """Decode the removed groups, for puts with a `dropped` list."""
        for pending, outcome in results:
            if isinstance(outcome, int) and pending.encoded is not None and pending.encoded.leaving:
                pending.dropped = await self._encoding.decode_removed(pending.encoded.leaving)

    def _fail(self, batch: list[_Pending], error: BaseException) -> None:
        """Resolve the puts of an interrupted batch with the error, so that none waits for ever."""
        problem = ClosedError(ENDED_EARLY) if isinstance(error, asyncio.CancelledError) else error
        self._answer([(pending, problem) for pending in batch if pending.outcome is None])

    def _answer(self, results: Sequence[tuple[_Pending, Outcome]]) -> None:
        """Note the outcomes of puts, and answer the calls of which these were the last."""
        finished: dict[_Put, None] = {}
        for pending, outcome in results:
            call, pending.outcome = pending.call, outcome
            call.left -= 1
            if not call.left:
                call.finish()
                finished[call] = None
        self._thread.answer(finished)


def _fail_unwritten(batch: Sequence[_Pending], error: Exception) -> list[tuple[_Pending, Outcome]]:
    """Return the groups of a batch whose arrays could not be written, with the error; they aren't stored."""
    failed: list[tuple[_Pending, Outcome]] = []
    for pending in batch:
        if pending.encoded is not None and pending.encoded.extent is not None:
            pending.encoded = None
            failed.append((pending, error))
    return failed
