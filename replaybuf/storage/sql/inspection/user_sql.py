"""Runs a user's SQL statement read-only."""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from replaybuf.errors import AccessError, LockedError, QueryError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction

_WRITES = {"25006", "25001", "2D000"}  # read-only transaction, change of the transaction, COMMIT inside of DO
# PostgreSQL rewrites a view before it checks whether the transaction may write.
_WRITES_TO_VIEW = re.compile(r"^cannot (modify|delete from|update|insert into) .*view")
_INSTEAD = {
    "delete": "; `replaybuf rm` deletes groups",
    "update": "; a program changes groups by `await buffer.update(query, ...)`",
}
_FROM_GROUP = re.compile(r"\b(?:from|join)\s+group\b", re.IGNORECASE)
_OF_GROUPS = "; did you mean groups? GROUP is a word of SQL."
_UNKNOWN = re.compile(r'^no such (table|column): "?([\w.]+)|^(relation|column) "?([\w.]+)"? does not exist')
_COLUMNS = {
    "sqlite": """SELECT m.name, c.name, NOT c."notnull" AND NOT c.pk FROM sqlite_master AS m,
pragma_table_info(m.name) AS c WHERE m.type IN ('table', 'view') ORDER BY m.name, c.cid""",
    "postgresql": """SELECT table_name, column_name, is_nullable = 'YES' FROM information_schema.columns
WHERE table_schema = ANY (current_schemas(false)) ORDER BY table_name, ordinal_position""",
}


def run_statement(reader: Reader, statement: str, timeout: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return unique column names, and all rows; no names when the statement returns no rows.

    Raises AccessError when it would write, LockedError after `timeout` seconds, QueryError when it is invalid: for an
    unknown table or column it lists the known ones.
    """

    def run(tx: ReadTransaction) -> tuple[list[str], list[tuple[Any, ...]]]:
        names, rows = tx.table(statement)
        return _unique(names), rows

    try:
        return reader.read_any(run, timeout=timeout)
    except StorageError as error:
        _explain(error, statement, timeout, reader)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:  # the latter in 3.11
        raise QueryError(str(error)) from error


def _explain(error: StorageError, statement: str, timeout: float, reader: Reader) -> NoReturn:
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
        raise QueryError(message + _what_there_is(message, statement, reader)) from error
    raise error


def _what_there_is(message: str, statement: str, reader: Reader) -> str:
    """Return the rest of the message for an unknown table or column: the nearest name, and the existing names."""
    match = _UNKNOWN.match(message)
    if match is None:
        return _OF_GROUPS if "syntax" in message and _FROM_GROUP.search(statement) else ""
    kind, name = match[1] or match[3], (match[2] or match[4]).rpartition(".")[2]
    columns: dict[str, list[str]] = {}
    for table, column in reader.read_any(read_columns):
        columns.setdefault(table, []).append(column)
    if kind != "column":
        people = [table for table in columns if not table.startswith(("rb_", "sqlite_"))] or list(columns)
        return _nearest(name, columns) + (f" There are {', '.join(people)}" if people else " There is no table")
    words = set(re.findall(r"\w+", statement.lower()))
    used = {table: names for table, names in columns.items() if table.lower() in words}
    has = "; ".join(f"{table} has {', '.join(names)}" for table, names in used.items())
    return _nearest(name, [one for names in used.values() for one in names]) + (f" {has}" if has else "")


def _nearest(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def read_columns(tx: ReadTransaction) -> dict[tuple[str, str], bool]:
    """Return the columns of all tables and views, in order, and whether each may be NULL."""
    return {(table, column): bool(null) for table, column, null in tx.table(_COLUMNS[tx.dialect_name])[1]}


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
