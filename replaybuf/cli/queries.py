"""`replaybuf ls`: groups that a query chooses, and the query as SQL; `replaybuf sql`: a statement, the views."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli.app import (
    TEXT,
    URL_VARIABLE,
    Buffer,
    Limit,
    OfStatus,
    OfTask,
    OrderBy,
    Out,
    Url,
    Where,
    argument,
    option,
    read_limit,
    status_of,
    url_of_variable,
)
from replaybuf.cli.groups import nothing_in, order_of, query_of
from replaybuf.cli.output import Output, print_line, print_table, write
from replaybuf.errors import InputError
from replaybuf.query import parse
from replaybuf.redact import escape
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.policies import resolve_policy
from replaybuf.storage.sql.inspection.groups import archived_at, choose, list_oldest, tasks_of
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.user_sql import run_statement
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS, without_markup
from replaybuf.view.columns import GROUPS, Column

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.group_queries import QueryPlan


def ls(
    url: Url,
    output: Out = TEXT,
    where: Where = None,
    buffer: Buffer = None,
    task: OfTask = None,
    status: OfStatus = None,
    order_by: OrderBy = None,
    limit: Limit = "20",
    explain: Annotated[
        bool, option("--explain", "Show the SQL instead, with its plan and the index that it uses.")
    ] = False,
    policy: Annotated[
        str | None,
        option("--policy", "With --explain: a draw by this policy, of --task: fifo, staleness, ...", metavar="NAME"),
    ] = None,
) -> None:
    """List groups without reading their payloads.

    Fields of queries and orders are uid, task_name, status, staleness, priority, times_sampled, created_at (seconds
    since the epoch), reward (the mean of the group) and, in queries, tags.NAME. Without an order the oldest come first.
    Leased and archived groups are listed, too: "leased" says when the lease ends.

    --explain runs nothing but the EXPLAIN, of what "replaybuf ls" and buffer.find() do; with --policy, of what a draw
    with where= does, of --limit groups of one task and status (completed, unless told).

    \b
    Examples:
      replaybuf ls run.db --task math --order-by -reward --limit 5
      replaybuf ls run.db --where '{"staleness": {"$gte": 3}, "tags.level": {"$in": [4, 5]}}'
      replaybuf ls run.db --status failed --format json --limit all | jq '.[].error'
      replaybuf ls run.db --where '{"tags.level": {"$in": [4, 5]}}' --task math --policy staleness --explain
    """
    reader, at_most = open_reader(url), read_limit(limit)
    if explain or policy:
        _explain(reader, output, _plans(reader, where, buffer, task, status, order_by, at_most, policy))
        return
    query, order, count = query_of(where, task, status), order_of(order_by), output.for_people
    if where or order_by or status not in (None, *Status):
        from replaybuf.storage.sql.inspection.group_queries import list_groups  # imports SQLAlchemy

        found = reader.read(lambda tx: list_groups(tx, buffer, query, order, at_most, count=count))
    else:
        found = reader.read(lambda tx: list_oldest(tx, buffer, task, status, at_most, count=count))
    rows = found.rows
    if not rows and at_most != 0 and output.for_people:
        output.note(nothing_in(reader, buffer, task) if where or task or status else "the buffer is empty")
        return
    if output.for_people:
        rows = [row | {"archived_at": archived_at(row), "prompt": row["error"] or row["prompt"]} for row in rows]
    output.rows(rows, [one for one in GROUPS if found.several or one.name != "buffer"], found.now)
    if found.matching > len(rows):
        output.note(f"{len(rows):,} of {found.matching:,} groups; --limit all shows all")


# A query, explained


def _plans(
    reader: Reader,
    where: str | None,
    buffer: str | None,
    task: str | None,
    status: str | None,
    order_by: list[str] | None,
    limit: int | None,
    policy: str | None,
) -> list[QueryPlan]:
    """Return the plan of a query, or those of a draw by a policy."""
    from replaybuf.storage.sql.inspection.group_queries import explain_draw, explain_query

    if policy is None:
        query, order = query_of(where, task, status), order_of(order_by)
        return [reader.read(lambda tx: explain_query(tx, buffer, query, order, limit))]
    if order_by:
        raise typer.BadParameter("a draw has the order of its policy", param_hint="--order-by")
    drawn, node = resolve_policy(policy).order, query_of(where, None, None)
    if task is None:
        raise typer.BadParameter("a draw is of one task: give --task, too", param_hint="--policy")
    parse({"task_name": task})  # raises for names that no database can store
    of = status_of(status) or Status.COMPLETED
    found = reader.read(lambda tx: explain_draw(tx, choose(tx, buffer), task, of, node, drawn, limit or 1))
    if not found:
        tasks = ", ".join(reader.read(lambda tx: tasks_of(tx, buffer))) or "none"
        raise InputError(f"there never was a group of task {task!r:.200} that was {of}; tasks: {tasks}")
    return found


def _explain(reader: Reader, output: Output, found: Sequence[QueryPlan]) -> None:
    values: list[dict[str, Any]] = [
        {
            "sql": one.sql,
            "parameters": one.parameters,
            "indexes": one.indexes,
            "sorts": one.sorts,
            "sentence": one.sentence,
            "plan": [f"{'  ' * step.depth}{step.text}" for step in one.plan],
        }
        for one in found
    ]
    if output.printed(lambda: values, lambda: [{**one, "plan": "\n".join(one["plan"])} for one in values]):
        return
    for one in values:
        print_line(one["sentence"][0].upper() + one["sentence"][1:] + ".", "bold")
        write(["\nSQL\n", *(f"  {escape(line.rstrip())}\n" for line in one["sql"].splitlines())])
        if one["parameters"]:
            write(["\nparameters\n"])
            print_table([{"n": n, "value": repr(value)} for n, value in enumerate(one["parameters"], 1)], _PARAMETERS)
        write(["\nplan\n", *(f"  {escape(line)}\n" for line in one["plan"]), "\n"])


_PARAMETERS = [Column("n", "#", "id"), Column("value", "value", "text")]


# SQL

_LONGEST = 600.0


def sql(
    url: Url,
    output: Out = TEXT,
    statement: Annotated[str | None, argument("[STATEMENT]", "One SQL statement; without it the views.")] = None,
    timeout: Annotated[
        float, option("--timeout", "Stop the statement after this.", metavar="SECONDS", min=0.001, max=_LONGEST)
    ] = 60.0,
) -> None:
    """Run one SQL statement that only reads; without one, list the views for people, with what their columns mean.

    The database itself refuses to write: a SQLite file is opened read-only, PostgreSQL runs a read-only transaction
    that the statement can't leave. All rows are fetched before the first is printed, so that the run is never held up.

    The views are the same in every database of this version, on SQLite and PostgreSQL: names, order and meaning of
    columns stay, new ones come at the end; docs/sql.md has answers to copy. "prompt" and "response" are cut after 200
    characters, "full_prompt" and "full_response" are whole. Times are UTC. Groups of all named buffers are there,
    leased ones too (with a "leased_until").

    On a terminal that is too narrow for the table, each row is printed with a line for each field.

    \b
    Examples:
      replaybuf sql run.db
      replaybuf sql run.db "SELECT task_name, count(*), avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT * FROM rollouts WHERE finish_reason = 'length'" --format csv > long.csv
      replaybuf sql run.db "SELECT tags ->> 'level' AS level, avg(reward) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT worker, avg(reward) FROM batch_groups WHERE step = 413 GROUP BY 1"
      replaybuf sql run.db "SELECT worker, wants, reason FROM waiters"
    """
    variable = os.environ.get(URL_VARIABLE)
    if statement is None and variable and url != variable:
        url, statement = url_of_variable(), url
    if statement is None:
        open_reader(url).read(lambda tx: None)
        _views(output)
        return
    if not statement.strip():
        raise typer.BadParameter("the statement is empty", param_hint="STATEMENT")
    names, found = run_statement(open_reader(url), statement, timeout)
    if not names:
        output.note("the statement gave no rows")
        return
    rows = [dict(zip(names, row, strict=True)) for row in found]
    output.rows(rows, [_column(name, rows) for name in names])
    if not found:
        output.note(f"no rows (columns: {', '.join(names)})")


def _column(name: str, rows: Sequence[dict[str, Any]]) -> Column:
    number = all(isinstance(row[name], int | float | Decimal | None) for row in rows)
    return Column(name, name, "number" if number else "cell")


def _views(output: Output) -> None:
    """Print the views for SQL, with what their columns mean."""
    if output.for_people:
        write(_lines())
        return
    output.rows(
        [
            {"view": name, "column": one.name, "type": one.type, "meaning": without_markup(one.meaning)}
            for name, view in VIEW_COLUMNS.items()
            for one in view.columns
        ]
    )


def _lines() -> Iterator[str]:
    """Yield the lines of each view with its columns, wrapped to the width of the terminal."""
    width = min(120, shutil.get_terminal_size().columns)
    for place, (name, view) in enumerate(VIEW_COLUMNS.items()):
        gap = "\n" if place else ""
        yield f"{gap}{textwrap.fill(f'{name}: a row for each {without_markup(view.row)}', width)}\n"
        broadest = max(len(one.name) for one in view.columns)
        for one in view.columns:
            indent = f"  {one.name:<{broadest}}  {one.type:<7}  "
            meaning = textwrap.wrap(without_markup(one.meaning), max(20, width - len(indent))) or [""]
            yield f"{indent}{meaning[0]}".rstrip() + "\n"
            yield from (f"{' ' * len(indent)}{line}\n" for line in meaning[1:])
