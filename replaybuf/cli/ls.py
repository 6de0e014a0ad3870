"""`replaybuf ls`, `replaybuf explain`: the metadata of groups that a query chooses; the query as SQL."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf import units
from replaybuf.cli.groups import age_of, columns, nothing_in, order_of, query_of
from replaybuf.cli.options import (
    Buffer,
    Limit,
    OfStatus,
    OfTask,
    OrderBy,
    Url,
    Where,
    listing,
    option,
    status_of,
    url_and,
)
from replaybuf.cli.output import Column, Output, console, print_table, write
from replaybuf.errors import InputError
from replaybuf.query import parse
from replaybuf.redact import escape
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.policies import resolve_policy
from replaybuf.storage.sql.inspection.groups import archived_at, choose, lease_text, list_oldest, tags_text, tasks_of
from replaybuf.storage.sql.inspection.reader import open_reader

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
    limit: Limit = 20,
) -> None:
    """List groups without reading their payloads.

    Fields of queries and orders are uid, task_name, status, staleness, priority, times_sampled, created_at (seconds
    since the epoch), reward (the mean of the group) and, in queries, tags.NAME. Without an order the oldest come first.
    Leased and archived groups are listed, too: "leased" says when the lease ends.

    \b
    Examples:
      replaybuf ls run.db --task math --order-by -reward --limit 5
      replaybuf ls run.db --where '{"staleness": {"$gte": 3}, "tags.level": {"$in": [4, 5]}}'
      replaybuf ls run.db --status failed --json --limit 0 | jq '.[].error'
    """
    query, order = query_of(where, task, status), order_of(order_by)
    reader = open_reader(url)
    at_most, count = limit or None, output.for_people
    if where or order_by or status not in (None, *Status):
        from replaybuf.storage.sql.inspection.group_queries import list_groups  # imports SQLAlchemy

        found = reader.read(lambda tx: list_groups(tx, buffer, query, order, at_most, count=count))
    else:
        found = reader.read(lambda tx: list_oldest(tx, buffer, task, status, at_most, count=count))
    rows = found.rows
    if not rows and output.for_people:
        output.note(nothing_in(reader, buffer, task) if where or task or status else "the buffer is empty")
        return
    output.rows(rows, _columns(rows, found.now, found.several))
    if found.matching > len(rows):
        output.note(f"{len(rows):,} of {found.matching:,} groups; --limit 0 shows all")


#: Columns that many buffers don't use, which are shown only if they have other values than these.
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


_MOST = 2**62


@listing
def explain(
    url: Url,
    output: Output,
    query: Annotated[
        str | None,
        typer.Argument(metavar="QUERY", help='A query: {"reward": {"$gte": 0.9}}; {} for all.', show_default=False),
    ] = None,
    buffer: Buffer = None,
    task: OfTask = None,
    status: OfStatus = None,
    order_by: OrderBy = None,
    limit: Annotated[int, option("--limit", metavar="N", min=0, help="Of so many groups; 0 for all.")] = 20,
    policy: Annotated[
        str | None,
        option(
            "--policy", metavar="NAME", help="Explain a draw by this policy, of groups of --task: fifo, staleness, ..."
        ),
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
    reader, limit = open_reader(url), min(limit, _MOST)
    if policy is None:
        node, order = query_of(text, task, status, given_as="QUERY"), order_of(order_by)
        found = [reader.read(lambda tx: explain_query(tx, buffer, node, order, limit or None))]
    else:
        drawn, where = resolve_policy(policy).order, query_of(text, None, None, given_as="QUERY")
        of_task, of_status = _task(task), status_of(status) or Status.COMPLETED
        found = reader.read(
            lambda tx: explain_draw(tx, choose(tx, buffer), of_task, of_status, where, drawn, limit or 1)
        )
        if not found:
            tasks = ", ".join(reader.read(lambda tx: tasks_of(tx, buffer))) or "none"
            raise InputError(f"there never was a group of task {of_task!r:.200} that was {of_status}; tasks: {tasks}")
    values = [_value(one) for one in found]
    rows = [{**one, "plan": "\n".join(one["plan"])} for one in values]
    if not output.printed(lambda: values if policy else values[0], lambda: rows):
        for plan in found:
            _print(plan)


def _task(task: str | None) -> str:
    if task is None:
        raise typer.BadParameter("a draw is of one task: give --task, too", param_hint="--policy")
    parse({"task_name": task})  # raises for what no database can hold
    return task


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
