"""Runs coroutines of callers without an event loop, in a background thread."""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from replaybuf.common.forks import ProcessLock
from replaybuf.errors import ClosedError, InputError

T = TypeVar("T")

# Delay in seconds of an interrupt that arrived together with a result, so that the caller gets the result first.
_FOLLOWING_SECONDS = 0.02


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of replaybuf, from any thread, and return its result. Blocks, also an event loop of the caller.

    All coroutines run in one background thread of this process, so that calls need no setup. Errors of the coroutine
    are raised in the caller. If a signal handler raises in the caller meanwhile (Ctrl-C), the coroutine is cancelled,
    and the exception propagates when the coroutine has ended; a second one propagates at once. A result that arrives at
    the same moment is returned, and the exception is raised in this thread shortly afterwards.

    A forked process has a thread of its own, and raises ClosedError from a call that its parent had begun. Raises
    InputError in the background thread itself, which would deadlock, and ClosedError during interpreter shutdown
    (after the exit handlers), which stops that thread.
    """
    if sys.is_finalizing():
        coroutine.close()
        raise ClosedError("a call while the interpreter shuts down, whose threads are stopped: close the buffer before")
    if _late_errors:
        _raise_late(coroutine)
    thread = _background or _start()
    if thread.ident == _thread.get_ident():
        coroutine.close()
        raise InputError("a synchronous call from a coroutine that is run by one would never end: await it there")
    call = _BlockingCall(coroutine)
    try:
        _open_calls.add(call)
        thread.loop.call_soon_threadsafe(call.begin)
        call.ended.acquire()
    except BaseException as interrupt:
        thread.loop.call_soon_threadsafe(call.cancel)
        if not call.done:
            call.ended.acquire()
        if call.error is not None:
            raise
        thread.raise_later(interrupt)
    if call.error is not None:
        error, call.error = call.error, None
        trace = error.__traceback__
        try:
            raise error.with_traceback(trace and trace.tb_next)  # without the frame of `_main`
        finally:
            del error, trace  # break the reference cycle with this frame
    return call.result  # with no call in between, during which a signal handler could raise


def end(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that only releases resources; do nothing during interpreter shutdown."""
    if sys.is_finalizing():
        coroutine.close()
    else:
        run(coroutine)


class _BlockingCall(Generic[T]):
    """A coroutine between its caller and the background thread. `ended` is locked until it is done."""

    __slots__ = ("_coroutine", "_task", "done", "ended", "error", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self.result: T
        self.error: BaseException | None = None
        self.done = False
        self.ended = threading.Lock()
        self.ended.acquire()

    def begin(self) -> None:
        """Start the coroutine (background thread)."""
        self._task = asyncio.get_running_loop().create_task(self._main())

    def cancel(self) -> None:
        """Cancel the coroutine (background thread)."""
        if self._task is None:
            self._cancelled()
        else:
            self._task.cancel()
            self._task.add_done_callback(self._cancelled)

    def _cancelled(self, task: object = None) -> None:
        """End a call that was cancelled before its first step."""
        if not self.done:
            self._coroutine.close()
            self.error = asyncio.CancelledError()
            self._end()

    async def _main(self) -> None:
        try:
            self.result = await self._coroutine
        except BaseException as error:  # of any kind: raised in the caller, not in the loop
            self.error = error
        finally:
            self._task = None
            self._end()

    def _end(self) -> None:
        self.done = True
        self.ended.release()
        _open_calls.discard(self)

    def fork(self) -> None:
        """End the caller's wait in a forked process; only a signal handler that forks and returns leads here."""
        self.error = ClosedError("the call goes on in the process that began it, not in this one, forked meanwhile")
        if self.ended.locked():
            self._end()


_open_calls: set[_BlockingCall[Any]] = set()  # the calls in progress


class _LoopThread:
    """A daemon thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._main, name="replaybuf-sync", daemon=True)
        thread.start()
        self.ident = thread.ident

    def _main(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def raise_later(self, error: BaseException) -> None:
        """Raise an exception in the calling thread after a delay, or in its next call if that is earlier."""
        caller = _thread.get_ident()
        _late_errors[caller] = error.with_traceback(None)  # the traceback's frames would keep the result alive
        self.loop.call_soon_threadsafe(self.loop.call_later, _FOLLOWING_SECONDS, _raise_in, caller)


# Pending exceptions by thread. Each is raised once, by who removes it.
_late_errors: dict[int, BaseException] = {}


def _raise_late(coroutine: Coroutine[Any, Any, T]) -> None:
    """Raise the pending exception of this thread, instead of running the coroutine."""
    if (error := _late_errors.pop(_thread.get_ident(), None)) is not None:
        coroutine.close()
        raise error


def _raise_in(thread: int) -> None:
    """Raise the pending exception of another thread there."""
    if (error := _late_errors.pop(thread, None)) is None:
        return
    if thread == threading.main_thread().ident and _is_ctrl_c(error):
        signal.pthread_kill(thread, signal.SIGINT)  # which also ends a sleep
    else:
        # The call takes only a class: this one's instance is the exception.
        later = type("Later", (BaseException,), {"__new__": lambda cls: error})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(later))


def _is_ctrl_c(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


_background: _LoopThread | None = None
_start_lock = ProcessLock()  # reentrant, since a signal handler or `__del__` may call during the start
_inherited_threads: list[_LoopThread | None] = []


def _start() -> _LoopThread:
    """Return the background thread; start it if no other call has."""
    global _background
    with _start_lock:
        if _background is None:
            started = _LoopThread()
            if _background is None:
                _background = started
            else:  # a reentrant call has started another one
                started.loop.call_soon_threadsafe(started.loop.stop)
        return _background


def _drop_inherited_thread() -> None:
    """Drop the parent's thread in a forked process, without closing its loop, which would disturb the parent's."""
    global _background
    _inherited_threads.append(_background)
    _background = None
    _late_errors.clear()
    for call in list(_open_calls):
        call.fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_thread)
