"""The write-ahead log of a SQLite file, and copying it back into the file.

By itself, SQLite copies the log after the commit that made it too long, while other connections may commit. Before
version 3.51.3 what they commit can be lost then: a copy that begins when another has just ended may take the next log
for the old one, and mark its pages as copied (https://sqlite.org/wal.html#the_wal_reset_bug). So replaybuf switches
that off. With such a version the log is copied while nobody else can write. Newer ones copy it beside the transactions
that write, and only what they have added since, from time to time, while nobody writes: a log that grows all the time
would never begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable

#: Pages from which a log is copied while nobody writes, or, with a version that can do it, beside those who write.
ALONE_PAGES, _BESIDE_PAGES = 1024, 512
#: Pages from which any version copies it while nobody writes.
_TOO_LONG_PAGES = 2048
#: Pages by which a log has to grow until it is copied again.
_GROWTH_PAGES = 512

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_SALTS = slice(16, 24)

_logger = logging.getLogger("replaybuf.sqlite")

Copy = Callable[[], Awaitable[int]]


def copies_beside_writers(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> bool:
    """Return whether a version of SQLite can copy the log while others commit without losing what they commit."""
    return version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)


def salts_at(path: str, pages: int) -> bytes | None:
    """Return the salts of a log of at least so many pages, by which the next log differs; None of a shorter one.

    Every page in a log is in a frame with the salts of the log's header; what is left of an earlier log has others
    (https://sqlite.org/fileformat2.html#the_write_ahead_log).
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = file.read(_HEADER_BYTES)
            page = int.from_bytes(header[8:12], "big")
            file.seek(_HEADER_BYTES + (pages - 1) * (page + _FRAME_BYTES) + 8)
            salts = file.read(8)
    except OSError:  # there is none now
        return None
    return salts if len(salts) == 8 and salts == header[_SALTS] else None


def flush_log(path: str) -> None:
    """Have the log on the disk, so that a copy that holds writers up doesn't wait for that as well."""
    with open(path, "r+b", buffering=0) as file:  # Windows flushes no file that can only be read
        os.fsync(file.fileno())


def copy_log(connection: sqlite3.Connection) -> int:
    """Copy as much of the log as readers allow into the file; return the number of pages that it has."""
    return int(connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])


class LogCopies:
    """Has the log copied when it has become long: by `alone`, while nobody else writes, or `beside` those who do.

    Both return the number of pages that the log has.
    """

    def __init__(self, path: str, *, alone: Copy, beside: Copy) -> None:
        self._path = path
        self._alone, self._beside = alone, beside
        self._is_safe = copies_beside_writers()
        self._copying: asyncio.Task[None] | None = None
        self._copied: tuple[bytes, int] = (b"", 0)  # of the log with these salts, so many pages
        self._closed = False

    def committed(self) -> None:
        """Look at the log after a commit, and have it copied in a task of its own (database's thread)."""
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
        except Exception as error:  # the log is longer then, and the next commit will see to it
            _logger.debug("can't copy the log of %s: %s", self._path, error)
        finally:
            self._copying = None

    async def close(self) -> None:
        """Begin no more copies, and return when the last one has ended (database's thread)."""
        self._closed = True
        if self._copying is not None:
            await asyncio.wait([self._copying])
