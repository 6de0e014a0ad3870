"""Checks of SQLite: the file, the files beside it, its disk, and its settings."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from replaybuf import units
from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, problem, repairable, some, warning
from replaybuf.storage.sql.inspection.checkup import sqlite_file

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_INTEGRITY, _FILES, _LOG, _SPACE, _DISK, _SETTINGS = "integrity", "files", "log", "space", "disk", "settings"

# REINDEX mends an index that differs from its table.
_OF_AN_INDEX = re.compile(r"missing from index |wrong # of entries in index |non-unique entry in index |out of order")

#: A log is copied into the database whenever it has grown by LOG_BYTES, unless a reader holds it back.
LARGE_LOG = 16 * sqlite_file.LOG_BYTES
#: Free space on the disk below which the next puts may fail.
LITTLE_SPACE = 64 * 1024 * 1024
#: Free pages that are worth giving back to the disk.
MUCH_FREE = 256 * 1024 * 1024


# Integrity


def look_at_integrity(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Run SQLite's own check of all pages; a quick one doesn't compare indexes with their tables."""
    name = "quick_check" if look.quick else "integrity_check"
    messages = sqlite_file.integrity_messages(tx, name)
    if not messages:
        return [fine(_INTEGRITY, f"PRAGMA {name} found nothing")]
    found = f"PRAGMA {name}: {some(messages, 3)}"
    if _only_of_indexes(messages):
        return [repairable(_INTEGRITY, found)]
    mend = f"stop the run; replaybuf doctor {look.where} --rescue FOLDER saves what can be read, to be resumed"
    return [problem(_INTEGRITY, found, mend)]


def repair_integrity(tx: Transaction, look: Look) -> Sequence[str]:
    """Rebuild indexes that differ from their tables."""
    messages = sqlite_file.integrity_messages(tx, "integrity_check")
    if not messages or not _only_of_indexes(messages):
        return []
    sqlite_file.make_indexes_anew(tx)
    return ["made all indexes anew"]


def _only_of_indexes(messages: Sequence[str]) -> bool:
    return all(_OF_AN_INDEX.search(message) for message in messages)


# The files


def _path(look: Look) -> Path:
    assert look.path is not None
    return look.path


def _beside(path: Path) -> list[Path]:
    return [file for suffix in ("-wal", "-shm", "-journal") if (file := Path(f"{path}{suffix}")).exists()]


def look_at_files(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether this user may write the file and the files beside it."""
    path = _path(look)
    found: list[Finding] = []
    closed = [str(file) for file in (path, *_beside(path)) if not os.access(file, os.R_OK | os.W_OK)]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        closed.append(f"{path.parent} (where the log is made)")
    if closed:
        found.append(problem(_FILES, f"not writable: {some(closed)}", "chmod u+rw, or the user that the run has"))
    own = path.stat()
    for file in _beside(path):
        other = file.stat()
        if (other.st_uid, stat.S_IMODE(other.st_mode)) != (own.st_uid, stat.S_IMODE(own.st_mode)):
            what = f"{file.name} has not the owner and mode of {path.name}: not all may write it who may write that"
            found.append(warning(_FILES, what, f"chown --reference={path} {file}; chmod --reference={path} {file}"))
    return found or [fine(_FILES, f"{path.name} and what is beside it can be written")]


def look_at_log(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check the size of the write-ahead log."""
    size = _log_size(look)
    if is_log_large(look):
        what = f"the write-ahead log has {units.size(size)}: something reads for long, or nothing closed the database"
        return [repairable(_LOG, what, level=Level.WARNING)]
    return [fine(_LOG, f"the write-ahead log has {units.size(size)}")]


def _log_size(look: Look) -> int:
    log = Path(f"{look.path}-wal")
    return log.stat().st_size if log.exists() else 0


def is_log_large(look: Look) -> bool:
    """Return whether the write-ahead log is longer than it becomes in normal use."""
    return _log_size(look) >= LARGE_LOG


# Space


def look_at_space(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check how much of the file is free pages."""
    pages = sqlite_file.read_pages(tx)
    what = f"{units.size(pages.bytes)}, of which {units.size(pages.free)} are free for what comes"
    if pages.free >= MUCH_FREE and pages.free > pages.bytes / 2:
        return [warning(_SPACE, what, f"to give it back to the disk: stop the run, then sqlite3 {look.path} VACUUM")]
    return [fine(_SPACE, what)]


def look_at_disk(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether there is room on the disk."""
    path = _path(look)
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    what = f"{units.size(free)} free on the disk, the database has {units.size(size)}"
    if free < LITTLE_SPACE:
        return [problem(_DISK, what, "free some space: puts fail when there is none (what was committed is safe)")]
    if free < size / 10:
        return [warning(_DISK, what, "free some space, or set a capacity")]
    return [fine(_DISK, what)]


# Settings


def look_at_settings(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether the file is set up as replaybuf makes it, and is on a disk that SQLite can trust."""
    found = []
    settings = sqlite_file.read_settings(tx, _path(look))
    size, encoding = settings.page_bytes, settings.encoding
    if not settings.wal:
        what = "no write-ahead log (a snapshot has none): writers and readers wait for each other"
        found.append(warning(_SETTINGS, what, "nothing: a run that opens it makes one"))
    if size != (own := sqlite_file.PAGE_BYTES):
        what = f"pages of {size:,} bytes: large payloads are written more slowly than with {own:,}"
        found.append(warning(_SETTINGS, what, "replaybuf save URL FOLDER, and replaybuf resume into a new file"))
    if encoding != "UTF-8":
        found.append(problem(_SETTINGS, f"its texts are {encoding}", "save it, and resume into a new file"))
    if settings.network:
        what = f"on a network file system ({settings.network}), where the write-ahead log is unsafe"
        found.append(problem(_SETTINGS, what, "a local disk, or PostgreSQL"))
    return found or [fine(_SETTINGS, f"wal, pages of {size:,} bytes, {encoding}, SQLite {settings.version}")]


FIRST = (Check(_FILES, look_at_files), Check(_DISK, look_at_disk), Check(_SETTINGS, look_at_settings))
CHECKS = (Check(_INTEGRITY, look_at_integrity, repair_integrity),)
LAST = (Check(_SPACE, look_at_space), Check(_LOG, look_at_log))
