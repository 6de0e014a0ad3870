"""WAL checkpoints of a SQLite file: copying the write-ahead log (WAL) back into the database file.

SQLite's automatic checkpoint runs after the commit that made the WAL too long, while other connections may commit.
Before version 3.51.3 such commits can be lost: a checkpoint that begins right after another may take the next WAL for
the old one, and mark its pages as copied (https://sqlite.org/wal.html#the_wal_reset_bug). So replaybuf switches
automatic checkpoints off. With such a version, checkpoints run while the write lock is held. Newer versions checkpoint
beside writers, and sometimes the remaining pages under the write lock, since a WAL that is always in use would never be
reset.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable

#: WAL pages from which a checkpoint runs under the write lock, or, with a version that allows it, beside writers.
ALONE_PAGES, _BESIDE_PAGES = 1024, 512
#: WAL pages from which a checkpoint runs under the write lock with any version.
_TOO_LONG_PAGES = 2048
#: Pages by which the WAL grows between two checkpoints.
_GROWTH_PAGES = 512

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_SALTS = slice(16, 24)

_logger = logging.getLogger("replaybuf.sqlite")

Copy = Callable[[], Awaitable[int]]


def copies_beside_writers(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> bool:
    """Return whether a SQLite version can checkpoint beside writers without losing their commits."""
    return version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)


def salts_at(path: str, pages: int) -> bytes | None:
    """Return the salts of a WAL of at least `pages` pages, None for a shorter one. Each reset changes the salts.

    Every page in a WAL is in a frame with the salts of the WAL's header; left-over frames of an earlier one have other
    salts (https://sqlite.org/fileformat2.html#the_write_ahead_log).
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = file.read(_HEADER_BYTES)
            page = int.from_bytes(header[8:12], "big")
            file.seek(_HEADER_BYTES + (pages - 1) * (page + _FRAME_BYTES) + 8)
            salts = file.read(8)
    except OSError:  # no WAL at the moment
        return None
    return salts if len(salts) == 8 and salts == header[_SALTS] else None


def sync_wal(path: str) -> None:
    """Fsync the WAL, so that a checkpoint under the write lock doesn't block writers for its fsync as well."""
    with open(path, "r+b", buffering=0) as file:  # Windows flushes no read-only file handle
        os.fsync(file.fileno())


def checkpoint_wal(connection: sqlite3.Connection) -> int:
    """Checkpoint as much of the WAL as readers allow; return its number of pages."""
    return int(connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])


class WalCheckpoints:
    """Schedules checkpoints of a long WAL: by `alone`, under the write lock, or `beside` writers.

    Both return the number of pages in the WAL.
    """

    def __init__(self, path: str, *, alone: Copy, beside: Copy) -> None:
        self._path = path
        self._alone, self._beside = alone, beside
        self._is_safe = copies_beside_writers()
        self._copying: asyncio.Task[None] | None = None
        self._copied: tuple[bytes, int] = (b"", 0)  # the salts of the WAL, and its pages at the last checkpoint
        self._closed = False

    def committed(self) -> None:
        """Check the WAL after a commit, and checkpoint it in a task of its own if due (database's thread)."""
        if not self._closed and self._copying is None and (copy := self._due()) is not None:
            self._copying = asyncio.get_running_loop().create_task(self._run(copy))

    def _due(self) -> Copy | None:
        found = salts_at(self._path, _BESIDE_PAGES if self._is_safe else ALONE_PAGES)
        salts, copied = self._copied
        if found is None or (found == salts and not salts_at(self._path, copied + _GROWTH_PAGES)):
            return None
        return self._beside if self._is_safe and not salts_at(self._path, _TOO_LONG_PAGES) else self._alone

    async def _run(self, copy: Copy) -> None:
        salts = salts_at(self._path, 1) or b""
        try:
            self._copied = (salts, await copy())
        except Exception as error:  # a commit soon after tries again, with a longer WAL
            _logger.debug("can't copy the log of %s: %s", self._path, error)
        finally:
            self._copying = None

    async def close(self) -> None:
        """Start no more checkpoints, and wait for the running one (database's thread)."""
        self._closed = True
        if self._copying is not None:
            await asyncio.wait([self._copying])
