"""Groups: `ls` and `sql` read them, `rm` and `requeue` change those that a query matches; queries of options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli import commands
from replaybuf.cli.output import Output, print_table
from replaybuf.common import units
from replaybuf.common.redact import redact
from replaybuf.errors import InputError
from replaybuf.rules.policies import Order, parse_order
from replaybuf.rules.query import LogicNode, Node, NotNode, ScalarNode, SetNode, query_of
from replaybuf.storage.sql.inspection.group_metadata import listed, unknown_task
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.user_sql import VIEW_COLUMNS, run_statement
from replaybuf.view.columns import GROUPS, Column, columns

if TYPE_CHECKING:
    from replaybuf.storage.sql.backend import SQLStorage


def trainer_text(trainer: Mapping[str, Any], suffix: str = "") -> str:
    """Return a sentence about the published train state (the fields of `TrainState`)."""
    step = "has finished" if trainer["finished"] else f"is at step {trainer['train_step']}"
    return f"the trainer{suffix} {step}, its newest weights are of step {trainer['model_step']}"


#: Advice for keeping the texts of trained groups.
ARCHIVE = 'archive= in the config of the trainer says how many are kept (1000 of each task, or those of "7d")'


# Selected by options


def order_of(order_by: list[str] | None) -> Order:
    """Return the order of --order-by. Raises QueryError."""
    return parse_order([redact(term) for term in order_by or ()])


def nothing_in(reader: Reader, buffer: str | None, task: str | None) -> str:
    """Return a sentence for an empty result, perhaps about an unknown task."""
    unknown = reader.read(lambda tx: unknown_task(tx, buffer, task))
    return f"no such groups: {unknown}" if unknown else "no such groups"


# Groups, listed


def ls(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    where: commands.Where = None,
    buffer: commands.Buffer = None,
    task: commands.OfTask = None,
    status: commands.OfStatus = None,
    order_by: commands.OrderBy = None,
    limit: commands.Limit = "20",
) -> None:
    """List groups without reading their payloads.

    Fields of queries and orders are uid (or timestamp_id), task_name, status, staleness, priority, times_sampled,
    created_at (seconds since the epoch), reward (the mean of the group), worker, trained_step and, in queries,
    tags.NAME. Without an order the oldest come first. Leased and archived groups are listed, too: "leased" says when
    the lease ends.

    \b
    Examples:
      replaybuf ls run.db --task math --order-by -reward --limit 5
      replaybuf ls run.db --where '{"staleness": {"$gte": 3}, "tags.level": 4}'
      replaybuf ls run.db --status failed --format json | jq '.[].error'
    """
    from replaybuf.storage.sql.inspection.group_queries import list_groups  # imports SQLAlchemy

    reader, at_most = open_reader(url), commands.read_limit(limit)
    query, order, count = query_of(where, task, status), order_of(order_by), output.for_people
    listing = reader.read(lambda tx: list_groups(tx, buffer, query, order, at_most, count=count))
    rows = listing.rows
    if not rows and at_most != 0 and output.for_people:
        output.note(nothing_in(reader, buffer, task) if where or task or status else "the buffer is empty")
        return
    output.rows(
        listed(rows) if output.for_people else rows,
        [column for column in GROUPS if listing.several or column.name != "buffer"],
        listing.now,
    )
    if listing.matching > len(rows):
        output.note(f"{len(rows):,} of {listing.matching:,} groups; --limit all shows all")


# SQL

_LONGEST = 600.0
_VIEWS = [Column("view", "view", "word"), *(Column(name, name, "text") for name in ("column", "type", "meaning"))]


def sql(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    statement: Annotated[str | None, commands.argument("STATEMENT", "One SQL statement; without it the views.")] = None,
    timeout: Annotated[
        float,
        commands.option("--timeout", "Stop the statement after this.", metavar="SECONDS", min=0.001, max=_LONGEST),
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
      replaybuf sql run.db "SELECT task_name, count(*) FROM groups GROUP BY 1"
      replaybuf sql run.db "SELECT tags ->> 'level', reward FROM groups"
      replaybuf sql run.db "SELECT step, worker, reward FROM batch_groups"
      replaybuf sql run.db "SELECT worker, wants, reason FROM waiters"
    """
    if statement is None:
        open_reader(url).read(lambda tx: None)
        output.rows(_view_columns(), _VIEWS)
        return
    if not statement.strip():
        raise typer.BadParameter("the statement is empty", param_hint="STATEMENT")
    names, rows = run_statement(open_reader(url), statement, timeout)
    if not names:
        output.note("the statement gave no rows")
        return
    output.rows(rows, [_column(name, rows) for name in names])
    if not rows:
        output.note(f"no rows (columns: {', '.join(names)})")


def _column(name: str, rows: Sequence[dict[str, Any]]) -> Column:
    number = all(isinstance(row[name], int | float | Decimal | None) for row in rows)
    return Column(name, name, "number" if number else "cell")


def _view_columns() -> list[dict[str, str]]:
    """Return the columns of the views for SQL, with their meaning."""
    return [
        {"view": name, "column": column.name, "type": column.type, "meaning": column.meaning}
        for name, view in VIEW_COLUMNS.items()
        for column in view.columns
    ]


# Deleting, and bringing back


def _change(
    url: str,
    output: Output,
    buffer: str | None,
    task: str | None,
    query: Node,
    verb: str,
    work: Callable[[SQLStorage, Node], Awaitable[dict[str, int]]],
    results: Mapping[str, str],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Show the selected groups, ask for confirmation, run `work` on them, and print its counts, which `results` names.

    Groups that are put after the count are left alone. Raises InputError without confirmation.
    """
    from replaybuf.storage.sql.inspection.group_queries import removable  # imports SQLAlchemy

    reader, name = commands.open_buffer(url, buffer)
    selection = reader.read(lambda tx: removable(tx, name, query))
    if selection.groups and output.for_people:
        total = [{"task_name": "total", "status": "", "groups": selection.groups}] if len(selection.rows) > 1 else []
        print_table([*selection.rows, *total], columns("task_name", "status", "groups"), footer=bool(total))
    if selection.leased:
        output.note(f"leased, and therefore left alone: {units.groups(selection.leased)}")
    elif not selection.groups and output.for_people:
        output.note(nothing_in(reader, name, task))
    counts, sentence = dict.fromkeys(results, 0), "nothing was changed (--dry-run)" if dry_run else ""
    if selection.groups and not dry_run:
        commands.ask(f"{verb} {units.groups(selection.groups)} of buffer {name} in {reader.where}?", yes=yes)
        until_now = LogicNode("$and", (query, ScalarNode("uid", "$lte", selection.last)))
        counts |= commands.on_storage(reader.url, name, lambda storage: work(storage, until_now))
        changes = [f"{units.groups(count)} {results[result]}" for result, count in counts.items() if count]
        sentence = "; ".join(changes) or "none is left"
    if not output.for_people:
        row = {"url": reader.where, "buffer": name, "groups": selection.groups, "leased": selection.leased}
        output.rows([row | counts], [])
    elif sentence:
        output.note(sentence)


def rm(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    where: commands.Where = None,
    task: commands.OfTask = None,
    status: commands.OfStatus = None,
    buffer: commands.OneBuffer = None,
    dry_run: Annotated[bool, commands.option("--dry-run", "Only say what would be deleted.")] = False,
    yes: Annotated[bool, commands.YES] = False,
) -> None:
    """Delete groups, as buffer.delete() does, after asking with their exact number.

    All the conditions have to hold, and one has to be there. Groups that are leased stay, and so do those that are
    put after the count. A run may go on meanwhile. What is deleted is gone, unless a checkpoint has it.

    \b
    Examples:
      replaybuf rm run.db --status expired --dry-run
      replaybuf rm run.db --task math --where '{"reward": 0}'
      replaybuf rm run.db --where '{"uid": {"$in": [17, 23]}}' --yes
    """
    query = query_of(where, task, status)
    if not _has_condition(query) and (where or "").strip() != "{}":
        raise InputError("rm needs a condition (--where, --task, --status); to delete all groups, give --where '{}'")

    async def work(storage: SQLStorage, selected: Node) -> dict[str, int]:
        return {"deleted": await storage.delete(selected)}

    _change(url, output, buffer, task, query, "Delete", work, {"deleted": "deleted"}, dry_run=dry_run, yes=yes)


def _has_condition(query: Node) -> bool:
    """Return whether a query is about any field."""
    match query:
        case LogicNode(_, conditions):
            return any(map(_has_condition, conditions))
        case NotNode(condition):
            return _has_condition(condition)
    return True


_SET_ASIDE = ("failed", "filtered", "expired")


def requeue(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    where: commands.Where = None,
    task: commands.OfTask = None,
    status: commands.OfStatus = None,
    buffer: commands.OneBuffer = None,
    dry_run: Annotated[bool, commands.option("--dry-run", "Only say what would come back.")] = False,
    yes: Annotated[bool, commands.YES] = False,
) -> None:
    """Bring back groups that are failed, filtered or expired, after asking with their exact number.

    Groups whose rollouts all have their responses, such as filtered ones and those that were delivered too often, can
    be drawn again. The others become aborted, and producers generate them again: those that a worker put as failed, and
    expired ones, whose responses are gone. A group's error and failed deliveries are forgotten; what its rollouts say
    of errors stays with them until they are generated again. Each requeue is an event.

    All the conditions have to hold. A run may go on meanwhile.

    \b
    Examples:
      replaybuf requeue run.db --status failed --dry-run
      replaybuf requeue run.db --status filtered --where '{"worker": "gpu-7"}'
      replaybuf requeue run.db --where '{"uid": 17}' --yes
    """
    query = LogicNode("$and", (query_of(where, task, status), SetNode("status", "$in", _SET_ASIDE)))

    async def work(storage: SQLStorage, selected: Node) -> dict[str, int]:
        return {str(status): count for status, count in (await storage.requeue(selected)).items()}

    results = {"completed": "now completed", "aborted": "now aborted"}
    _change(url, output, buffer, task, query, "Requeue", work, results, dry_run=dry_run, yes=yes)
