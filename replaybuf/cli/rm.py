"""`replaybuf rm`: deleting groups."""

from __future__ import annotations

import asyncio
from typing import Annotated

from replaybuf import units
from replaybuf.cli.groups import status_style
from replaybuf.cli.options import YES, OfStatus, OfTask, Url, Where, ask, buffer_option, listing, option
from replaybuf.cli.output import Column, Output, print_table
from replaybuf.cli.queries import nothing_in, query_of
from replaybuf.errors import InputError
from replaybuf.query import LogicNode, Node, ScalarNode, SetNode
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_queries import AS_DICTS, Removable, removable
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.reader import Reader, open_reader


@listing
def rm(
    url: Url,
    output: Output,
    where: Where = None,
    task: OfTask = None,
    status: OfStatus = None,
    uid: Annotated[list[int] | None, option("--uid", metavar="UID", help="Only this group. May be repeated.")] = None,
    everything: Annotated[bool, option("--all", help="All groups, if no condition is given.")] = False,
    buffer: Annotated[
        str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, YES] = False,
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
    query = _conditions(query_of(where, task, status), uid)
    if is_everything(query) and not everything:
        raise InputError("without a condition (--where, --task, --status, --uid) this deletes all: give --all to do so")
    reader = open_reader(url)
    name = reader.read(lambda tx: choose(tx, buffer))
    found = reader.read(lambda tx: removable(tx, name, query))
    if not found.groups:
        if output.for_people:
            output.note(nothing_in(reader, name, task) if not found.leased else _leased(found))
    elif output.for_people:
        total = {"task_name": "total", "status": "", "groups": found.groups}
        print_table([*found.rows, total] if len(found.rows) > 1 else found.rows, _COLUMNS, footer=len(found.rows) > 1)
        if found.leased:
            output.note(_leased(found))
    deleted = 0
    if found.groups and not dry_run:
        ask(f"Delete {_groups(found.groups)} of buffer {name} in {reader.where}?", yes=yes)
        deleted = asyncio.run(_delete(reader, name, LogicNode("$and", (query, ScalarNode("uid", "$lte", found.last)))))
        output.note(f"{_groups(deleted)} deleted")
    if not output.for_people:
        row = {"url": reader.where, "buffer": name, "groups": found.groups, "leased": found.leased, "deleted": deleted}
        output.rows([row], [])
    elif dry_run:
        output.note("nothing was deleted (--dry-run)")


def _conditions(query: Node, uids: list[int] | None) -> Node:
    return LogicNode("$and", (query, SetNode("uid", "$in", tuple(uids)))) if uids else query


def is_everything(query: Node) -> bool:
    """Return whether a query has no condition."""
    return isinstance(query, LogicNode) and query.relation == "$and" and all(map(is_everything, query.conditions))


def _leased(found: Removable) -> str:
    return f"leased, and therefore left alone: {_groups(found.leased)}"


def _groups(count: int) -> str:
    return units.number_of(count, "group")


async def _delete(reader: Reader, name: str, query: Node) -> int:
    storage = SQLStorage(reader.url.render_as_string(hide_password=False), AS_DICTS, name=name)
    try:
        return await storage.delete(query)
    finally:
        await storage.close()


_COLUMNS = [
    Column("task", lambda r: r["task_name"], right=False, text=True),
    Column("status", lambda r: r["status"], right=False, style=status_style),
    Column("groups", lambda r: units.number(r["groups"])),
]
