"""A thread with an event loop of its own, in which a store talks to its database.

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
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from replaybuf.errors import ClosedError, FencedError, LockedError, ReplayBufError

T = TypeVar("T")

#: How long the other side of a TCP connection may fail to answer before the connection is closed.
SILENCE_SECONDS = 20


def keepalive() -> tuple[int, int, int]:
    """Return the TCP keepalive parameters: idle seconds, probe interval in seconds, and number of probes."""
    return max(1, SILENCE_SECONDS // 2), max(1, SILENCE_SECONDS // 4), 2


class KeepaliveLoop(asyncio.SelectorEventLoop):
    """An event loop whose TCP connections notice a silent peer."""

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Make a connection as asyncio does."""
        transport, protocol = await super().create_connection(*args, **options)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        for name, value in zip(names, (*keepalive(), SILENCE_SECONDS * 1000), strict=True):
            if hasattr(socket, name):  # not every system has all options
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return transport, protocol


_RETRY_SECONDS = 1.0
# The time for callers to receive their results when the store is closed; unreceived results are undone.
_RECEIVING_SECONDS = 1.0

_logger = logging.getLogger("replaybuf.thread")

_running: weakref.WeakSet[DatabaseThread] = weakref.WeakSet()


class _Call(Generic[T]):
    """One operation, handed from its caller to the database's thread; exactly one of the two owns the result."""

    def __init__(self, undo: Callable[[T], Awaitable[object]] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.undo = undo
        self.finished = self._loop.create_future()
        self.gone = False
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self._has_outcome = False
        self.task: asyncio.Task[None] | None = None

    def offer(self, outcome: T | None, error: BaseException | None) -> bool:
        """Offer the result to the caller (database's thread); return False when the caller was cancelled."""
        with self._lock:
            if self.gone:
                return False
            self.outcome, self.error, self._has_outcome = outcome, error, True
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the caller's loop was closed
            return not self.withdraw()
        return True

    def receive(self) -> T:
        """Return the result (caller's loop). Raises ClosedError when it was undone because the store was closed."""
        with self._lock:
            if self.gone:
                raise ClosedError
            self.gone = True
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # the traceback would keep this frame alive
        return self.outcome  # type: ignore[return-value]

    def withdraw(self) -> bool:
        """Record that the caller gives up; return whether the operation has a result that must be undone."""
        with self._lock:
            first, self.gone = not self.gone, True
            return first and self._has_outcome and self.error is None

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


class DatabaseThread:
    """Runs coroutines in its own event loop, for callers in any loop and any thread."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.loop = KeepaliveLoop()
        self._unsettled: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Future[Any]] = set()
        self._retries: set[asyncio.Future[Any]] = set()
        # Calls whose results have not been received yet, as weak references: a caller whose loop was closed withdraws
        # its call when the coroutine is garbage-collected.
        self._calls: dict[int, weakref.ref[_Call[Any]]] = {}
        self._posting = threading.RLock()  # a finalizer may post while this thread is posting
        self._ending = False
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

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

    async def run(self, work: Callable[[], Awaitable[T]], *, undo: Callable[[T], Awaitable[object]] | None = None) -> T:
        """Run `work()` in the database's thread and return its result.

        When the caller is cancelled, work already begun is completed, and then `undo(result)` is run. Raises
        ClosedError after `close`.
        """
        call: _Call[T] = _Call(undo)
        self.post(self._start, call, work)
        try:
            await call.finished
        except BaseException:
            with contextlib.suppress(ClosedError):  # withdrawn at closing
                self.post(self._settle_call, call, call.withdraw())
            raise
        finally:
            self._calls.pop(id(call), None)
        return call.receive()

    def run_blocking(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
        """Run `work()` as `run` does, blocking the calling thread; raises LockedError after `timeout` seconds."""
        coroutine = self._settled(work)
        try:
            with self._posting:
                if self._closed:
                    raise ClosedError
                future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except ClosedError:
            coroutine.close()
            raise
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
        with self._posting:
            if self._closed:
                raise ClosedError
            self.loop.call_soon_threadsafe(function, *args)

    def block_on(self, task: asyncio.Future[Any]) -> None:
        """Block later operations until `task` is done (database's thread)."""
        self._unsettled.add(task)
        task.add_done_callback(self._unsettled.discard)

    async def drain(self) -> None:
        """Wait for the operations of cancelled callers to be undone (database's thread)."""
        if self._unsettled:
            await asyncio.wait(set(self._unsettled))

    async def drain_all(self) -> None:
        """Undo unreceived results, and wait for all work without a caller (database's thread)."""
        self._take_back()
        while tasks := self._unsettled | self._retries:
            await asyncio.wait(tasks)

    def _take_back(self) -> None:
        for reference in list(self._calls.values()):
            call = reference()
            if call is not None and call.undo is not None:
                self._settle_call(call, call.withdraw())

    def keep_trying(self, work: Callable[[], Awaitable[object]]) -> None:
        """Retry `work()` every second until it succeeds, or is fenced off (database's thread).

        Closing waits for it; operations don't.
        """
        task = self.loop.create_task(self._try_until_done(work))
        self._retries.add(task)
        task.add_done_callback(self._retries.discard)

    async def catch_up(self, timeout: float) -> None:
        """Wait for the work of `keep_trying`, at most `timeout` seconds (database's thread)."""
        if self._retries:
            await asyncio.wait(set(self._retries), timeout=timeout)

    async def _try_until_done(self, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                await work()
                return
            except FencedError as error:  # work from before a restore is obsolete
                _logger.warning("will not be tried again: %s", error)
                return
            except ReplayBufError as error:
                _logger.warning("will be tried again: %s", error)

    def close(self, last: Callable[[], Awaitable[object]], timeout: float) -> None:
        """Refuse new operations, let running ones end, run `last()`, and end the thread. Blocks; idempotent.

        Operations that take longer than `timeout` seconds are cancelled; their callers get a ClosedError.
        """
        with self._posting:
            if self._closed:
                return
            ending = asyncio.run_coroutine_threadsafe(self._end(last, timeout), self.loop)
        try:
            ending.result(3 * timeout)
        finally:
            with self._posting:
                self._closed = True
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)

    async def _end(self, last: Callable[[], Awaitable[object]], timeout: float) -> None:
        self._ending = True
        await self._finish(timeout)
        deadline = self.loop.time() + _RECEIVING_SECONDS
        while self._calls and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._take_back()
        await self._finish(timeout)
        await last()

    async def _finish(self, timeout: float) -> None:
        while tasks := self._running | self._unsettled | self._retries:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()

    async def _settled(self, work: Callable[[], Awaitable[T]]) -> T:
        await self.drain()
        return await work()

    def _start(self, call: _Call[T], work: Callable[[], Awaitable[T]]) -> None:
        if self._ending:
            call.offer(None, ClosedError())
            return
        key = id(call)
        self._calls[key] = weakref.ref(call, lambda _: self._calls.pop(key, None))
        call.task = self.loop.create_task(self._perform(call, work))
        self._running.add(call.task)
        call.task.add_done_callback(self._running.discard)

    async def _perform(self, call: _Call[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            if call.gone:  # checked first: later operations then wait for this task, which must not wait for itself
                return
            outcome: T | None = None
            problem: BaseException | None = None
            try:
                await self.drain()
                if call.gone:
                    return
                outcome = await work()
            except asyncio.CancelledError:  # the thread ends
                problem = ClosedError("the buffer was closed before this operation ended; nothing of it was stored")
            except BaseException as error:
                problem = error
            if not call.offer(outcome, problem) and problem is None:
                await _undone(call, outcome)
        finally:
            if call.gone:
                self._calls.pop(id(call), None)

    def _settle_call(self, call: _Call[Any], undo: bool) -> None:
        """Block later operations until the operation of a cancelled caller has ended and is undone."""
        if undo and call.undo is not None:
            self.block_on(self.loop.create_task(_undone(call, call.outcome)))
        elif call.task is not None and not call.task.done():
            self.block_on(call.task)


async def _undone(call: _Call[Any], outcome: Any) -> None:
    if call.undo is not None:
        try:
            await call.undo(outcome)
        except ReplayBufError as error:
            _logger.warning("an operation whose caller has gone is not undone yet: %s", error)


@atexit.register
def _settle_all() -> None:
    # Threads of this module are daemons: without this, a process that exits right after cancelling a take, or with an
    # event loop abandoned in the middle of one, could exit before the groups are back in the store.
    for thread in list(_running):
        if thread.pid == os.getpid() and not thread._closed:
            with contextlib.suppress(ReplayBufError):
                thread.run_blocking(thread.drain_all, 10)
