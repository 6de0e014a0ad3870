"""`replaybuf sql`: one statement that can't write."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated

import typer

from replaybuf.cli.options import Url, listing, option, url_and
from replaybuf.cli.output import Column, Output, Row
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.statement import run_statement
from replaybuf.units import cell

_LONGEST = 600.0


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

    The views for people are groups, rollouts, batches, batch_groups, leases, checkpoints, waiters, workers and events;
    "replaybuf schema" says what their columns mean, and docs/sql.md has answers to copy.

    "prompt" and "response" are cut after 200 characters, "full_prompt" and "full_response" are whole. Times are UTC.
    Groups of all named buffers are there, leased ones too (with a "leased_until").

    On a terminal that is too narrow for the table, each row is printed with a line for each field.

    \b
    Examples:
      replaybuf sql run.db "SELECT task_name, count(*), avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT * FROM rollouts WHERE finish_reason = 'length'" --csv > long.csv
      replaybuf sql run.db "SELECT avg(rewards ->> '$.format') FROM rollouts"
      replaybuf sql run.db "SELECT tags ->> 'level' AS level, avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT worker, avg(reward) FROM batch_groups WHERE step = 413 GROUP BY 1"
      replaybuf sql run.db "SELECT worker, wants, reason FROM waiters"
    """
    url, query = url_and(url, statement, "STATEMENT")
    if not query.strip():
        raise typer.BadParameter("the statement is empty", param_hint="STATEMENT")
    names, found = run_statement(open_reader(url), query, timeout)
    if not names:
        output.note("the statement gave no rows")
        return
    rows = [dict(zip(names, row, strict=True)) for row in found]
    output.rows(rows, [_column(name, rows) for name in names])
    if not found:
        output.note(f"no rows (columns: {', '.join(names)})")


def _column(name: str, rows: Sequence[Row]) -> Column:
    number = all(isinstance(row[name], int | float | Decimal | None) for row in rows)
    return Column(name, lambda row: cell(row[name]), right=number, text=not number)
