"""Detection of commits by other processes to a SQLite file, which has no notifications."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sqlite3
from collections.abc import Callable

from replaybuf.storage.sql.engine.database import CommitWatch
from replaybuf.storage.sql.engine.sqlite_connection import Connections, SqliteConnection
from replaybuf.storage.sql.engine.sqlite_session import FORK_GUARD, is_busy

_IN_MODIFY = 0x2
#: More than all pending events: the kernel merges identical ones.
_READ_BYTES = 4096
# Poll intervals without inotify, and with it as a fallback.
_POLL_SECONDS, _GUARANTEE_SECONDS = 0.02, 0.1
#: A commit is visible some time after its first page was written to the WAL: nearly always after the first of these
#: times, unless it waits for an fsync.
_SOON_SECONDS, _LATER_SECONDS = 0.001, 0.015


def watch_writes(path: str) -> int:
    """Return an inotify descriptor that is readable after writes to a file. Raises OSError where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        raise OSError("this system has no inotify")
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        number = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(number, os.strerror(number))
    return descriptor


class NeverChanges(CommitWatch):
    """The watch of a database in memory, which no other process can open."""

    seconds = 0.5

    async def look(self) -> bool:
        return False

    async def close(self) -> None:
        pass


class DataVersion(CommitWatch):
    """Polls the file's `data_version`, which changes when another connection commits.

    It is read at intervals; on Linux also soon after a write to the WAL. (Frequent polls alone would wake the process
    too often: each costs some 0.1 ms of processor.)
    """

    seconds = _POLL_SECONDS

    def __init__(self, path: str, connections: Connections, hint: Callable[[], object]) -> None:
        self._log, self._connections, self._hint = f"{os.path.abspath(path)}-wal", connections, hint
        self._connection: SqliteConnection | None = None
        self._version: int | None = None
        self._writes: int | None = None
        self._on = False
        self._next: asyncio.TimerHandle | None = None

    async def look(self) -> bool:
        if self._connection is None:
            self._connection = await self._connections.open()
            self._connection.session.outside(lambda raw: raw.execute("PRAGMA busy_timeout = 0"))
        changed = self._has_changed()
        if self._writes is None:  # the WAL exists once the version was read
            with contextlib.suppress(OSError):
                self._writes = watch_writes(self._log)
                self.switch(self._on)
        self.seconds = _POLL_SECONDS if self._writes is None else _GUARANTEE_SECONDS
        return changed

    def switch(self, on: bool) -> None:
        self._on = on
        if self._writes is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._writes, self._written) if on else loop.remove_reader(self._writes)

    def _written(self) -> None:
        assert self._writes is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._writes, _READ_BYTES)
        if self._next is None:
            self._check_in(_SOON_SECONDS, again=True)

    def _check_in(self, seconds: float, *, again: bool) -> None:
        self._next = asyncio.get_running_loop().call_later(seconds, self._check, again)

    def _check(self, again: bool) -> None:
        self._next = None
        try:
            changed = self._has_changed()
        except sqlite3.Error:  # the next poll will say why
            return
        if changed:
            self.switch(False)  # until somebody waits again
            self._hint()
        elif again:
            self._check_in(_LATER_SECONDS, again=False)

    def _has_changed(self) -> bool:
        assert self._connection is not None
        try:
            with FORK_GUARD:
                version: int = self._connection.session.raw.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.OperationalError as error:
            if is_busy(error):  # the WAL is being recovered
                return False
            raise
        changed, self._version = version != self._version, version
        return changed

    async def close(self) -> None:
        self.switch(False)
        if self._next is not None:
            self._next.cancel()
        connection, writes = self._connection, self._writes
        self._connection = self._version = self._writes = self._next = None
        if writes is not None:
            os.close(writes)
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._connections.close(connection)
