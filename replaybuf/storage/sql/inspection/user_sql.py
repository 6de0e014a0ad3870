"""Runs a user's SQL statement read-only."""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Sequence
from typing import Any, NoReturn

from replaybuf.errors import AccessError, LockedError, QueryError, StorageError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS

_WRITES = {"25006", "25001", "2D000"}  # read-only transaction, change of the transaction, COMMIT inside of DO
# PostgreSQL rewrites a view before it checks whether the transaction may write.
_WRITES_TO_VIEW = re.compile(r"^cannot (modify|delete from|update|insert into) .*view")
_INSTEAD = {
    "delete": "; `replaybuf rm` deletes groups",
    "update": "; a program changes groups by `await buffer.update(query, ...)`",
}
_COLUMNS = {
    "sqlite": """SELECT m.name, c.name, NOT c."notnull" AND NOT c.pk FROM sqlite_master AS m,
pragma_table_info(m.name) AS c WHERE m.type IN ('table', 'view') ORDER BY m.name, c.cid""",
    "postgresql": """SELECT table_name, column_name, is_nullable = 'YES' FROM information_schema.columns
WHERE table_schema = ANY (current_schemas(false)) ORDER BY table_name, ordinal_position""",
}


def run_statement(reader: Reader, statement: str, timeout: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return unique column names, and all rows; no names when the statement returns no rows.

    Raises AccessError when it would write, LockedError after `timeout` seconds, QueryError when it is invalid.
    """

    def run(tx: Transaction) -> tuple[list[str], list[tuple[Any, ...]]]:
        names, rows = tx.table(statement)
        return _unique(names), rows

    try:
        return reader.read_any(run, timeout=timeout)
    except StorageError as error:
        _explain(error, statement, timeout)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:  # the latter in 3.11
        raise QueryError(str(error)) from error


def _explain(error: StorageError, statement: str, timeout: float) -> NoReturn:
    """Raise the error for a user that a database error of the statement stands for."""
    cause: BaseException = error
    while (inner := cause.__cause__) is not None:  # the driver's own exception
        cause = inner
    state = getattr(cause, "sqlstate", None)
    message = str(cause)
    writes = state in _WRITES or _WRITES_TO_VIEW.match(message) is not None
    if writes or "readonly database" in message or "too many attached databases" in message:
        instead = _INSTEAD.get(statement.lstrip()[:6].lower(), "")
        raise AccessError(
            f"statements only read here, and the database refused this one: {message}{instead}"
        ) from error
    if state == "57014":
        raise LockedError(f"stopped after {timeout:g} s; raise --timeout if that is too soon") from error
    if "multiple commands" in message or "one statement at a time" in message:
        raise QueryError("give one statement at a time") from error
    if "server expects" in message or "bindings" in message:
        raise QueryError(f"the statement has parameters, which can't be given here: {message}") from error
    if type(error) is StorageError:
        # The statement is at fault: the message needs no URL.
        near = _nearest(message)
        hint = f"; did you mean {near}?" if near else "; `replaybuf sql URL` lists the views and their columns"
        raise QueryError(f"{message}{hint}") from error
    raise error


#: How SQLite and PostgreSQL say that there is no such view or column.
_UNKNOWN = re.compile(r'no such (column|table): (?:\w+\.)?(\w+)|(column|relation) "?(?:\w+\.)?(\w+)"? does not exist')


def _nearest(message: str) -> str | None:
    """Return the view or the column that was probably meant by one that a database's error calls unknown."""
    if (found := _UNKNOWN.search(message)) is None:
        return None
    names = {column.name for view in VIEW_COLUMNS.values() for column in view.columns}
    known = names if "column" in found.group(1, 3) else VIEW_COLUMNS
    return next(iter(difflib.get_close_matches((found[2] or found[4])[:100], known, n=1)), None)


def read_columns(tx: Transaction) -> dict[tuple[str, str], bool]:
    """Return the columns of all tables and views, in order, and whether each may be NULL."""
    return {(table, column): bool(null) for table, column, null in tx.table(_COLUMNS[tx.dialect.name])[1]}


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names of columns, with numbers appended to repeated ones."""
    result: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in result:
            number += 1
            candidate = f"{name}_{number}"
        result.append(candidate)
    return result
