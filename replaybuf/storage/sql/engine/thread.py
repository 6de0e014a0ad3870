"""A store's thread with an event loop; whether a call's result is its caller's or undone; waits of closing.

The database's work never blocks the caller's loop, and a caller that is cancelled, or whose loop ends, doesn't
interrupt a transaction half-way. Each operation ends in one of two ways: its result reaches the caller, or the caller
was cancelled and the operation is undone. Later operations wait until that is settled."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from replaybuf.errors import ClosedError, FencedError, LockedError, ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.outage import OutcomeUnknownError, until_committed

T = TypeVar("T")

#: How long the other side of a TCP connection may fail to answer before the connection is closed.
SILENCE_SECONDS = 20


def keepalive() -> tuple[int, int, int]:
    """Return the TCP keepalive parameters: idle seconds, probe interval in seconds, and number of probes."""
    return max(1, SILENCE_SECONDS // 2), max(1, SILENCE_SECONDS // 4), 2


_transports: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()


class KeepaliveLoop(asyncio.SelectorEventLoop):
    """An event loop whose TCP connections notice a silent peer, and whose connections aren't inherited by forks."""

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        """Make a connection as asyncio does."""
        transport, protocol = await super().create_unix_connection(*args, **options)
        _transports.add(transport)
        return transport, protocol

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Make a connection as asyncio does."""
        transport, protocol = await super().create_connection(*args, **options)
        _transports.add(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        for name, value in zip(names, (*keepalive(), SILENCE_SECONDS * 1000), strict=True):
            if hasattr(socket, name):  # not every system has all options
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return transport, protocol


def _close_inherited_connections() -> None:
    """Close a forked process's copies of its parent's connections: by them a server would take a dead parent for alive.

    Their numbers stay taken: else another file could get one, which an inherited object closes one day.
    """
    with contextlib.suppress(OSError), open(os.devnull, "rb") as nothing:
        for transport in list(_transports):
            own = transport.get_extra_info("socket")
            if own is not None and own.fileno() >= 0:
                os.dup2(nothing.fileno(), own.fileno(), inheritable=False)
    _transports.clear()  # in forks of this process, the numbers may be those of other files


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_connections)

_RETRY_SECONDS = 1.0
#: How often a write is tried in a file that seems to be damaged while the store is being closed.
_LAST_ATTEMPTS = 5
# The time for callers to receive their results when the store is closed; unreceived results are undone.
_RECEIVING_SECONDS = 1.0

_logger = logging.getLogger("replaybuf.thread")

_running_threads: weakref.WeakSet[DatabaseThread] = weakref.WeakSet()


#: A call that close ended, of which nobody knows whether the database has done it, or still does.
ENDED_EARLY = "the buffer was closed before this call had ended; what it was to write may be stored, or not"

# The states of a call. Its result is the caller's once it was received. If the caller goes while it is running (GONE),
# or offered (REFUSED), it is the database's thread's, which undoes what was done (ENDED).
_RUNNING, _OFFERED, _RECEIVED, _GONE, _REFUSED, _ENDED = range(6)


class Call(Generic[T]):
    """One operation of a caller, whose result the database's thread offers, and the caller receives.

    A caller that is cancelled has gone. What was done for it is undone by the database's thread, by `undo(outcome)`;
    an outcome of None needs no undoing.
    """

    __slots__ = ("__weakref__", "_ended", "_lock", "_state", "_thread", "answered", "error", "loop", "outcome", "undo")

    def __init__(self, thread: DatabaseThread, undo: Callable[[Any], Awaitable[object]] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.undo = undo
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self.answered = self.loop.create_future()
        self._thread = thread
        self._lock = threading.Lock()
        self._state = _RUNNING
        self._ended: asyncio.Event | None = None  # the database's thread's, if later operations wait for it

    # Caller's loop

    async def result(self) -> T:
        """Wait for the result, and receive it. Raises ClosedError when it was undone because the store was closed."""
        try:
            await self.answered
        except BaseException:
            if self.withdraw():
                with contextlib.suppress(ClosedError):  # then nothing of it is left to be done
                    self._thread.post(self._thread.block_until_undone, self)
            raise
        finally:
            self._thread.unreceived.pop(id(self), None)
        with self._lock:
            if self._state != _OFFERED:
                raise ClosedError
            self._state = _RECEIVED
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # the traceback would keep this frame alive
        return self.outcome  # type: ignore[return-value]

    # Any thread

    @property
    def is_gone(self) -> bool:
        """Whether the caller has gone before the result was offered."""
        return self._state == _GONE

    def withdraw(self) -> bool:
        """Give the result up; return False if it was received or given up before."""
        with self._lock:
            if self._state not in (_RUNNING, _OFFERED):
                return False
            self._state = _GONE if self._state == _RUNNING else _REFUSED
            return True

    # Database's thread

    def offer(self) -> bool:
        """Offer the result to the caller; return False if it has gone."""
        with self._lock:
            if self._state != _RUNNING:
                return False
            self._state = _OFFERED
            return True

    async def undo_outcome(self) -> None:
        """Undo what was done for a caller that has gone."""
        try:
            if self.undo is not None and self.outcome is not None:
                await self._thread.settle(partial(self.undo, self.outcome))
        finally:
            self._state = _ENDED
            if self._ended is not None:
                self._ended.set()

    async def wait_undone(self) -> None:
        """Wait until what was done for a caller that has gone is undone."""
        if self._state == _REFUSED:
            await self.undo_outcome()
        elif self._state == _GONE:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()


class DatabaseThread:
    """Runs coroutines in its own event loop, for callers in any loop and any thread."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.loop = KeepaliveLoop()
        self._unsettled_tasks: set[asyncio.Future[Any]] = set()
        self._running_tasks: set[asyncio.Future[Any]] = set()
        self._retries: set[asyncio.Future[Any]] = set()
        #: Calls with an undo whose results have not been received yet, as weak references: a caller whose loop was
        #: closed withdraws its call when the coroutine is garbage-collected.
        self.unreceived: dict[int, weakref.ref[Call[Any]]] = {}
        self._posting_lock = threading.RLock()  # a finalizer may post while this thread is posting
        self._ending = False
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        _running_threads.add(self)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Nothing is posted any more. Tasks that outlasted the closing timeout are cancelled: ClosedError.
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=5))
        self.loop.close()

    async def run(
        self, work: Callable[[], Awaitable[T]], *, undo: Callable[[Any], Awaitable[object]] | None = None
    ) -> T:
        """Run `work()` in the database's thread and return its result.

        When the caller is cancelled, work already begun is completed, and then `undo(result)` is run until it is
        committed; it may be run again after an error. So is a work whose outcome is unknown (OutcomeUnknownError), once
        it is known. Raises ClosedError after `close`.
        """
        call: Call[T] = Call(self, undo)
        self.post(self._start, call, work)
        return await call.result()

    def run_blocking(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
        """Run `work()` as `run` does, blocking the calling thread; raises LockedError after `timeout` seconds."""
        with self._posting_lock:
            if self._closed:
                raise ClosedError
            future = asyncio.run_coroutine_threadsafe(self._run_after_drain(work), self.loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise LockedError(f"the database did not answer within {timeout:g} s") from error
        except concurrent.futures.CancelledError as error:  # the thread ended
            raise ClosedError from error

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` in the database's thread, soon. All posted calls run before the thread ends."""
        with self._posting_lock:
            if self._closed:
                raise ClosedError
            self.loop.call_soon_threadsafe(function, *args)

    def block_on(self, task: asyncio.Future[Any]) -> None:
        """Block later operations until `task` is done (database's thread)."""
        self._unsettled_tasks.add(task)
        task.add_done_callback(self._unsettled_tasks.discard)

    async def drain(self) -> None:
        """Wait for the operations of cancelled callers to be undone (database's thread)."""
        if self._unsettled_tasks:
            await asyncio.wait(set(self._unsettled_tasks))

    async def drain_all(self) -> None:
        """Undo unreceived results, and wait for all work without a caller (database's thread)."""
        self._undo_unreceived()
        while tasks := self._unsettled_tasks | self._retries:
            await asyncio.wait(tasks)

    def _undo_unreceived(self) -> None:
        for reference in list(self.unreceived.values()):
            call = reference()
            if call is not None and call.withdraw():
                self.block_until_undone(call)

    async def settle(self, write: Callable[[], Awaitable[object]]) -> None:
        """Run a write that has to be committed, once (database's thread).

        If it fails, it is tried again every second until it is committed, or is fenced off. Closing waits for that,
        but in a damaged file; operations don't.
        """
        attempt = until_committed(write)
        if not await _is_settled(attempt):
            self._retry_until_settled(attempt)

    def _retry_until_settled(self, attempt: Callable[[], Awaitable[object]]) -> None:
        task = self.loop.create_task(self._try_until_settled(attempt))
        self._retries.add(task)
        task.add_done_callback(self._retries.discard)

    async def _try_until_settled(self, attempt: Callable[[], Awaitable[object]]) -> None:
        settled, attempts = False, _LAST_ATTEMPTS
        while not settled:
            await asyncio.sleep(_RETRY_SECONDS)
            attempts -= self._ending
            settled = await _is_settled(attempt, is_last=attempts < 0)

    async def catch_up(self, timeout: float) -> None:
        """Wait for writes of `settle` that are tried again, at most `timeout` seconds (database's thread)."""
        if self._retries:
            await asyncio.wait(set(self._retries), timeout=timeout)

    def close(self, last: Callable[[], Awaitable[object]], timeout: float) -> None:
        """Refuse new operations, let running ones end, run `last()`, and end the thread. Blocks; idempotent.

        Operations that take longer than `timeout` seconds are cancelled; their callers get a ClosedError. Raises
        UnreachableError, in doubt, when all this takes three times as long.
        """
        with self._posting_lock:
            if self._closed:
                return
            ending = asyncio.run_coroutine_threadsafe(self._end(last, timeout), self.loop)
        try:
            ending.result(3 * timeout)
        except concurrent.futures.TimeoutError as error:
            if ending.done():
                raise
            late = UnreachableError(f"the database did not answer within {3 * timeout:g} s; {ENDED_EARLY}")
            late.in_doubt = True
            raise late from error
        finally:
            with self._posting_lock:
                self._closed = True
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)

    async def _end(self, last: Callable[[], Awaitable[object]], timeout: float) -> None:
        self._ending = True
        await self._finish(timeout)
        deadline = self.loop.time() + _RECEIVING_SECONDS
        while self.unreceived and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._undo_unreceived()
        await self._finish(timeout)
        await last()

    async def _finish(self, timeout: float) -> None:
        while tasks := self._running_tasks | self._unsettled_tasks | self._retries:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()

    async def _run_after_drain(self, work: Callable[[], Awaitable[T]]) -> T:
        await self.drain()
        return await work()

    # Calls

    def _start(self, call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        if self._ending:
            call.error = ClosedError()
            self.answer([call])
            return
        if call.undo is not None:
            key = id(call)
            self.unreceived[key] = weakref.ref(call, lambda _: self.unreceived.pop(key, None))
        task = self.loop.create_task(self._perform(call, work))
        self._running_tasks.add(task)
        task.add_done_callback(self._running_tasks.discard)

    async def _perform(self, call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            # Later operations wait for that of a caller that has gone, which must not wait for itself.
            if not call.is_gone:
                await self.drain()
            if not call.is_gone:
                call.outcome = await work()
        except asyncio.CancelledError:  # the thread ends
            call.error = ClosedError(ENDED_EARLY)
        except BaseException as error:
            call.error = error
            if isinstance(error, OutcomeUnknownError) and call.undo is not None:
                self._retry_until_settled(until_committed(partial(_undo_if_committed, error, call.undo)))
        self.answer([call])

    def answer(self, calls: Iterable[Call[Any]]) -> None:
        """Offer calls their results, with one wake of each event loop (database's thread)."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Call[Any]]] = {}
        for call in calls:
            if call.offer():
                by_loop.setdefault(call.loop, []).append(call)
            else:
                self.block_on(self.loop.create_task(call.undo_outcome()))
        for loop, offered in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, offered)
            except RuntimeError:  # the callers' loop was closed
                for call in offered:
                    if call.withdraw():
                        self.block_until_undone(call)

    def block_until_undone(self, call: Call[Any]) -> None:
        """Block later operations until that of a caller that has gone has ended and is undone (database's thread)."""
        self.block_on(self.loop.create_task(call.wait_undone()))


def _wake(calls: Iterable[Call[Any]]) -> None:
    for call in calls:
        if not call.answered.done():
            call.answered.set_result(None)


async def _is_settled(attempt: Callable[[], Awaitable[object]], *, is_last: bool = False) -> bool:
    """Attempt a write of `DatabaseThread.settle`; return False if it has to be tried again."""
    try:
        await attempt()
    except FencedError as error:  # work from before a restore is obsolete
        _logger.debug("will not be tried again: %s", error)
    except ReplayBufError as error:
        is_hopeless = is_last and error.reason == "not a database"
        clause = "" if is_hopeless else " yet, and this is tried again"
        _logger.warning("an operation that nobody received is not undone%s: %s", clause, error)
        return is_hopeless
    return True


async def _undo_if_committed(doubt: OutcomeUnknownError, undo: Callable[[Any], Awaitable[object]]) -> None:
    """Undo an operation that was reported to its caller as unknown, if it was committed."""
    if await doubt.was_committed() and doubt.result is not None:
        await undo(doubt.result)


@atexit.register
def _settle_all() -> None:
    # Threads of this module are daemons: without this, a process that exits right after cancelling a take, or with an
    # event loop abandoned in the middle of one, could exit before the groups are back in the store.
    for thread in list(_running_threads):
        if thread.pid == os.getpid() and not thread._closed:
            with contextlib.suppress(ReplayBufError):
                thread.run_blocking(thread.drain_all, 10)
