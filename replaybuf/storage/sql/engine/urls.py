"""Database URLs: checking them, and the options that they may have."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import exc
from sqlalchemy.engine import URL, make_url

from replaybuf.errors import (
    ConfigError,
    MissingDriverError,
)
from replaybuf.redact import redact

_SQLITE_NAMES = {"sqlite", "sqlite+aiosqlite", "sqlite3"}
_POSTGRES_NAMES = {"postgresql", "postgres", "postgresql+asyncpg", "pgsql"}


def parse_url(url: str) -> URL:
    """Return the URL of a database from text as users write it, with the async driver filled in.

    Accepts `sqlite:///run.db`, `sqlite:///:memory:`, `sqlite://`, `postgresql://...` and `postgres://...`. Raises
    ConfigError for anything else, and MissingDriverError when the driver isn't installed; messages never show a
    password.
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
            raise MissingDriverError("PostgreSQL needs the driver asyncpg, which is not installed: pip install asyncpg")
        return _checked_postgres(parsed.set(drivername="postgresql+asyncpg"))
    raise ConfigError(
        f"{parsed.drivername!r} is not supported (in {redact(url)!r}); use sqlite:///FILE or "
        "postgresql://user@host/database"
    )


def public_url(url: URL) -> str:
    """Return the URL as users write it, without driver and password."""
    return redact(url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True))


# The options of libpq and asyncpg that are accepted in a URL, with the parsers of their values.
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
    """Return the URL with its password in one place and options that asyncpg accepts."""
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


def driver_options(url: URL) -> tuple[URL, dict[str, Any]]:
    """Return a PostgreSQL URL without the options that asyncpg takes as arguments, and those options, parsed."""
    own = {name: read(url.query[name]) for name, read in _POSTGRES_OPTIONS.items() if name in url.query}  # type: ignore[arg-type]
    kept = {name: url.query[name] for name in ("host", "port") if own.pop(name, None) is not None}
    return url.set(query=kept), own
