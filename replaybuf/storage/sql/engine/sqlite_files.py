"""The files of a SQLite database: checks of their owner and identity, and translation of SQLite's exceptions.

SQLite doesn't notice when its files are deleted or replaced while open: it goes on in the unlinked ones, invisible to
other processes, and the next process to open the database finds a WAL that doesn't fit. So the files are checked before
each transaction.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from replaybuf.common.file_systems import MOUNTINFO, filesystem_type, is_network
from replaybuf.common.redact import redact
from replaybuf.common.units import brief
from replaybuf.errors import AccessError, LockedError, ReplayBufError, StorageError
from replaybuf.storage.sql.schema import VERSION_TABLE

_Identity = tuple[int, int] | None

#: 16 KiB pages: 100 KB payloads are written at 1.3 times the rate with 4 KiB pages (`benchmarks/README.md`).
PAGE_SIZE = 16 * 1024
_LOOK_AGAIN_SECONDS = 0.05

#: The oldest version of SQLite that has what the statements need (RETURNING).
OLDEST_VERSION = (3, 35, 0)


def check_version(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    """Raise StorageError if Python's SQLite is too old."""
    if version < OLDEST_VERSION:
        own, floor = (".".join(map(str, numbers)) for numbers in (version, OLDEST_VERSION))
        raise StorageError(
            f"this Python ({sys.executable}) has SQLite {own}, and replaybuf needs {floor} or newer: use a Python with "
            "its own, such as one of conda, uv or python.org, or PostgreSQL"
        )


class OpenFiles:
    """The database file and its WAL, as opened by the connections of this process."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else os.path.abspath(path)
        self._connections = 0
        self._file: _Identity = None
        self._log: _Identity = None

    def before_opening(self) -> None:
        """Raise StorageError when the WAL was deleted while in use.

        SQLite deletes the WAL index (-shm) first and creates it last. While another process has both open, a second WAL
        would damage the database.
        """
        if self._connections:
            self.check()
        if self._path is None or not os.path.exists(f"{self._path}-shm") or os.path.exists(f"{self._path}-wal"):
            return
        time.sleep(_LOOK_AGAIN_SECONDS)  # another process may be deleting both right now
        if os.path.exists(f"{self._path}-shm") and not os.path.exists(f"{self._path}-wal"):
            name = Path(self._path).name
            raise StorageError(
                f"{self._path}: its write-ahead log ({name}-wal) was deleted while the database was in use, and with "
                f"it what was committed last. Put it back; or end all processes that use the database, delete "
                f"{name}-shm, and go on with what is left",
                reason="not a database",
            )

    def opened(self) -> None:
        """Check the files, and record a new connection."""
        self.check()
        self._connections += 1

    def closing(self) -> None:
        """Record that a connection is about to be closed: with the last one, SQLite deletes the WAL."""
        self._connections -= 1
        if self._connections == 0:
            self._file = self._log = None

    def check(self) -> None:
        """Raise StorageError when the path no longer leads to the open files."""
        if self._path is None:
            return
        # In a new database, the files appear with the first transactions.
        file, log = _identity(self._path), _identity(f"{self._path}-wal")
        self._file, self._log = self._file or file, self._log or log
        if file != self._file:
            raise StorageError(
                f"{self._path} was deleted or replaced while this process had it open: nothing more is stored there; "
                "close this buffer and open it again",
                reason="not a database",
            )
        if log != self._log:
            raise StorageError(
                f"{self._path}: its write-ahead log ({Path(self._path).name}-wal) was deleted or replaced while this "
                "process had it open: nothing more is stored. Close the buffer, in all processes: what was committed "
                "is written to the database then",
                reason="not a database",
            )

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Translate an error of Python: malformed stored values may have caused it, or a defect of the program."""
        try:
            yield
        except (ReplayBufError, UnicodeEncodeError):  # the latter concerns values being written
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if self._path is None:
                raise
            raise StorageError(
                f"{self._path}: a transaction raised {type(error).__name__}: {error}, and was rolled back. Either this "
                "is a defect of the program, or the file holds what replaybuf never wrote: replaybuf doctor tells "
                "which. If it finds nothing, report this error with its traceback"
            ) from error


def quiet_state(path: str | Path) -> tuple[int, ...] | None:
    """Return a value that changes with every write to a SQLite file; None while another process may be writing."""
    for suffix in ("-wal", "-journal"):
        if _size(f"{path}{suffix}"):
            return None
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_only_uri(path: str) -> str:
    """Return the URI of a database that is only read.

    The last connection leaves an empty WAL behind, unless it might write; on a network file system it may not, since it
    would copy a WAL that another host writes.
    """
    file = Path(path).absolute()
    may_write = os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    mode = "rw" if may_write and not is_network(filesystem_type(file)) else "ro"
    return f"file:{quote(os.fsencode(file))}?mode={mode}"


def _identity(path: str) -> _Identity:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


# Errors

#: What SQLite's errors mean: a pattern of its code and message, the error, its reason, and our message, in which {0}
#: is the database, {1} SQLite's message and {2} the lock timeout. Exceeded quotas and file size limits fail as writes.
_MEANINGS: list[tuple[str, type[ReplayBufError], str, str]] = [
    (
        "locked",
        LockedError,
        "",
        "another process held the write lock of {0} for more than {2:g} s: look for a long transaction (a shell with "
        "BEGIN open?), or raise lock_timeout",
    ),
    ("too big", StorageError, "too large", "{0}: {1}: a value is larger than SQLite's limit SQLITE_MAX_LENGTH"),
    (
        r"disk is full|SQLITE_IOERR_(WRITE|FSYNC|DIR_FSYNC|TRUNCATE|SHMSIZE|DELETE)\b",
        StorageError,
        "disk full",
        "{0}: {1} in writing: the disk is full or failing, or a quota or a limit of the file's size is reached; free "
        "some space (what was committed before is safe)",
    ),
    (
        "disk I/O error",
        StorageError,
        "not a database",
        "{0}: {1}: the file or its log (-wal) can't be read; it was truncated, deleted or damaged, or the disk fails",
    ),
    ("read-?only", AccessError, "", "{0} is read-only: check the permissions of the file and of its folder"),
    (
        "malformed|Could not decode",
        StorageError,
        "not a database",
        "{0}: {1}: the file is damaged; replaybuf doctor says how far, docs/outages.md how to save it",
    ),
    ("not a database|encrypted", StorageError, "not a database", "{0}: {1}; give the path of a replaybuf database"),
]


def translate_sqlite(error: BaseException, where: str, path: str, lock_timeout: float) -> ReplayBufError:
    """Translate an error of the `sqlite3` module to an error of replaybuf with advice."""
    text = str(error)
    for pattern, kind, reason, message in _MEANINGS:
        if re.search(pattern, f"{getattr(error, 'sqlite_errorname', '')} {text}"):
            return kind(message.format(where, text, lock_timeout), reason=reason)
    if "unable to open" not in text:
        return StorageError(f"{where}: {text}")
    folder = Path(path).absolute().parent
    if os.path.isdir(path):
        return AccessError(f"{where} is a folder; give a database file in it")
    if os.path.exists(f"{path}-wal") and not os.access(folder, os.W_OK):
        log = f"{Path(path).name}-wal"
        return AccessError(
            f"{where} has a write-ahead log ({log}), which can't be read in a folder that isn't writable: copy both "
            "files to one that is"
        )
    permissions = "can't be opened or created: check the permissions of the file and of its folder"
    sentence = permissions if os.path.isdir(folder) else f"can't be created: there is no folder {redact(str(folder))}"
    return AccessError(f"{where} {sentence}")


def refuse_network_filesystem(path: str | os.PathLike[str], mountinfo: str = MOUNTINFO) -> None:
    """Raise StorageError when a SQLite database at this path would be on a network file system."""
    kind = filesystem_type(path, mountinfo)
    if is_network(kind):
        raise StorageError(
            f"{os.fspath(path)} is on a network file system ({kind}), where SQLite's write-ahead log can be damaged: "
            "use a file on a local disk, or PostgreSQL; allow_network_filesystem=True if you know better",
            reason="network filesystem",
        )


#: Tables that every revision of the schema has.
_OUR_TABLES = {VERSION_TABLE, "rb_lane", "rb_group", "rb_payload"}
_LEFT = "it was left as it is: give the path of a file that isn't there yet"


def refuse_foreign_file(raw: sqlite3.Connection, path: str, where: str) -> None:
    """Raise StorageError unless the file of a new connection is empty, or a database of ours. Nothing is written to it.

    (As that of any program, the first read may finish the rollback or the checkpoint of a process that was killed.)
    """
    path = os.path.realpath(path)
    logged = _size(f"{path}-wal")  # read before the file, which another process creates first
    size = _size(path)
    if size == 1 or (logged and not size):  # SQLite takes one byte for an empty file
        contents = "has one byte" if size else "is empty, beside a log"
        raise StorageError(f"{where} is not a database: it {contents}; {_LEFT}", reason="not a database")
    names = {name for (name,) in raw.execute("SELECT name FROM sqlite_master")}
    if names and not names >= _OUR_TABLES:
        raise StorageError(
            f"{where} is a database of another program: it has {brief(min(names))} and not the tables of replaybuf; "
            f"{_LEFT}",
            reason="not a database",
        )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
