"""Exceptions of drivers: translated into errors for users, with advice, and classified for retries."""

from __future__ import annotations

import asyncio
import sqlite3
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from replaybuf.errors import (
    AccessError,
    ConfigError,
    LockedError,
    ReplayBufError,
    StorageError,
    UnreachableError,
    reason_of,
)
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.sqlite_files import translate_sqlite


class CommitUnansweredError(TimeoutError):
    """A commit was given up: perhaps it waits for a synchronous standby."""


@contextmanager
def translated(access: Access, patience: float | None = None) -> Iterator[None]:
    """Convert exceptions of drivers and SQLAlchemy to errors of replaybuf with advice.

    `patience` bounded the waits for locks, in seconds, by default the lock timeout.
    """
    try:
        yield
    except ReplayBufError:
        raise
    except (exc.SQLAlchemyError, sqlite3.Error, OSError, TimeoutError) as error:
        raise _translate(error, access, patience) from error
    except Exception as error:
        if _is_asyncpg(error):
            raise _translate(error, access, patience) from error
        raise


def _is_asyncpg(error: BaseException) -> bool:
    return type(error).__module__.startswith("asyncpg")


def _is_configuration(error: BaseException) -> bool:
    """Return whether asyncpg can't use an option of the URL, or a file that it names."""
    return type(error).__name__ == "ClientConfigurationError"


def _translate(error: BaseException, access: Access, patience: float | None) -> ReplayBufError:
    where, seconds = access.where, access.lock_timeout if patience is None else patience
    cause = _driver_error(error)
    if access.is_sqlite:
        return translate_sqlite(cause, where, str(access.url.database), seconds)
    if isinstance(cause, CommitUnansweredError):
        standby = "see that the standbys of synchronous_standby_names are connected, and at their disks"
        unanswered = UnreachableError(f"{where}: {cause}: {standby}", reason="commit unanswered")
        unanswered.in_doubt = True
        return unanswered
    if _is_configuration(cause):
        return ConfigError(f"{where}: {cause}")
    state = _state(cause)
    if state != "not admitted" and is_lost(error, connected=False):
        return _unreachable(cause, where)
    text = driver_message(cause)
    state = state or ""
    kind, message = _MESSAGES.get(state, (StorageError, ": {0}"))
    reason = state if state in kind.REASONS else ""
    return kind(where + message.format(text + _advice(cause), seconds=seconds), reason=reason)


def _driver_error(error: BaseException) -> BaseException:
    """Return the driver's own exception below SQLAlchemy's wrappers, preferring a server's error to the disconnect."""
    cause = error
    while True:
        inner = getattr(cause, "orig", None) or getattr(cause, "__cause__", None)
        if inner is None or inner is cause or isinstance(inner, asyncio.CancelledError):  # raised by a timeout
            return cause
        if isinstance(inner, OSError) and (getattr(cause, "sqlstate", None) or _HUNG_UP_STATE) != _HUNG_UP_STATE:
            return cause
        cause = inner


# PostgreSQL

#: The SQLSTATE that asyncpg itself gives to a lost connection, whatever the cause.
_HUNG_UP_STATE = "08003"


#: Error classes and messages by state; `{0}` is the server's message, with advice.
_MESSAGES: dict[str, tuple[type[ReplayBufError], str]] = {
    "not admitted": (AccessError, " refused access: {0}"),
    "refused": (AccessError, " refused access: {0}"),
    "read-only": (
        AccessError,
        " refused to write: {0}; it is a standby (name the primary), or default_transaction_read_only is set",
    ),
    "no database": (UnreachableError, ": {0}; create the database first (createdb)"),
    "locked": (LockedError, ": waited more than {seconds:g} s for a lock: {0}"),
    "disk full": (StorageError, ": {0}; free some space (what was committed before is safe)"),
}
#: States by SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html
_STATES = {
    "28000": "not admitted",  # the user
    "28P01": "not admitted",  # the password
    "42501": "refused",  # missing privilege
    "25006": "read-only",
    "3D000": "no database",
    "55P03": "locked",  # lock_timeout
    "53100": "disk full",
    "57P01": "lost",  # terminated by an administrator
    "57P02": "lost",  # another server process crashed
    "57P03": "lost",  # starting, stopping or recovering
    "25P03": "lost",  # idle in a transaction for too long
    "53300": "lost",  # no connection left
    "40001": "conflict",  # serialisation
    "40P01": "conflict",  # deadlock
    "23505": "conflict",  # unique violation: the retry finds the other transaction's group
}
#: States in which a retry would fail again.
_FINAL_STATES = ("refused", "read-only", "no database", "disk full")


def _state(error: BaseException) -> str | None:
    code = getattr(error, "sqlstate", None)
    return _STATES.get(code, "lost" if code.startswith("08") else None) if isinstance(code, str) else None


def driver_message(error: BaseException) -> str:
    """Return the driver's message on one line, without the server's hint if there is advice of ours."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if type(error).__name__ == "InternalClientError":  # its message is about asyncpg's internal states
        return "the connection was ended"
    text = str(error) or type(error).__name__
    if _state(error) is not None:
        text = text.partition("\nHINT:")[0]  # the last part; asyncpg's hint about poolers has many lines
    return "; ".join(text.splitlines())


def _unreachable(error: BaseException, where: str) -> UnreachableError:
    what_to_do = _advice(error) or "; is the server running, and are host and port right?"
    reason = "no connection left" if getattr(error, "sqlstate", "") == "53300" else ""
    return UnreachableError(f"can't reach {where}: {driver_message(error)}{what_to_do}", reason=reason)


# Classification for retries


def is_conflict(error: BaseException) -> bool:
    """Return whether PostgreSQL rolled a transaction back in favour of another, so that a retry may succeed."""
    return _state(_driver_error(error)) == "conflict"


def is_lost(error: BaseException, *, connected: bool) -> bool:
    """Return whether a connection was lost or, if not `connected` yet, can't be made at the moment."""
    reason = reason_of(error)
    if reason == "credentials":
        return not connected
    if reason in ("no primary", "only standbys"):
        return True
    causes = list(_causes(error))
    if any(_state(cause) in _FINAL_STATES for cause in causes):
        return False
    return any(_says_lost(cause, connected) for cause in causes)


#: asyncpg's errors while a server is being promoted, and after a server announced the end of a connection still open.
_LOST_NAMES = {"TargetServerAttributeNotMatched", "InternalClientError"}


def _says_lost(cause: BaseException, connected: bool) -> bool:
    if isinstance(getattr(cause, "sqlstate", None), str):
        return _state(cause) in ("lost", "not admitted")
    # asyncio's timeout, not the network's; or a file of the URL that is just being replaced
    if (isinstance(cause, TimeoutError) and cause.errno is None) or _is_configuration(cause):
        return not connected
    return isinstance(cause, OSError) or type(cause).__name__ in _LOST_NAMES


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of drivers that led to this error, outermost first."""
    cause = error.__cause__ if isinstance(error, ReplayBufError) else error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def is_refusal(error: BaseException) -> bool:
    """Return whether the database or its driver refused a row, as opposed to being unreachable, locked or full."""
    by_sqlite = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
    cause = error.__cause__
    if isinstance(error, UnreachableError):  # a retry of single rows might store them twice
        return False
    return (
        not isinstance(error, ReplayBufError)
        or reason_of(error) == "too large"
        or isinstance(cause, by_sqlite)
        or (cause is not None and _is_asyncpg(cause) and _state(cause) is None)
    )


# Advice

#: What to do about an error, by SQLSTATE.
_ADVICE = {
    "28P01": (
        "give the one that holds now, in the url, or in a password file or by a function (passfile, password=), which "
        "are asked anew for each connection"
    ),
    "28000": "create the role if it isn't there (CREATE ROLE ... LOGIN), and see TLS and Roles in docs/operating.md",
    "53300": "raise its max_connections (or the CONNECTION LIMIT of the role), or open fewer buffers at once",
    "42501": "let the owner make the tables (replaybuf doctor URL --upgrade), and see Roles in docs/operating.md",
    "08P01": "PgBouncer says this, and docs/operating.md what it means",
}


def _advice(error: BaseException) -> str:
    """Return advice about an error as the rest of a sentence; an empty string if there is none."""
    is_about_tls = isinstance(error, ssl.SSLError) or "rejected SSL upgrade" in str(error)
    advice = "see TLS in docs/operating.md" if is_about_tls else _ADVICE.get(getattr(error, "sqlstate", ""))
    return f"; {advice}" if advice else ""
