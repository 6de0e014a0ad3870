"""WAL checkpoints of a SQLite file: copying the write-ahead log (WAL) back into the database file.

SQLite's automatic checkpoint runs after the commit that made the WAL too long, while other connections may commit.
Before version 3.51.3 such commits can be lost: a checkpoint that begins right after another may take the next WAL for
the old one, and mark its pages as copied (https://sqlite.org/wal.html#the_wal_reset_bug). So replaybuf switches
automatic checkpoints off, and checkpoints while it holds the write lock, after which the WAL can begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable

#: WAL pages from which a checkpoint is due, and by which the WAL grows between two of them.
ALONE_PAGES, _GROWTH_PAGES = 1024, 512

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_SALTS = slice(16, 24)

_logger = logging.getLogger("replaybuf.sqlite")

Copy = Callable[[], Awaitable[int]]


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
    """Schedules checkpoints of a long WAL by `copy`, which returns the number of pages in the WAL."""

    def __init__(self, path: str, copy: Copy) -> None:
        self._path, self._copy = path, copy
        self._copying: asyncio.Task[None] | None = None
        self._copied: tuple[bytes, int] = (b"", 0)  # the salts of the WAL, and its pages at the last checkpoint
        self._closed = False

    def committed(self) -> None:
        """Check the WAL after a commit, and checkpoint it in a task of its own if due (database's thread)."""
        if not self._closed and self._copying is None and self._is_due():
            self._copying = asyncio.get_running_loop().create_task(self._run())

    def _is_due(self) -> bool:
        found = salts_at(self._path, ALONE_PAGES)
        salts, copied = self._copied
        return found is not None and (found != salts or salts_at(self._path, copied + _GROWTH_PAGES) is not None)

    async def _run(self) -> None:
        salts = salts_at(self._path, 1) or b""
        try:
            self._copied = (salts, await self._copy())
        except Exception as error:  # a commit soon after tries again, with a longer WAL
            _logger.debug("can't copy the log of %s: %s", self._path, error)
        finally:
            self._copying = None

    async def close(self) -> None:
        """Start no more checkpoints, and wait for the running one (database's thread)."""
        self._closed = True
        if self._copying is not None:
            await asyncio.wait([self._copying])
