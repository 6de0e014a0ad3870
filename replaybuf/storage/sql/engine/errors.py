"""What the exceptions of drivers mean: for the user, and for whoever may run a transaction again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import exc
from sqlalchemy.engine import URL

from replaybuf.errors import (
    AccessError,
    DiskFullError,
    LockedError,
    NotADatabaseError,
    ReplayBufError,
    StorageError,
    UnreachableError,
)
from replaybuf.storage.sql.engine.urls import public_url


@contextmanager
def translated(url: URL, lock_timeout: float) -> Iterator[None]:
    """Raise what drivers and SQLAlchemy raise as errors of replaybuf that say what to do."""
    try:
        yield
    except ReplayBufError:
        raise
    except (exc.SQLAlchemyError, sqlite3.Error, OSError, TimeoutError) as error:
        raise _translate(error, url, lock_timeout) from error
    except Exception as error:
        if type(error).__module__.startswith("asyncpg"):
            raise _translate(error, url, lock_timeout) from error
        raise


def _translate(error: BaseException, url: URL, lock_timeout: float) -> ReplayBufError:
    where = public_url(url)
    cause = _driver_error(error)
    if url.get_backend_name() == "sqlite":
        return translate_sqlite(cause, where, str(url.database), lock_timeout)
    if isinstance(error, exc.TimeoutError) or is_lost(error, connected=False):
        return _unreachable(cause, where)
    return _translate_postgres(cause, where, lock_timeout)


def _driver_error(error: BaseException) -> BaseException:
    """The driver's own exception below SQLAlchemy's wrappers."""
    seen = error
    while True:
        inner = getattr(seen, "orig", None) or getattr(seen, "__cause__", None)
        if inner is None or inner is seen or isinstance(inner, asyncio.CancelledError):  # of a timeout
            return seen
        seen = inner


# What PostgreSQL's error codes mean for the user: https://www.postgresql.org/docs/current/errcodes-appendix.html
_DISK_FULL = {"53100"}


_LOCKED = {"55P03", "57014"}


_ACCESS = {"28000", "28P01", "42501", "25006"}


def _translate_postgres(error: BaseException, where: str, lock_timeout: float) -> ReplayBufError:
    code = getattr(error, "sqlstate", None)
    text = str(error) or type(error).__name__
    if code in _ACCESS:
        return AccessError(f"{where} refused access: {text}")
    if code == "3D000":
        return UnreachableError(f"{where}: {text}; create the database first (createdb)")
    if code in _LOCKED:
        return LockedError(f"{where}: waited more than {lock_timeout:g} s for a lock: {text}")
    if code in _DISK_FULL:
        return DiskFullError(f"{where}: {text}; free some space (what was committed before is safe)")
    return StorageError(f"{where}: {text}")


def _unreachable(error: BaseException, where: str) -> UnreachableError:
    text = str(error) or type(error).__name__
    if getattr(error, "sqlstate", None) == "53300":
        return UnreachableError(f"{where}: {text}; raise its max_connections, or open fewer buffers at once")
    return UnreachableError(f"can't reach {where}: {text}; is the server running, and are host and port right?")


def is_transient(error: BaseException) -> bool:
    """Whether PostgreSQL rolled a transaction back for another's sake, so that it can be run again.

    (Of two that insert the same key, the second finds the first one's group when it looks again.)
    """
    return getattr(_driver_error(error), "sqlstate", None) in {"40001", "40P01", "23505"}


# What goes wrong in writing, by SQLite's names: a quota and a limit of the file's size are told like that, too.
_WRITING = {
    "SQLITE_IOERR_WRITE",
    "SQLITE_IOERR_FSYNC",
    "SQLITE_IOERR_DIR_FSYNC",
    "SQLITE_IOERR_TRUNCATE",
    "SQLITE_IOERR_SHMSIZE",
    "SQLITE_IOERR_DELETE",
}


def translate_sqlite(error: BaseException, where: str, path: str, lock_timeout: float) -> ReplayBufError:
    """An error of the `sqlite3` module as one of replaybuf's that says what to do."""
    text, name = str(error), getattr(error, "sqlite_errorname", "")
    if "locked" in text:
        return LockedError(
            f"another process held the write lock of {where} for more than {lock_timeout:g} s: look for a long "
            "transaction (a shell with BEGIN open?), or raise lock_timeout"
        )
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
        reason = permissions if folder.is_dir() else f"can't be created: there is no folder {folder}"
        return AccessError(f"{where} {reason}")
    return StorageError(f"{where}: {text}")


# https://www.postgresql.org/docs/current/errcodes-appendix.html
_LOST = {
    "57P01",  # ended by an administrator
    "57P02",  # another process of the server crashed
    "57P03",  # starting, stopping or recovering
    "25P03",  # _IDLE_SECONDS were over
    "53300",  # no connection left
}


_FINAL = {"28000", "28P01", "3D000", "42501", "25006", "53100"}


def is_lost(error: BaseException, *, connected: bool) -> bool:
    """Whether a connection was lost or, before it was there, could not be had for the moment.

    Never so for what another attempt would not change: a refused user, an unknown database, a full disk.
    """
    causes = list(_causes(error))
    if any(getattr(cause, "sqlstate", None) in _FINAL for cause in causes):
        return False
    return any(_says_lost(cause, connected) for cause in causes)


def _says_lost(cause: BaseException, connected: bool) -> bool:
    code = getattr(cause, "sqlstate", None)
    if isinstance(code, str):
        return code in _LOST or code.startswith("08")
    if isinstance(cause, exc.DBAPIError) and cause.connection_invalidated:
        return True
    if isinstance(cause, TimeoutError) and cause.errno is None:  # not the network's, but asyncio's
        return not connected
    # The last one: of a server that is just becoming the primary.
    return isinstance(cause, OSError) or type(cause).__name__ == "TargetServerAttributeNotMatched"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What drivers raised, up to this error."""
    seen = error.__cause__ if isinstance(error, ReplayBufError) else error
    while seen is not None:
        yield seen
        inner = getattr(seen, "orig", None) or seen.__cause__
        seen = inner if inner is not seen else None
