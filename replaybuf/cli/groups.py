"""Groups: `ls` and `sql` read them, `rm` deletes those that a query matches; queries of options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any

import typer

from replaybuf.cli import commands
from replaybuf.cli.output import print_table
from replaybuf.common import units
from replaybuf.common.checks import nearest
from replaybuf.common.redact import redact
from replaybuf.errors import InputError
from replaybuf.rules.policies import Order, parse_order
from replaybuf.rules.query import LogicNode, Node, ScalarNode, SetNode, query_of, to_text
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.group_metadata import list_oldest, listed, unknown_task
from replaybuf.storage.sql.inspection.reader import Reader, Transaction, open_reader
from replaybuf.storage.sql.inspection.user_sql import VIEW_COLUMNS, run_statement, without_markup
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import GROUPS, Column, columns


def trainer_text(trainer: Mapping[str, Any], suffix: str = "") -> str:
    """Return a sentence about the published train state (the fields of `TrainState`)."""
    step = "has finished" if trainer["finished"] else f"is at step {trainer['train_step']}"
    return f"the trainer{suffix} {step}, its newest weights are of step {trainer['model_step']}"


#: Advice for keeping the texts of trained groups.
ARCHIVE = 'archive= in the config of the trainer says how many are kept (1000 of each task, or those of "7d")'


def gone_of(tx: Transaction, buffer: str | None, task: str | None) -> str | None:
    """Return a sentence, with advice, if all trained groups are gone with their texts; else None."""
    from replaybuf.storage.sql.inspection.measures import tallies_of

    tallies = [tally.items() for tally in tallies_of(tx, buffer).values()]
    counts = [(status, name, n) for items in tallies for (of_task, status, name), n in items if task in (None, of_task)]
    taken = sum(n for status, name, n in counts if (status, name) == (Status.COMPLETED, Tally.TAKEN))
    if not taken or any(n for status, name, n in counts if (status, name) == (Status.ARCHIVED, Tally.SIZE)):
        return None
    return f"the texts of all {taken:,} groups that were trained on are gone: {ARCHIVE}"


# Selected by options


def order_of(order_by: list[str] | None) -> Order:
    """Return the order of --order-by. Raises QueryError."""
    return parse_order([redact(term) for term in order_by or ()])


_TAG = re.compile(r'"tags\.([^"\\]+)":')
_MOST_TAGGED = 1000


def nothing_in(reader: Reader, buffer: str | None, task: str | None, query: Node | None = None) -> str:
    """Return a sentence for an empty result: about an unknown task, or a tag that groups have under a similar name."""

    def read(tx: Transaction) -> str:
        names = _TAG.findall("" if query is None else to_text(query))
        if (unknown := unknown_task(tx, buffer, task)) or not names:
            return unknown
        groups = list_oldest(tx, buffer, task, None, _MOST_TAGGED, count=False).rows
        tags = {tag for group in groups for tag in group["tags"] or ()}
        for name in names:
            if name not in tags and (similar := nearest(name, tags)):
                return f"did you mean tags.{similar}, for tags.{name}?"
        return ""

    unknown = reader.read(read)
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
    reader, at_most = open_reader(url), commands.read_limit(limit)
    query, order, count = query_of(where, task, status), order_of(order_by), output.for_people
    if where or order_by or status not in (None, *Status):
        from replaybuf.storage.sql.inspection.group_queries import list_groups  # imports SQLAlchemy

        listing = reader.read(lambda tx: list_groups(tx, buffer, query, order, at_most, count=count))
    else:
        listing = reader.read(lambda tx: list_oldest(tx, buffer, task, status, at_most, count=count))
    rows = listing.rows
    if not rows and at_most != 0 and output.for_people:
        output.note(nothing_in(reader, buffer, task, query) if where or task or status else "the buffer is empty")
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
      replaybuf sql run.db "SELECT * FROM rollouts" --format csv > all.csv
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
    names, records = run_statement(open_reader(url), statement, timeout)
    if not names:
        output.note("the statement gave no rows")
        return
    rows = [dict(zip(names, row, strict=True)) for row in records]
    output.rows(rows, [_column(name, rows) for name in names])
    if not records:
        output.note(f"no rows (columns: {', '.join(names)})")


def _column(name: str, rows: Sequence[dict[str, Any]]) -> Column:
    number = all(isinstance(row[name], int | float | Decimal | None) for row in rows)
    return Column(name, name, "number" if number else "cell")


def _view_columns() -> list[dict[str, str]]:
    """Return the columns of the views for SQL, with their meaning."""
    return [
        {"view": name, "column": column.name, "type": column.type, "meaning": without_markup(column.meaning)}
        for name, view in VIEW_COLUMNS.items()
        for column in view.columns
    ]


# Deleting

Uids = Annotated[list[int] | None, commands.option("--uid", "Only this group. May be repeated.", metavar="UID")]
Everything = Annotated[bool, commands.option("--all", "All groups, if no condition is given.")]


def _is_everything(query: Node) -> bool:
    """Return whether a query has no condition."""
    return isinstance(query, LogicNode) and query.relation == "$and" and all(map(_is_everything, query.conditions))


def rm(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    where: commands.Where = None,
    task: commands.OfTask = None,
    status: commands.OfStatus = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: commands.OneBuffer = None,
    dry_run: Annotated[bool, commands.option("--dry-run", "Only say what would be deleted.")] = False,
    yes: Annotated[bool, commands.YES] = False,
) -> None:
    """Delete groups, as buffer.delete() does, after asking with their exact number.

    All the conditions have to hold; without any, --all is needed. Groups that are leased stay, and so do those that are
    put after the count. A run may go on meanwhile. What is deleted is gone, unless a checkpoint has it.

    \b
    Examples:
      replaybuf rm run.db --status expired --dry-run
      replaybuf rm run.db --task math --where '{"reward": 0}'
      replaybuf rm run.db --uid 17 --uid 23 --yes
    """

    from replaybuf.storage.sql.inspection.group_queries import removable  # imports SQLAlchemy

    query = query_of(where, task, status)
    if uid:
        query = LogicNode("$and", (query, SetNode("uid", "$in", tuple(uid))))
    if _is_everything(query) and not everything:
        raise InputError("without a condition (--where, --task, --status, --uid) this deletes all: give --all to do so")
    reader, name = commands.open_buffer(url, buffer)
    selection = reader.read(lambda tx: removable(tx, name, query))
    if selection.groups and output.for_people:
        total = [{"task_name": "total", "status": "", "groups": selection.groups}] if len(selection.rows) > 1 else []
        print_table([*selection.rows, *total], columns("task_name", "status", "groups"), footer=bool(total))
    if selection.leased:
        output.note(f"leased, and therefore left alone: {units.groups(selection.leased)}")
    elif not selection.groups and output.for_people:
        output.note(nothing_in(reader, name, task, query))
    deleted, sentence = 0, "nothing was changed (--dry-run)" if dry_run else ""
    if selection.groups and not dry_run:
        commands.ask(f"Delete {units.groups(selection.groups)} of buffer {name} in {reader.where}?", yes=yes)
        until_now = LogicNode("$and", (query, ScalarNode("uid", "$lte", selection.last)))
        deleted = commands.on_storage(reader.url, name, lambda storage: storage.delete(until_now))
        sentence = f"{units.groups(deleted)} deleted" if deleted else "none is left"
    if not output.for_people:
        row = {"url": reader.where, "buffer": name, "groups": selection.groups, "leased": selection.leased}
        output.rows([row | {"deleted": deleted}], [])
    elif sentence:
        output.note(sentence)
