"""`replaybuf sql`: one statement that can't write."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, NoReturn

import typer
from sqlalchemy import Connection

from replaybuf.cli.options import Url, listing, option, url_and
from replaybuf.cli.output import Column, Output, Row, encode, iso
from replaybuf.errors import AccessError, LockedError, QueryError, StorageError
from replaybuf.storage.sql.inspection import open_reader

_LONGEST = 600.0
_WRITES = {"25006", "25001", "2D000"}  # read-only transaction, change of the transaction, COMMIT inside of DO


@listing
def sql(
    url: Url,
    output: Output,
    statement: Annotated[
        str | None, typer.Argument(metavar="STATEMENT", help="One SQL statement.", show_default=False)
    ] = None,
    timeout: Annotated[
        float, option("--timeout", metavar="SECONDS", min=0.001, max=_LONGEST, help="Stop the statement after this.")
    ] = 60.0,
) -> None:
    """Run one SQL statement that only reads.

    The database itself refuses to write: a SQLite file is opened read-only, PostgreSQL runs a read-only transaction
    that the statement can't leave. All rows are fetched before the first is printed, so that the run is never held up.

    The views for people are "groups" (a row per group: uid, buffer, task_name, status, staleness, priority,
    times_sampled, created_at, leased_until, archived_at, deliveries, reward, rollouts, prompt_tokens, response_tokens,
    finish_reasons, prompt, response, tags, key, error, bytes) and "rollouts" (a row per rollout: uid, position, buffer,
    task_name, rollout_id, status, staleness, oldest_model_step, reward, prompt_tokens, response_tokens, finish_reason,
    prompt, response). Leased groups have a leased_until, and those of all named buffers are there.

    On a terminal that is too narrow for the table, each row is printed with a line for each field.

    \b
    Examples:
      replaybuf sql run.db "SELECT task_name, count(*), avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT * FROM rollouts WHERE finish_reason = 'length'" --csv > long.csv
      replaybuf sql run.db "SELECT tags ->> 'level' AS level, avg(reward) FROM groups GROUP BY 1"
    """
    url, query = url_and(url, statement, "STATEMENT")
    if not query.strip():
        raise typer.BadParameter("the statement is empty", param_hint="STATEMENT")

    def run(connection: Connection) -> tuple[list[str], list[Sequence[Any]]]:
        result = connection.exec_driver_sql(query)
        if not result.returns_rows:
            return [], []
        return unique(list(result.keys())), [tuple(row) for row in result.fetchall()]

    try:
        names, found = open_reader(url).read(run, timeout=timeout)
    except StorageError as error:
        explain(error, timeout)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:  # neither SQLAlchemy nor 3.11's sqlite3 wraps these
        raise QueryError(str(error)) from error
    if not names:
        output.note("the statement gave no rows")
        return
    rows = [dict(zip(names, row, strict=True)) for row in found]
    output.rows(rows, [_column(name, rows) for name in names])
    if not found:
        output.note(f"no rows (columns: {', '.join(names)})")


def explain(error: StorageError, timeout: float) -> NoReturn:
    """Raise what an error of the database means here."""
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
    """The driver's own exception."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error


def unique(names: Sequence[str]) -> list[str]:
    """The names of columns, those that come again with a number."""
    result: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in result:
            number += 1
            candidate = f"{name}_{number}"
        result.append(candidate)
    return result


def _column(name: str, rows: Sequence[Row]) -> Column:
    number = all(isinstance(row[name], int | float | Decimal | None) for row in rows)
    return Column(name, lambda row: cell(row[name]), right=number, text=not number)


def cell(value: Any) -> str:
    """A value for people."""
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, float | Decimal):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, dict | list):
        return encode(value)
    return str(value)
