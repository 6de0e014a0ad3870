"""Detection of commits by other processes to a SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

from replaybuf.storage.sql.engine.database import CommitWatch
from replaybuf.storage.sql.engine.sqlite_connection import Connections, SqliteConnection
from replaybuf.storage.sql.engine.sqlite_session import FORK_GUARD
from replaybuf.storage.sql.engine.thread import RateLimit

_IN_MODIFY = 0x2
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
#: More than all pending events: the kernel merges identical ones.
_READ_BYTES = 4096


class Inotify:
    """Calls `on_write()` in the event loop soon after any process has written to a file, while switched on."""

    def __init__(self, path: str, on_write: Callable[[], object]) -> None:
        """Watch a file. Raises OSError on systems without inotify, or when no watch is free."""
        self._on_write = on_write
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
        """Start or stop calling `on_write`. Writes while off cause one call once on again."""
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
        self._on_write()


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


# Poll intervals without inotify, and with it as a fallback.
_POLL_SECONDS, _GUARANTEE_SECONDS = 0.02, 0.1
# A commit becomes visible some time after its first page was written to the WAL: often at once, nearly always after a
# millisecond, unless it waits for an fsync. Hence these intervals between polls, doubling from first to last.
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.001, 0.016
# The rate limit of polls that writes to the WAL may start.
_BURST, _PER_SECOND = 32, 100


class NeverChanges(CommitWatch):
    """The watch of a database in memory, which no other process can open."""

    seconds = 0.5

    async def look(self) -> bool:
        return False

    async def close(self) -> None:
        pass


class DataVersion(CommitWatch):
    """Polls the file's `data_version`, which changes when another connection commits: SQLite has no notifications.

    It is read at intervals; on Linux also soon after each write to the WAL.
    """

    seconds = _POLL_SECONDS

    def __init__(
        self,
        path: str,
        connect: Callable[[], Awaitable[SqliteConnection]],
        connections: Connections,
        hint: Callable[[], object],
    ) -> None:
        self._log = f"{os.path.abspath(path)}-wal"
        self._connect, self._connections = connect, connections
        self._hint = hint
        self._rate = RateLimit(_BURST, _PER_SECOND)
        self._connection: SqliteConnection | None = None
        self._raw: sqlite3.Connection | None = None
        self._version: int | None = None
        self._writes: Inotify | None = None
        self._on = False
        self._next_look: asyncio.TimerHandle | None = None

    async def look(self) -> bool:
        if self._raw is None:
            self._connection = await self._connect()
            self._raw = self._connection.session.raw
            self._connection.session.outside(lambda raw: raw.execute("PRAGMA busy_timeout = 0"))
        changed = self._has_changed()
        if self._writes is None:  # the WAL exists once the version was read
            with contextlib.suppress(OSError):
                self._writes = Inotify(self._log, self._written)
                self._listen()
        self.seconds = _POLL_SECONDS if self._writes is None else _GUARANTEE_SECONDS
        return changed

    def switch(self, on: bool) -> None:
        self._on = on
        if self._next_look is None:  # otherwise the scheduled poll switches it on
            self._listen()

    async def close(self) -> None:
        self.switch(False)
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        connection, writes = self._connection, self._writes
        self._connection = self._raw = self._version = self._writes = None
        if writes is not None:
            writes.close()
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._connections.close(connection)

    def _listen(self) -> None:
        if self._writes is not None:
            self._writes.switch(self._on)

    def _written(self) -> None:
        """Poll soon, after a write to the WAL."""
        assert self._writes is not None
        self._writes.switch(False)
        if pause := self._rate.delay():
            self._look_in(pause, _FIRST_LOOK_SECONDS)
        else:
            self._look_again(_FIRST_LOOK_SECONDS)

    def _look_in(self, seconds: float, pause: float) -> None:
        self._next_look = asyncio.get_running_loop().call_later(seconds, self._look_again, pause)

    def _look_again(self, pause: float) -> None:
        self._next_look = None
        try:
            changed = self._has_changed()
        except sqlite3.Error:  # the next poll will say why
            return
        if changed:
            self._hint()
        if changed or pause > _LAST_LOOK_SECONDS:
            self._listen()
        else:
            self._look_in(pause, 2 * pause)

    def _has_changed(self) -> bool:
        assert self._raw is not None
        try:
            with FORK_GUARD:
                version: int = self._raw.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:  # the WAL is being recovered
                return False
            raise
        changed, self._version = version != self._version, version
        return changed
