"""`replaybuf explain`: a query as SQL."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from replaybuf.cli.options import Buffer, OfStatus, OfTask, OrderBy, Url, listing, option, status_of, url_and
from replaybuf.cli.output import Column, Output, console, print_table, write
from replaybuf.cli.queries import query_of
from replaybuf.errors import InputError
from replaybuf.query import parse
from replaybuf.redact import escape, redact
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.policies import parse_order, resolve_policy
from replaybuf.storage.sql.inspection.group_queries import QueryPlan, explain_draw, explain_query
from replaybuf.storage.sql.inspection.groups import choose, tasks_of
from replaybuf.storage.sql.inspection.reader import open_reader

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
    url, text = url_and(url, query, "QUERY")
    if policy is not None and order_by:
        raise typer.BadParameter("a draw has the order of its policy", param_hint="--order-by")
    reader, limit = open_reader(url), min(limit, _MOST)
    if policy is None:
        node, order = (
            query_of(text, task, status, given_as="QUERY"),
            parse_order([redact(term) for term in order_by or ()]),
        )
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

    out = console()
    out.print(Text(escape(one.sentence[0].upper() + one.sentence[1:] + "."), style="bold"), soft_wrap=True)
    write(["\nSQL\n"])
    for line in one.sql.splitlines():
        out.print(Text(f"  {escape(line.rstrip())}"), soft_wrap=True)
    if one.parameters:
        write(["\nparameters\n"])
        print_table([{"n": n, "value": value} for n, value in enumerate(one.parameters, 1)], _PARAMETERS)
    write(["\nplan\n"])
    for line in _lines(one):
        out.print(Text(f"  {escape(line)}"), soft_wrap=True)
    write(["\n"])


_PARAMETERS = [Column("#", lambda r: str(r["n"])), Column("value", lambda r: repr(r["value"]), right=False, text=True)]
