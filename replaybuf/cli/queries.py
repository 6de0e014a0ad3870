"""`replaybuf ls`, `explain`: groups that a query chooses, the query as SQL; `sql`, `schema`: a statement, the views."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf import units
from replaybuf.cli.app import (
    Buffer,
    Limit,
    OfStatus,
    OfTask,
    OrderBy,
    Url,
    Where,
    argument,
    listing,
    option,
    read_limit,
    status_of,
    url_and,
)
from replaybuf.cli.groups import age_of, columns, nothing_in, order_of, query_of
from replaybuf.cli.output import Column, Output, Row, console, print_table, write
from replaybuf.errors import InputError
from replaybuf.query import parse
from replaybuf.redact import escape
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.policies import resolve_policy
from replaybuf.storage.sql.inspection.groups import archived_at, choose, lease_text, list_oldest, tags_text, tasks_of
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.user_sql import run_statement
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS, without_markup
from replaybuf.units import cell

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.group_queries import QueryPlan


@listing
def ls(
    url: Url,
    output: Output,
    where: Where = None,
    buffer: Buffer = None,
    task: OfTask = None,
    status: OfStatus = None,
    order_by: OrderBy = None,
    limit: Limit = "20",
) -> None:
    """List groups without reading their payloads.

    Fields of queries and orders are uid, task_name, status, staleness, priority, times_sampled, created_at (seconds
    since the epoch), reward (the mean of the group) and, in queries, tags.NAME. Without an order the oldest come first.
    Leased and archived groups are listed, too: "leased" says when the lease ends.

    \b
    Examples:
      replaybuf ls run.db --task math --order-by -reward --limit 5
      replaybuf ls run.db --where '{"staleness": {"$gte": 3}, "tags.level": {"$in": [4, 5]}}'
      replaybuf ls run.db --status failed --json --limit all | jq '.[].error'
    """
    query, order = query_of(where, task, status), order_of(order_by)
    reader = open_reader(url)
    at_most, count = read_limit(limit), output.for_people
    if where or order_by or status not in (None, *Status):
        from replaybuf.storage.sql.inspection.group_queries import list_groups  # imports SQLAlchemy

        found = reader.read(lambda tx: list_groups(tx, buffer, query, order, at_most, count=count))
    else:
        found = reader.read(lambda tx: list_oldest(tx, buffer, task, status, at_most, count=count))
    rows = found.rows
    if not rows and at_most != 0 and output.for_people:
        output.note(nothing_in(reader, buffer, task) if where or task or status else "the buffer is empty")
        return
    output.rows(rows, _columns(rows, found.now, found.several))
    if found.matching > len(rows):
        output.note(f"{len(rows):,} of {found.matching:,} groups; --limit all shows all")


#: Columns that many buffers don't use: shown only if they have other values than these defaults.
_UNUSED: dict[str, tuple[str, Any]] = {
    "leased": ("leased_until", None),
    "deliveries": ("deliveries", 0),
    "priority": ("priority", 1.0),
    "sampled": ("times_sampled", 0),
    "tags": ("tags", None),
}


def _columns(rows: list[dict[str, Any]], now: datetime, several: bool) -> list[Column]:
    found = [
        *columns("uid", "buffer", "task_name", "status"),
        Column("leased", lambda r: lease_text(r["leased_until"], now)),
        *columns("deliveries", "staleness", "reward", spare=("deliveries",)),
        Column("priority", lambda r: f"{r['priority']:g}", spare=True),
        *columns(
            "times_sampled", "rollouts", "response_tokens", spare=("times_sampled", "rollouts", "response_tokens")
        ),
        Column("age", lambda r: units.age(age_of(r["created_at"], now))),
        Column("archived", lambda r: units.age(age_of(archived_at(r), now)), spare=True),
        Column("tags", lambda r: tags_text(r["tags"]), right=False, text=True),
        Column("prompt", lambda r: r["error"] or r["prompt"] or "", right=False, text=True),
    ]
    hidden = {header for header, (name, usual) in _UNUSED.items() if all(row[name] == usual for row in rows)}
    hidden |= {"buffer"} if not several else set()
    hidden |= {"archived"} if not any(map(archived_at, rows)) else set()
    return [column for column in found if column.header not in hidden]


# A query, explained


@listing
def explain(
    url: Url,
    output: Output,
    query: Annotated[str | None, argument("QUERY", 'A query: {"reward": {"$gte": 0.9}}; {} for all.')] = None,
    buffer: Buffer = None,
    task: OfTask = None,
    status: OfStatus = None,
    order_by: OrderBy = None,
    limit: Annotated[str, option("--limit", "Of so many groups, or all.", metavar="N|all")] = "20",
    policy: Annotated[
        str | None,
        option("--policy", "Explain a draw by this policy, of groups of --task: fifo, staleness, ...", metavar="NAME"),
    ] = None,
) -> None:
    """Show a query as the SQL that this database gets, with its parameters, its plan, and the index that it uses.

    Nothing is run but the EXPLAIN. Without --policy it is what "replaybuf ls" and buffer.find() do; with it, what a
    draw with where= does, of --limit groups of one task and status (completed, unless told).

    A mistake in the query is shown where it is.

    \b
    Examples:
      replaybuf explain run.db '{"staleness": {"$gte": 3}}' --order-by -reward
      replaybuf explain run.db '{"tags.level": {"$in": [4, 5]}}' --task math --policy staleness
      replaybuf explain postgresql://rl@db/run7 '{}' --order-by -uid --json | jq -r .sql
    """
    from replaybuf.storage.sql.inspection.group_queries import explain_draw, explain_query

    url, text = url_and(url, query, "QUERY")
    if policy is not None and order_by:
        raise typer.BadParameter("a draw has the order of its policy", param_hint="--order-by")
    reader, at_most = open_reader(url), read_limit(limit)
    if policy is None:
        node, order = query_of(text, task, status, given_as="QUERY"), order_of(order_by)
        found = [reader.read(lambda tx: explain_query(tx, buffer, node, order, at_most))]
    else:
        drawn, where = resolve_policy(policy).order, query_of(text, None, None, given_as="QUERY")
        if task is None:
            raise typer.BadParameter("a draw is of one task: give --task, too", param_hint="--policy")
        parse({"task_name": task})  # raises for names that no database can store
        of = status_of(status) or Status.COMPLETED
        found = reader.read(lambda tx: explain_draw(tx, choose(tx, buffer), task, of, where, drawn, at_most or 1))
        if not found:
            tasks = ", ".join(reader.read(lambda tx: tasks_of(tx, buffer))) or "none"
            raise InputError(f"there never was a group of task {task!r:.200} that was {of}; tasks: {tasks}")
    values = [_value(one) for one in found]
    rows = [{**one, "plan": "\n".join(one["plan"])} for one in values]
    if not output.printed(lambda: values if policy else values[0], lambda: rows):
        for plan in found:
            _print(plan)


def _value(one: QueryPlan) -> dict[str, Any]:
    return {
        "sql": one.sql,
        "parameters": one.parameters,
        "indexes": one.indexes,
        "sorts": one.sorts,
        "sentence": one.sentence,
        "plan": _lines(one),
    }


def _lines(one: QueryPlan) -> list[str]:
    return [f"{'  ' * step.depth}{step.text}" for step in one.plan]


def _print(one: QueryPlan) -> None:
    from rich.text import Text

    console().print(Text(escape(one.sentence[0].upper() + one.sentence[1:] + "."), style="bold"), soft_wrap=True)
    write(["\nSQL\n", *(f"  {escape(line.rstrip())}\n" for line in one.sql.splitlines())])
    if one.parameters:
        write(["\nparameters\n"])
        print_table([{"n": n, "value": value} for n, value in enumerate(one.parameters, 1)], _PARAMETERS)
    write(["\nplan\n", *(f"  {escape(line)}\n" for line in _lines(one)), "\n"])


_PARAMETERS = [Column("#", lambda r: str(r["n"])), Column("value", lambda r: repr(r["value"]), right=False, text=True)]


# SQL

_LONGEST = 600.0


@listing
def sql(
    url: Url,
    output: Output,
    statement: Annotated[str | None, argument("STATEMENT", "One SQL statement.")] = None,
    timeout: Annotated[
        float, option("--timeout", "Stop the statement after this.", metavar="SECONDS", min=0.001, max=_LONGEST)
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
    view: Annotated[str | None, argument("VIEW", "Only this one.")] = None,
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
        write(_lines_of(names))
        return
    rows = [
        {"view": name, "column": one.name, "type": one.type, "meaning": without_markup(one.meaning)}
        for name in names
        for one in VIEW_COLUMNS[name].columns
    ]
    output.rows(rows, [])


def _lines_of(names: list[str]) -> Iterator[str]:
    """Yield the lines of each view with its columns, wrapped to the width of the terminal."""
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
