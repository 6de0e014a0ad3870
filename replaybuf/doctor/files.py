"""SQLite: the file, what stands beside it, where it is, and how it is set up."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, text

from replaybuf import units
from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, problem, repairable, some, warning
from replaybuf.storage.sql.engine.filesystem import filesystem_type, is_network
from replaybuf.storage.sql.engine.sqlite_connections import CHECKPOINT_PAGES, PAGE_SIZE, is_wal

_INTEGRITY, _FILES, _LOG, _SPACE, _DISK, _SETTINGS = "integrity", "files", "log", "space", "disk", "settings"

_MOST_MESSAGES = 100
# What REINDEX mends: an index that differs from its table.
_OF_AN_INDEX = re.compile(r"missing from index |wrong # of entries in index |non-unique entry in index |out of order")

#: A log is copied into the database whenever it has grown by CHECKPOINT_PAGES, unless a reader holds it back.
LARGE_LOG = 16 * CHECKPOINT_PAGES * PAGE_SIZE
#: Free space on the disk below which the next puts may fail.
LITTLE_SPACE = 64 * 1024 * 1024
#: Free pages that are worth giving back to the disk.
MUCH_FREE = 256 * 1024 * 1024


def _pragma(connection: Connection, name: str) -> str:
    return str(connection.execute(text(f"PRAGMA {name}")).scalar())


# Integrity


def look_at_integrity(connection: Connection, look: Look) -> Sequence[Finding]:
    """SQLite's own check of all pages: a quick one leaves out whether indexes have what their tables have."""
    name = "quick_check" if look.quick else "integrity_check"
    messages = _messages(connection, name)
    if not messages:
        return [fine(_INTEGRITY, f"PRAGMA {name} found nothing")]
    found = f"PRAGMA {name}: {some(messages, 3)}"
    if all(_OF_AN_INDEX.search(message) for message in messages):
        return [repairable(_INTEGRITY, found)]
    mend = f"stop the run; replaybuf doctor {look.where} --rescue FOLDER saves what can be read, to be resumed"
    return [problem(_INTEGRITY, found, mend)]


def repair_integrity(connection: Connection, look: Look) -> Sequence[str]:
    """Make indexes anew that differ from their tables."""
    messages = _messages(connection, "integrity_check")
    if not messages or not all(_OF_AN_INDEX.search(message) for message in messages):
        return []
    connection.execute(text("REINDEX"))
    return ["made all indexes anew"]


def _messages(connection: Connection, name: str) -> list[str]:
    rows = connection.execute(text(f"PRAGMA {name}({_MOST_MESSAGES})")).scalars()
    return [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]


# The files


def _beside(path: str) -> list[Path]:
    return [file for suffix in ("-wal", "-shm", "-journal") if (file := Path(path + suffix)).exists()]


def look_at_files(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether whoever runs this may write the file and the files beside it."""
    path = Path(look.path or "")
    found: list[Finding] = []
    closed = [str(file) for file in (path, *_beside(str(path))) if not os.access(file, os.R_OK | os.W_OK)]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        closed.append(f"{path.parent} (where the log is made)")
    if closed:
        found.append(problem(_FILES, f"not writable: {some(closed)}", "chmod u+rw, or the user that the run has"))
    own = path.stat()
    for file in _beside(str(path)):
        other = file.stat()
        if (other.st_uid, stat.S_IMODE(other.st_mode)) != (own.st_uid, stat.S_IMODE(own.st_mode)):
            what = f"{file.name} has not the owner and mode of {path.name}: not all may write it who may write that"
            found.append(warning(_FILES, what, f"chown --reference={path} {file}; chmod --reference={path} {file}"))
    return found or [fine(_FILES, f"{path.name} and what is beside it can be written")]


def look_at_log(connection: Connection, look: Look) -> Sequence[Finding]:
    """How long the write-ahead log is."""
    size = _log_size(look)
    if is_log_large(look):
        what = f"the write-ahead log has {units.size(size)}: something reads for long, or nothing closed the database"
        return [repairable(_LOG, what, level=Level.WARNING)]
    return [fine(_LOG, f"the write-ahead log has {units.size(size)}")]


def _log_size(look: Look) -> int:
    log = Path(f"{look.path}-wal")
    return log.stat().st_size if log.exists() else 0


def is_log_large(look: Look) -> bool:
    """Whether the write-ahead log is longer than it becomes by itself."""
    return _log_size(look) >= LARGE_LOG


# Space


def look_at_space(connection: Connection, look: Look) -> Sequence[Finding]:
    """How much of the file is free pages."""
    size = int(_pragma(connection, "page_size"))
    pages, free = (int(_pragma(connection, name)) for name in ("page_count", "freelist_count"))
    what = f"{units.size(pages * size)}, of which {units.size(free * size)} are free for what comes"
    if free * size >= MUCH_FREE and free > pages / 2:
        return [warning(_SPACE, what, f"to give it back to the disk: stop the run, then sqlite3 {look.path} VACUUM")]
    return [fine(_SPACE, what)]


def look_at_disk(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether there is room for more."""
    path = Path(look.path or "")
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    what = f"{units.size(free)} free on the disk, the database has {units.size(size)}"
    if free < LITTLE_SPACE:
        return [problem(_DISK, what, "free some space: puts fail when there is none (what was committed is safe)")]
    if free < size / 10:
        return [warning(_DISK, what, "free some space, or set a capacity")]
    return [fine(_DISK, what)]


# Settings


def look_at_settings(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether the file is set up as replaybuf makes it, and is on a disk that SQLite can trust."""
    found = []
    size, encoding = int(_pragma(connection, "page_size")), _pragma(connection, "encoding")
    if not is_wal(look.path or ""):  # the pragma knows nothing of it where nobody has the file open
        what = "no write-ahead log (a snapshot has none): writers and readers wait for each other"
        found.append(warning(_SETTINGS, what, "nothing: a run that opens it makes one"))
    if size != PAGE_SIZE:
        what = f"pages of {size:,} bytes: large payloads are written more slowly than with {PAGE_SIZE:,}"
        found.append(warning(_SETTINGS, what, "replaybuf save URL FOLDER, and replaybuf resume into a new file"))
    if encoding != "UTF-8":
        found.append(problem(_SETTINGS, f"its texts are {encoding}", "save it, and resume into a new file"))
    if is_network(kind := filesystem_type(look.path or "")):
        what = f"on a network file system ({kind}), where the write-ahead log is unsafe"
        found.append(problem(_SETTINGS, what, "a local disk, or PostgreSQL"))
    return found or [fine(_SETTINGS, f"wal, pages of {size:,} bytes, {encoding}, SQLite {_version(connection)}")]


def _version(connection: Connection) -> str:
    return str(connection.execute(text("SELECT sqlite_version()")).scalar())


FIRST = (Check(_FILES, look_at_files), Check(_DISK, look_at_disk), Check(_SETTINGS, look_at_settings))
CHECKS = (Check(_INTEGRITY, look_at_integrity, repair_integrity),)
LAST = (Check(_SPACE, look_at_space), Check(_LOG, look_at_log))
