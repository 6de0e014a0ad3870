"""What the exceptions of SQLite mean, for the user."""

from __future__ import annotations

from pathlib import Path

from replaybuf.errors import (
    AccessError,
    DiskFullError,
    LockedError,
    NotADatabaseError,
    ReplayBufError,
    StorageError,
    TooLargeError,
)
from replaybuf.redact import redact

# SQLite's names for failed writes; exceeded quotas and file size limits are reported like this, too.
_WRITING = {
    "SQLITE_IOERR_WRITE",
    "SQLITE_IOERR_FSYNC",
    "SQLITE_IOERR_DIR_FSYNC",
    "SQLITE_IOERR_TRUNCATE",
    "SQLITE_IOERR_SHMSIZE",
    "SQLITE_IOERR_DELETE",
}


def translate_sqlite(error: BaseException, where: str, path: str, lock_timeout: float) -> ReplayBufError:
    """Return the error of replaybuf, saying what to do, for an error of the `sqlite3` module."""
    text, name = str(error), getattr(error, "sqlite_errorname", "")
    if "locked" in text:
        return LockedError(
            f"another process held the write lock of {where} for more than {lock_timeout:g} s: look for a long "
            "transaction (a shell with BEGIN open?), or raise lock_timeout"
        )
    if "too big" in text:
        return TooLargeError(f"{where}: {text}: a value is larger than SQLite's limit SQLITE_MAX_LENGTH")
    if "disk is full" in text:
        return DiskFullError(f"{where}: {text}; free some space (what was committed before is safe)")
    if name in _WRITING:
        return DiskFullError(
            f"{where}: {text} in writing: the disk is full or failing, or a quota or a limit of the file's size is "
            "reached; free some space (what was committed before is safe)"
        )
    if "disk I/O error" in text:
        return NotADatabaseError(
            f"{where}: {text}: the file or its log (-wal) can't be read; it was truncated, deleted or damaged, or the "
            "disk fails"
        )
    if "readonly" in text or "read-only" in text:
        return AccessError(f"{where} is read-only: check the permissions of the file and of its folder")
    if "malformed" in text:
        return NotADatabaseError(
            f"{where}: {text}: the file is damaged; replaybuf doctor says how far, and --rescue saves what can be read"
        )
    if "not a database" in text or "encrypted" in text:
        return NotADatabaseError(f"{where}: {text}; give the path of a replaybuf database, or of a file to create")
    if "unable to open" in text:
        folder = Path(path).absolute().parent
        if Path(path).is_dir():
            return AccessError(f"{where} is a folder; give a database file in it")
        permissions = "can't be opened or created: check the permissions of the file and of its folder"
        reason = permissions if folder.is_dir() else f"can't be created: there is no folder {redact(str(folder))}"
        return AccessError(f"{where} {reason}")
    return StorageError(f"{where}: {text}")
