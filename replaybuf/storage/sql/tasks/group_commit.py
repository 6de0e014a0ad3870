"""Group commit: puts that are pending at the same time are committed in one transaction.

Each put returns only after its own commit, a lone put isn't delayed, and a put that can't be stored fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from replaybuf.errors import ClosedError
from replaybuf.storage.places.store import FileLostError
from replaybuf.storage.sql.engine.errors import is_refusal
from replaybuf.storage.sql.statements.lanes import KnownLanes
from replaybuf.storage.sql.statements.new_rows import EncodedGroup, encode_group
from replaybuf.storage.sql.statements.put import Stored
from replaybuf.storage.sql.statements.put_at_once import PutBatch
from replaybuf.storage.sql.tasks.encoding import Encoding
from replaybuf.storage.sql.tasks.file_batch import FileBatch
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import NewGroup, StorageItem
from replaybuf.values.codec.object_refs import UnfetchedError

#: The most groups, and bytes of payloads, of one commit.
MAX_GROUPS = 512
MAX_BYTES = 16 * 1024 * 1024
#: Pending bytes from which a concurrent transaction pays off, and the bytes of one.
ENOUGH_BYTES, SHARE_BYTES = 256 * 1024, 4 * 1024 * 1024
#: Up to this size, a batch is written in milliseconds.
BRIEF_BYTES = 4 * 1024 * 1024
#: Encoding up to this long costs less than a thread switch and back.
LIGHT_SECONDS = 0.0005

Outcome = int | Stored | BaseException
#: Called by a commit to let the next one begin before its own end.
Passed = Callable[[], None]


class _Reply:
    """The future of one call, resolved when all its groups have outcomes."""

    __slots__ = ("future", "left", "loop")

    def __init__(self, groups: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.left = groups


@dataclass(slots=True, eq=False)
class _Pending:
    group: NewGroup
    reply: _Reply
    outcome: Outcome | None = None
    cancelled: bool = False
    encoded: EncodedGroup | None = None
    finished: bool = False
    settled: asyncio.Future[None] | None = None
    dropped: Sequence[StorageItem] = ()


class GroupCommit:
    """The queue of pending puts, and the task that commits them."""

    def __init__(self, transactions: Transactions, encoding: Encoding, presence: Presence, lanes: KnownLanes) -> None:
        self._transactions = transactions
        self._encoding = encoding
        self._codec = encoding.codec
        self._files = encoding.files
        self._presence = presence
        self._lanes = lanes
        self._thread = transactions.thread
        self._writers = transactions.engine.writers
        self._lock = threading.Lock()
        self._queue: deque[_Pending] = deque()
        self._flushing: asyncio.Task[None] | None = None
        self._scheduled = False
        self._closed = False
        self._pipeline: CommitPipeline | None = None
        self._listening = False  # whether the flush waits for enough pending bytes
        self._seconds = 1.0  # to encode a group, in the last batch
        self._bytes = 0.0  # of a payload, in the last batch

    async def put(self, groups: Sequence[NewGroup]) -> list[int | BaseException]:
        """Commit groups together with other pending puts; return the uid or the error of each.

        The groups of one call are in as few transactions as their sizes allow. When the call is cancelled, each group
        is committed wholly or not at all.
        """
        reply = _Reply(len(groups))
        pending = [_Pending(group, reply) for group in groups]
        with self._lock:
            if self._closed:
                raise ClosedError
            self._queue.extend(pending)
            wake, self._scheduled = not self._scheduled, True
            if self._listening and self._is_enough():
                wake, self._listening = True, False
        try:
            if wake:
                self._thread.post(self._start)
            await reply.future
        except BaseException:
            for one in pending:
                one.cancelled = True
            with contextlib.suppress(ClosedError):  # then each has been committed, or never will be
                self._thread.post(self._hold, pending)
            raise
        for one in pending:
            if one.group.dropped is not None:
                one.group.dropped += one.dropped
        return [one.outcome.uid if isinstance(one.outcome, Stored) else one.outcome for one in pending]  # type: ignore[misc]

    async def close(self) -> None:
        """Accept no more puts, and wait until all are committed (database's thread)."""
        with self._lock:
            self._closed = True
        while self._flushing is not None or self._queue:
            self._start()
            if self._flushing is not None:
                await asyncio.wait([self._flushing])

    def _start(self) -> None:
        if self._flushing is None:
            self._flushing = self._thread.loop.create_task(self._flush())
        elif self._pipeline is not None:
            self._pipeline.wake.set()

    def _hold(self, pending: Sequence[_Pending]) -> None:
        """Block later operations until the puts of a cancelled caller are committed or dropped."""
        for one in pending:
            if not one.finished:
                one.settled = self._thread.loop.create_future()
                self._thread.block_on(one.settled)

    async def _flush(self) -> None:
        """Commit batches until the queue is empty, encoding the next one while others are being committed.

        A light batch, such as a lone small group, is encoded in this thread: a thread switch would cost more.
        """
        most = self._writers
        pipeline = self._pipeline = CommitPipeline(most)
        while True:
            batch = self._next_batch() if not pipeline or most == 1 or self._is_enough() else []
            light = not pipeline and self._may_be_light and len(batch) * self._seconds < LIGHT_SECONDS
            encoded = await self._encode_batch(batch, here=light) if batch else []
            if encoded and light:
                await self._commit_batch(encoded)
            elif encoded:
                try:
                    await pipeline.begin(partial(self._commit_batch, encoded))
                except BaseException as error:
                    self._fail(encoded, error)
                    raise
            elif pipeline:
                await self._wait(pipeline)
            elif not batch and self._stop_if_empty():
                return

    @property
    def _may_be_light(self) -> bool:
        return not (self._codec.runs_code or self._files.writes)

    async def _wait(self, pipeline: CommitPipeline) -> None:
        """Wait until a commit has ended, or enough puts are pending for a concurrent one."""
        pipeline.wake.clear()
        with self._lock:
            self._listening = not self._is_enough()
        if self._listening:
            await pipeline.wake.wait()

    def _is_enough(self) -> bool:
        """Return whether enough bytes are pending for a concurrent transaction."""
        return self._writers > 1 and len(self._queue) * self._bytes >= ENOUGH_BYTES

    def _stop_if_empty(self) -> bool:
        with self._lock:
            if self._queue:
                return False
            self._scheduled = False
            self._flushing = None
            return True

    def _next_batch(self) -> list[_Pending]:
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(MAX_GROUPS, len(self._queue)))]
        return self._still_wanted(batch)

    def _still_wanted(self, batch: list[_Pending]) -> list[_Pending]:
        for pending in batch:
            if pending.cancelled:
                _finish(pending)
        return [pending for pending in batch if not (pending.cancelled or pending.finished)]

    async def _encode_batch(self, batch: list[_Pending], *, here: bool) -> list[_Pending]:
        try:
            apart = self._files.batch()
            encode = partial(self._encode_all, apart)
            if here:
                failed = encode(batch)
            else:
                failed = await self._files.written(apart, self._transactions.compute(encode, batch))
            self._answer(failed)
        except BaseException as error:
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise
            return []
        return [pending for pending in batch if pending.encoded is not None]

    async def _encode_anew(self, batch: list[_Pending]) -> list[_Pending]:
        """Encode a batch again, whose arrays have to be in other files."""
        for pending in batch:
            pending.encoded = None
        return await self._encode_batch(batch, here=False)

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
        if apart is not None:
            try:
                apart.flush()
            except Exception as error:
                failed += _unwritten(batch[:count], error)
        self._seconds, self._bytes = (time.thread_time() - began) / count, size / count
        return failed

    async def _commit_batch(self, batch: list[_Pending], passed: Passed = lambda: None) -> None:
        """Commit a batch. If the database refuses it, commit its groups one by one, so that only the bad ones fail."""
        wanted = self._still_wanted(batch)
        groups = [pending.encoded for pending in wanted if pending.encoded is not None]
        try:
            try:
                outcomes: Sequence[Outcome] = []
                if groups:
                    put = PutBatch(groups, self._lanes, passed)
                    brief = sum(len(one.payload) for one in groups) <= BRIEF_BYTES
                    outcomes = await self._transactions.write(put.put, brief=brief, fenced=False)
            except FileLostError:
                self._files.discard(groups)
                await self._commit_batch(await self._encode_anew(wanted), passed)
            except Exception as error:
                if not is_refusal(error):
                    raise
                self._files.discard(groups)
                if len(wanted) == 1:
                    raise
                for pending, group in zip(wanted, groups, strict=True):  # a file is named by one transaction only
                    await self._commit_batch([pending] if group.extent is None else await self._encode_anew([pending]))
            else:
                results = list(zip(wanted, outcomes, strict=True))
                self._files.discard(groups, self._count(results))
                await self._add_dropped(results)
                self._answer(results)
        except BaseException as error:
            self._fail(wanted, error)
            if not isinstance(error, Exception):
                raise

    def _count(self, results: Sequence[tuple[_Pending, Outcome]]) -> list[EncodedGroup]:
        """Count the stored groups, and return them."""
        stored = [one.encoded for one, outcome in results if one.encoded and not isinstance(outcome, BaseException)]
        self._presence.count_puts(stored)
        return stored

    async def _add_dropped(self, results: Sequence[tuple[_Pending, Outcome]]) -> None:
        """Decode the removed groups, for puts with a `dropped` list."""
        for pending, outcome in results:
            if isinstance(outcome, Stored):
                pending.dropped = await self._encoding.decode_removed(outcome.leaving)

    def _fail(self, batch: list[_Pending], error: BaseException) -> None:
        """Resolve the puts of an interrupted batch with the error, so that none waits for ever."""
        problem = ClosedError() if isinstance(error, asyncio.CancelledError) else error
        self._answer([(pending, problem) for pending in batch if not pending.finished])

    def _answer(self, results: Sequence[tuple[_Pending, Outcome]]) -> None:
        """Resolve puts with their outcomes, with one call into each of their event loops."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Pending, Outcome]]] = {}
        for pending, outcome in results:
            _finish(pending)
            by_loop.setdefault(pending.reply.loop, []).append((pending, outcome))
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, answers)
            except RuntimeError:  # that loop was closed: no caller is left
                continue


def _unwritten(batch: Sequence[_Pending], error: Exception) -> list[tuple[_Pending, Outcome]]:
    """Return the groups of a batch whose arrays could not be written, with the error; they aren't stored."""
    failed: list[tuple[_Pending, Outcome]] = []
    for pending in batch:
        if pending.encoded is not None and pending.encoded.extent is not None:
            pending.encoded = None
            failed.append((pending, error))
    return failed


def _finish(pending: _Pending) -> None:
    pending.finished = True
    if pending.settled is not None and not pending.settled.done():
        pending.settled.set_result(None)


def _resolve(answers: Sequence[tuple[_Pending, Outcome]]) -> None:
    for pending, outcome in answers:
        reply, pending.outcome = pending.reply, outcome
        reply.left -= 1
        if not reply.left and not reply.future.done():
            reply.future.set_result(None)


class CommitPipeline:
    """At most `most` concurrent commits (database's thread). `wake` is set whenever one ends."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        self._passed = asyncio.Event()
        self.wake = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    async def begin(self, commit: Callable[[Passed], Coroutine[Any, Any, None]]) -> None:
        """Start `commit(passed)` once fewer than `most` run and the previous commit has called its `passed`."""
        while len(self._tasks) >= self._most:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks:
            await self._passed.wait()
        self._passed = passed = asyncio.Event()
        task = asyncio.get_running_loop().create_task(commit(passed.set))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: passed.set())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.wake.set()
