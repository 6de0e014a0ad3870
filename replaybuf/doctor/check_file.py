"""Checks of SQLite: the file, the files beside it, its disk, and its settings."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from replaybuf import units
from replaybuf.doctor import Check, CheckContext, Finding, Severity, fine, problem, repairable, warning
from replaybuf.places.filesystems import filesystem_type, is_network
from replaybuf.storage.sql.engine.sqlite_files import PAGE_SIZE, is_wal
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.units import some

SAVE_THE_REST = "stop the run, and save what can be read: docs/doctor.md, What is left of a damaged file"

# REINDEX mends an index that differs from its table.
_OF_AN_INDEX = re.compile(r"missing from index |wrong # of entries in index |non-unique entry in index |out of order")

#: Bytes. The WAL is checkpointed into the database whenever it has grown by at most a sixteenth of that
#: (`engine.sqlite_log.ALONE_PAGES`), unless a reader blocks the checkpoint.
LARGE_LOG = 256 << 20
#: Free space on the disk below which the next puts may fail.
LITTLE_SPACE = 64 * 1024 * 1024
_MOST_MESSAGES = 100
#: Free pages that are worth giving back to the disk.
MUCH_FREE = 256 * 1024 * 1024


# Integrity


def find_integrity(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Run SQLite's own check of all pages; a quick one doesn't compare indexes with their tables."""
    name = "quick_check" if context.quick else "integrity_check"
    messages = integrity_messages(tx, name)
    if not messages:
        return [fine(f"PRAGMA {name} found nothing")]
    found = f"PRAGMA {name}: {some(messages, 3)}"
    if only_of_indexes(messages):
        return [repairable(found)]
    return [problem(found, SAVE_THE_REST)]


def integrity_messages(tx: ReadTransaction, pragma: str) -> list[str]:
    """Return the findings of SQLite's own check, `quick_check` or `integrity_check`."""
    rows = tx.values(f"PRAGMA {pragma}({_MOST_MESSAGES})")
    return [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]


def only_of_indexes(messages: Sequence[str]) -> bool:
    return all(_OF_AN_INDEX.search(message) for message in messages)


# The files


def _path(context: CheckContext) -> Path:
    assert context.path is not None
    return context.path


def _beside(path: Path) -> list[Path]:
    return [file for suffix in ("-wal", "-shm", "-journal") if (file := Path(f"{path}{suffix}")).exists()]


def find_files(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether this user may write the file and the files beside it."""
    path = _path(context)
    found: list[Finding] = []
    closed = [str(file) for file in (path, *_beside(path)) if not os.access(file, os.R_OK | os.W_OK)]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        closed.append(f"{path.parent} (where the log is made)")
    if closed:
        found.append(problem(f"not writable: {some(closed)}", "chmod u+rw, or the user that the run has"))
    own = path.stat()
    for file in _beside(path):
        other = file.stat()
        if (other.st_uid, stat.S_IMODE(other.st_mode)) != (own.st_uid, stat.S_IMODE(own.st_mode)):
            what = f"{file.name} has not the owner and mode of {path.name}: not all may write it who may write that"
            found.append(warning(what, f"chown --reference={path} {file}; chmod --reference={path} {file}"))
    return found or [fine(f"{path.name} and what is beside it can be written")]


def find_log(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check the size of the WAL."""
    size = _log_size(context)
    if is_log_large(context):
        what = f"the write-ahead log has {units.size(size)}: something reads for long, or nothing closed the database"
        return [repairable(what, level=Severity.WARNING)]
    return [fine(f"the write-ahead log has {units.size(size)}")]


def _log_size(context: CheckContext) -> int:
    log = Path(f"{context.path}-wal")
    return log.stat().st_size if log.exists() else 0


def is_log_large(context: CheckContext) -> bool:
    """Return whether the WAL is longer than in normal use."""
    return _log_size(context) >= LARGE_LOG


# Space


def find_space(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check how much of the file is free pages."""
    page = tx.value("PRAGMA page_size")
    used, free = page * tx.value("PRAGMA page_count"), page * tx.value("PRAGMA freelist_count")
    what = f"{units.size(used)}, of which {units.size(free)} are free for what comes"
    if free >= MUCH_FREE and free > used / 2:
        return [warning(what, f"to give it back to the disk: stop the run, then sqlite3 {context.path} VACUUM")]
    return [fine(what)]


def find_disk(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check the free space on the disk."""
    path = _path(context)
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    what = f"{units.size(free)} free on the disk, the database has {units.size(size)}"
    if free < LITTLE_SPACE:
        return [problem(what, "free some space: puts fail when there is none (what was committed is safe)")]
    if free < size / 10:
        return [warning(what, "free some space, or set a capacity")]
    return [fine(what)]


# Settings


def find_settings(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the file has replaybuf's settings, and is on a file system that SQLite can rely on."""
    found = []
    path, kind = _path(context), filesystem_type(_path(context))
    size, encoding = tx.value("PRAGMA page_size"), tx.value("PRAGMA encoding")
    if not is_wal(path):  # the pragma doesn't show it unless a process has the file open
        what = "no write-ahead log (a snapshot has none): writers and readers wait for each other"
        found.append(warning(what, "nothing: a run that opens it makes one"))
    if size != PAGE_SIZE:
        what = f"pages of {size:,} bytes: large payloads are written more slowly than with {PAGE_SIZE:,}"
        found.append(warning(what, "replaybuf checkpoint save URL FOLDER, and resume into a new file"))
    if encoding != "UTF-8":
        found.append(problem(f"its texts are {encoding}", "save it, and resume into a new file"))
    if is_network(kind):
        what = f"on a network file system ({kind}), where the write-ahead log is unsafe"
        found.append(problem(what, "a local disk, or PostgreSQL"))
    version = tx.value("SELECT sqlite_version()")
    return found or [fine(f"wal, pages of {size:,} bytes, {encoding}, SQLite {version}")]


FIRST = (Check("files", find_files), Check("disk", find_disk), Check("settings", find_settings))
CHECKS = (Check("integrity", find_integrity),)
LAST = (Check("space", find_space), Check("log", find_log))
