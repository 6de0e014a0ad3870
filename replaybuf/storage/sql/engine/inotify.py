"""Linux tells of each write to a file (inotify). The standard library has no interface to that; this is a small one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

_IN_MODIFY = 0x2
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
#: More than all events that can be waiting: the kernel keeps one of those that are alike.
_READ_BYTES = 4096


class Inotify:
    """Calls `told()` in an event loop soon after a file was written to, by any process; while it is switched on."""

    def __init__(self, path: str, told: Callable[[], object]) -> None:
        """Watch a file. Raises OSError where that can't be done: on other systems, or without a free watch."""
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._on = False
        libc = _libc()
        self._fd = _checked(libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
        try:
            _checked(libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY))
        except OSError:
            os.close(self._fd)
            raise

    def switch(self, on: bool) -> None:
        """Start or stop calling. Writes in between count as one."""
        if on and not self._on:
            self._loop.add_reader(self._fd, self._read)
        elif self._on and not on:
            self._loop.remove_reader(self._fd)
        self._on = on

    def close(self) -> None:
        """Stop for good."""
        self.switch(False)
        os.close(self._fd)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _READ_BYTES)
        self._told()


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        raise OSError("this system has no inotify")
    return libc


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
