"""Running one SQL statement of a user, read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NoReturn

from replaybuf.errors import AccessError, LockedError, QueryError, StorageError
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.reader import Reader

_WRITES = {"25006", "25001", "2D000"}  # read-only transaction, change of the transaction, COMMIT inside of DO


def run_statement(reader: Reader, statement: str, timeout: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return unique names of the columns, and all rows; no names when the statement returns no rows.

    Raises AccessError when it would write, LockedError after `timeout` seconds, QueryError when it is invalid.
    """

    def run(look: Look) -> tuple[list[str], list[tuple[Any, ...]]]:
        names, rows = look.table(statement)
        return _unique(names), rows

    try:
        return reader.look_at_any(run, timeout=timeout)
    except StorageError as error:
        _explain(error, timeout)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:  # the latter in 3.11
        raise QueryError(str(error)) from error


def _explain(error: StorageError, timeout: float) -> NoReturn:
    """Raise the error that a database's error means here."""
    cause = _cause(error)
    state = getattr(cause, "sqlstate", None)
    message = str(cause)
    if state in _WRITES or "readonly database" in message or "too many attached databases" in message:
        raise AccessError(f"this command only reads, and the database refused the statement: {message}") from error
    if state == "57014":
        raise LockedError(f"stopped after {timeout:g} s; raise --timeout if that is too soon") from error
    if "multiple commands" in message or "one statement at a time" in message:
        raise QueryError("give one statement at a time") from error
    if "server expects" in message or "bindings" in message:
        raise QueryError(f"the statement has parameters, which can't be given here: {message}") from error
    if type(error) is StorageError:
        raise QueryError(message) from error  # the statement's fault: it needs no URL
    raise error


def _cause(error: BaseException) -> BaseException:
    """Return the driver's own exception."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names of columns, repeated ones with a number."""
    result: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in result:
            number += 1
            candidate = f"{name}_{number}"
        result.append(candidate)
    return result
