"""Locks that a forked process has anew."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ProcessLock:
    """A reentrant lock of the threads of one process.

    A lock of `threading` that another thread held at a fork would never be free in the child. This one is free there,
    and what it guards may be half done.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _free_all() -> None:
    for lock in list(_locks):
        if lock._lock.acquire(blocking=False):  # it is free, or this thread's
            lock._lock.release()
        else:
            lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
