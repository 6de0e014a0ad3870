"""`replaybuf sql`, `replaybuf schema`: one statement that can't write, and the views for it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated

import typer

from replaybuf.cli.options import Url, listing, option, url_and
from replaybuf.cli.output import Column, Output, Row, write
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.user_sql import run_statement
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS, without_markup
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


@listing
def schema(
    output: Output,
    view: Annotated[str | None, typer.Argument(metavar="VIEW", help="Only this one.", show_default=False)] = None,
) -> None:
    """List the views for SQL, with what their columns mean.

    They are the same in every database of this version, on SQLite and PostgreSQL: names, order and meaning of columns
    stay, new ones come at the end. Times are UTC.

    \b
    Examples:
      replaybuf schema
      replaybuf schema batches
      replaybuf schema rollouts --json
    """
    if view is not None and view not in VIEW_COLUMNS:
        there = ", ".join(VIEW_COLUMNS)
        raise typer.BadParameter(f"there is no view {view!r:.100}: there are {there}", param_hint="VIEW")
    names = [*VIEW_COLUMNS] if view is None else [view]
    if output.for_people:
        write(_lines(names))
        return
    rows = [
        {"view": name, "column": one.name, "type": one.type, "meaning": without_markup(one.meaning)}
        for name in names
        for one in VIEW_COLUMNS[name].columns
    ]
    output.rows(rows, [])


def _lines(names: list[str]) -> Iterator[str]:
    """Yield each view with its columns, wrapped as the terminal is wide."""
    width = min(120, shutil.get_terminal_size().columns)
    for place, name in enumerate(names):
        view = VIEW_COLUMNS[name]
        gap = "\n" if place else ""
        yield f"{gap}{textwrap.fill(f'{name}: a row for each {without_markup(view.row)}', width)}\n"
        broadest = max(len(one.name) for one in view.columns)
        for one in view.columns:
            indent = f"  {one.name:<{broadest}}  {one.type:<7}  "
            meaning = textwrap.wrap(without_markup(one.meaning), width - len(indent)) or [""]
            yield f"{indent}{meaning[0]}".rstrip() + "\n"
            yield from (f"{' ' * len(indent)}{line}\n" for line in meaning[1:])
