"""Everything that differs between the database drivers: URLs, engines, settings, and what their exceptions mean."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import exc
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from replaybuf.errors import (
    AccessError,
    ConfigError,
    DiskFullError,
    LockedError,
    MissingDriverError,
    ReplayBufError,
    StorageError,
    UnreachableError,
)
from replaybuf.storage.sql.engine.errors import is_lost, translate_sqlite
from replaybuf.storage.sql.engine.postgres import postgres_engine
from replaybuf.storage.sql.engine.sqlite import sqlite_engine

_SQLITE_NAMES = {"sqlite", "sqlite+aiosqlite", "sqlite3"}
_POSTGRES_NAMES = {"postgresql", "postgres", "postgresql+asyncpg", "pgsql"}


def parse_url(url: str) -> URL:
    """A database URL as people write it, with the async driver filled in.

    Accepts `sqlite:///run.db`, `sqlite:///:memory:`, `sqlite://`, `postgresql://...` and `postgres://...`. Raises
    ConfigError for anything else, and MissingDriverError without the driver; messages never show a password.
    """
    if not isinstance(url, str) or not url:
        raise ConfigError("the url is empty; write for example sqlite:///run.db or postgresql://user@host/database")
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        hint = f"; for a file write sqlite:///{redact(url)}" if "://" not in url else ""
        raise ConfigError(
            f"can't read the database url {redact(url)!r}: expected sqlite:///FILE or "
            f"postgresql://user@host/database{hint}"
        ) from None
    if parsed.drivername in _SQLITE_NAMES:
        if parsed.host:
            raise ConfigError(
                f"{redact(url)!r} has a host; a relative file is sqlite:///run.db, an absolute one has 4 /"
            )
        if "?" in url:
            raise ConfigError(f"{redact(url)!r}: SQLite urls take no options; a ? in the name of a file is written %3F")
        if "\x00" in (parsed.database or ""):
            raise ConfigError(f"{redact(url)!r} holds a NUL, which no file name can have")
        return parsed.set(drivername="sqlite+aiosqlite", database=parsed.database or ":memory:")
    if parsed.drivername in _POSTGRES_NAMES:
        if importlib.util.find_spec("asyncpg") is None:
            raise MissingDriverError(
                "PostgreSQL needs the driver asyncpg, which is not installed: pip install 'replaybuf[postgres]'"
            )
        return _checked_postgres(parsed.set(drivername="postgresql+asyncpg"))
    raise ConfigError(
        f"{parsed.drivername!r} is not supported (in {redact(url)!r}); use sqlite:///FILE or "
        "postgresql://user@host/database"
    )


def redact(url: str | URL) -> str:
    """The URL without passwords, for messages."""
    text = url.render_as_string(hide_password=True) if isinstance(url, URL) else str(url)
    if "://" not in text:  # no URL, perhaps for the lack of a slash
        text = re.sub(r"^.*@", "***@", text, flags=re.DOTALL)
    # Up to the last @: a password that holds one, unquoted, is not to be shown in part.
    text = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", text, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|sslpassword)=)[^&\s]*", r"\1***", text)


def public_url(url: URL) -> str:
    """The URL as people write it, without driver and password."""
    return redact(url.set(drivername=url.get_backend_name()))


# What of the options of libpq and asyncpg is understood in a URL, with how their values are read.
_POSTGRES_OPTIONS: dict[str, Callable[[str], Any]] = {
    "host": str,
    "port": str,
    "ssl": str,
    "passfile": str,
    "target_session_attrs": str,
    "krbsrvname": str,
    "gsslib": str,
    "statement_cache_size": int,
    "prepared_statement_cache_size": int,
    "command_timeout": float,
    "timeout": float,
    "application_name": str,
}
_POSTGRES_SPELLINGS = {"sslmode": "ssl", "connect_timeout": "timeout"}
_POSTGRES_IGNORED = ("channel_binding", "gssencmode")


def _one(values: str | Sequence[str] | None) -> str | None:
    return values if values is None or isinstance(values, str) else values[-1]


def _checked_postgres(url: URL) -> URL:
    """The URL with its password in one place and options that asyncpg understands."""
    where = public_url(url)
    query = dict(url.query)
    url = url.set(username=_one(query.pop("user", None)), password=_one(query.pop("password", None)))
    if "@" in (url.host or ""):
        raise ConfigError(f"{where} has more than one @: in a user or password it is written %40 (/ %2F, % %25)")
    if url.port is not None and not 0 < url.port < 65536:
        raise ConfigError(f"{where}: ports are from 1 to 65535")
    for ignored in _POSTGRES_IGNORED:
        query.pop(ignored, None)
    options = {_POSTGRES_SPELLINGS.get(name, name): value for name, value in query.items()}
    for name, value in options.items():
        if name not in _POSTGRES_OPTIONS:
            known = ", ".join(sorted({*_POSTGRES_OPTIONS, *_POSTGRES_SPELLINGS, "user", "password"}))
            raise ConfigError(f"{where}: there is no option {name!r}; known are {known}")
        try:
            _POSTGRES_OPTIONS[name](value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: the option {name} must be a number, not {value!r}") from None
    return url.set(query=options)


def create_engine(url: URL, *, durability: str, lock_timeout: float, read_only: bool = False) -> AsyncEngine:
    """The async engine for a URL from `parse_url`. Connects to nothing yet."""
    if url.get_backend_name() == "sqlite":
        return sqlite_engine(url, durability=durability, lock_timeout=lock_timeout, read_only=read_only)
    # Those whose value is no text, or that asyncpg wants elsewhere, go past the URL.
    own = {name: read(url.query[name]) for name, read in _POSTGRES_OPTIONS.items() if name in url.query}  # type: ignore[arg-type]
    url = url.set(query={name: url.query[name] for name in ("host", "port") if own.pop(name, None) is not None})
    return postgres_engine(url, own, lock_timeout=lock_timeout, read_only=read_only)


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
