"""A thread with an event loop of its own, in which a store talks to its database.

The caller's loop is never blocked by the database's work, and a caller that is cancelled, or whose loop ends, doesn't
interrupt a transaction half way. Each operation has one of two ends: its result reaches the caller, or the caller has
gone and the operation is undone. Operations that start later wait until that is settled.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from replaybuf.errors import ClosedError, LockedError

T = TypeVar("T")

_running: weakref.WeakSet[DatabaseThread] = weakref.WeakSet()


class _Call(Generic[T]):
    """One operation between its caller and the database's thread: exactly one of them ends up with the result."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.finished = self._loop.create_future()
        self.gone = False
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self._has_outcome = False
        self.task: asyncio.Task[None] | None = None

    def offer(self, outcome: T | None, error: BaseException | None) -> bool:
        """Hand the result over (database's thread); False when the caller has gone."""
        with self._lock:
            if self.gone:
                return False
            self.outcome, self.error, self._has_outcome = outcome, error, True
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the caller's loop was closed
            return not self.withdraw()
        return True

    def withdraw(self) -> bool:
        """Say that the caller goes away; True when it leaves an outcome behind that has to be undone."""
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
        self.loop = asyncio.new_event_loop()
        self._unsettled: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def run(self, work: Callable[[], Awaitable[T]], *, undo: Callable[[T], Awaitable[object]] | None = None) -> T:
        """Run `work()` in the database's thread and return its result.

        When the caller is cancelled, work that has begun goes on to its end, and then `undo(result)` is run. Raises
        ClosedError after `close`.
        """
        call: _Call[T] = _Call()
        self.post(self._start, call, work, undo)
        try:
            await call.finished
        except BaseException:
            if call.withdraw() and undo is not None:
                self.post_late(self._start_undo, undo, call.outcome)
            else:
                self.post_late(self._mark_unsettled, call)
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # the traceback would hold on to this frame
        return call.outcome  # type: ignore[return-value]

    def run_blocking(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
        """As `run`, blocking the calling thread; raises LockedError after `timeout` seconds."""
        if self._closed:
            raise ClosedError
        future = asyncio.run_coroutine_threadsafe(self._settled(work), self.loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise LockedError(f"the database did not answer within {timeout:g} s") from error

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` called in the database's thread, soon."""
        if self._closed:
            raise ClosedError
        self.post_late(function, *args)

    def post_late(self, function: Callable[..., object], *args: Any) -> None:
        """As `post`, also while the thread is being closed; afterwards it does nothing."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def hold(self, task: asyncio.Future[Any]) -> None:
        """Let later operations wait for `task` (database's thread)."""
        self._unsettled.add(task)
        task.add_done_callback(self._unsettled.discard)

    async def settle(self) -> None:
        """Wait for operations whose caller has gone (database's thread)."""
        if self._unsettled:
            await asyncio.wait(set(self._unsettled))

    def close(self, last: Callable[[], Awaitable[object]], timeout: float) -> None:
        """Refuse new operations, let those that run end, run `last()`, and end the thread. Blocks; idempotent.

        Operations that take longer than `timeout` seconds are cancelled; their callers get a ClosedError.
        """
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(last, timeout), self.loop).result(2 * timeout)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)

    async def _end(self, last: Callable[[], Awaitable[object]], timeout: float) -> None:
        while tasks := self._running | self._unsettled:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
        await last()

    async def _settled(self, work: Callable[[], Awaitable[T]]) -> T:
        await self.settle()
        return await work()

    def _start(
        self, call: _Call[T], work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None
    ) -> None:
        call.task = self.loop.create_task(self._perform(call, work, undo))
        self._running.add(call.task)
        call.task.add_done_callback(self._running.discard)

    async def _perform(
        self, call: _Call[T], work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None
    ) -> None:
        await self.settle()
        if call.gone:
            return
        outcome: T | None = None
        problem: Exception | None = None
        try:
            outcome = await work()
        except asyncio.CancelledError:
            problem = ClosedError("the buffer was closed before this operation ended; nothing of it was stored")
        except Exception as error:
            problem = error
        if not call.offer(outcome, problem) and problem is None and undo is not None:
            await undo(outcome)  # type: ignore[arg-type]

    def _start_undo(self, undo: Callable[[Any], Coroutine[Any, Any, object]], outcome: Any) -> None:
        self.hold(self.loop.create_task(undo(outcome)))

    def _mark_unsettled(self, call: _Call[Any]) -> None:
        if call.task is not None and not call.task.done():
            self.hold(call.task)


@atexit.register
def _settle_all() -> None:
    # Threads of this module are daemons: without this, a process that ends right after it cancelled a take could end
    # before the groups are back in the store.
    for thread in list(_running):
        if thread.pid == os.getpid() and not thread._closed:
            with_timeout = asyncio.run_coroutine_threadsafe(thread.settle(), thread.loop)
            try:
                with_timeout.result(10)
            except concurrent.futures.TimeoutError:
                continue
