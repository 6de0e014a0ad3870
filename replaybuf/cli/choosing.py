"""Groups that a command changes: which are chosen, shown before it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from replaybuf import units
from replaybuf.cli.groups import status_style
from replaybuf.cli.options import ask, buffer_option, option
from replaybuf.cli.output import Column, Output, print_table
from replaybuf.cli.queries import nothing_in, query_of
from replaybuf.errors import InputError
from replaybuf.query import LogicNode, Node, ScalarNode, SetNode
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.inspection.group_queries import Removable, removable
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.reader import Reader

T = TypeVar("T")

OneBuffer = Annotated[
    str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
]
Uids = Annotated[list[int] | None, option("--uid", metavar="UID", help="Only this group. May be repeated.")]
Everything = Annotated[bool, option("--all", help="All groups, if no condition is given.")]


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups of a buffer that match a query, found out before anything changes."""

    reader: Reader
    buffer: str
    task: str | None
    query: Node
    found: Removable

    @property
    def until_now(self) -> Node:
        """The query, without groups that are put after it was counted."""
        return LogicNode("$and", (self.query, ScalarNode("uid", "$lte", self.found.last)))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was given to choose groups by; `does` says what happens to all without any ("this deletes all")."""

    where: str | None
    task: str | None
    status: str | None
    uids: list[int] | None
    everything: bool
    does: str

    @property
    def query(self) -> Node:
        """All the conditions together. Raises InputError when there is none and --all isn't given."""
        query = query_of(self.where, self.task, self.status)
        if self.uids:
            query = LogicNode("$and", (query, SetNode("uid", "$in", tuple(self.uids))))
        if is_everything(query) and not self.everything:
            raise InputError(f"without a condition (--where, --task, --status, --uid) {self.does}: give --all to do so")
        return query


def choose_groups(reader: Reader, buffer: str | None, conditions: Conditions, statuses: Sequence[str] = ()) -> Choice:
    """Return the groups that are chosen, of these statuses if any are given."""
    query = conditions.query
    if statuses:
        query = LogicNode("$and", (query, SetNode("status", "$in", tuple(statuses))))
    name = reader.read(lambda tx: choose(tx, buffer))
    return Choice(reader, name, conditions.task, query, reader.read(lambda tx: removable(tx, name, query)))


def is_everything(query: Node) -> bool:
    """Return whether a query has no condition."""
    return isinstance(query, LogicNode) and query.relation == "$and" and all(map(is_everything, query.conditions))


def show_choice(choice: Choice, output: Output) -> None:
    """Show people which groups are chosen, by task and status, and which are leased."""
    found = choice.found
    if not output.for_people:
        return
    if not found.groups:
        output.note(nothing_in(choice.reader, choice.buffer, choice.task) if not found.leased else _leased(found))
        return
    total = {"task_name": "total", "status": "", "groups": found.groups}
    several = len(found.rows) > 1
    print_table([*found.rows, total] if several else found.rows, _COLUMNS, footer=several)
    if found.leased:
        output.note(_leased(found))


def change(choice: Choice, verb: str, work: Callable[[SQLStorage, Node], Awaitable[T]], *, yes: bool) -> T:
    """Ask, do something with the groups that are chosen, and return what that returns. Raises InputError for a no."""
    ask(f"{verb} {groups(choice.found.groups)} of buffer {choice.buffer} in {choice.reader.where}?", yes=yes)
    return asyncio.run(_change(choice, work))


async def _change(choice: Choice, work: Callable[[SQLStorage, Node], Awaitable[T]]) -> T:
    url = choice.reader.url.render_as_string(hide_password=False)
    storage = SQLStorage(url, AS_DICTS, name=choice.buffer)
    try:
        return await work(storage, choice.until_now)
    finally:
        await storage.close()


def groups(count: int) -> str:
    """Return a number of groups in words."""
    return units.number_of(count, "group")


def _leased(found: Removable) -> str:
    return f"leased, and therefore left alone: {groups(found.leased)}"


_COLUMNS = [
    Column("task", lambda r: r["task_name"], right=False, text=True),
    Column("status", lambda r: r["status"], right=False, style=status_style),
    Column("groups", lambda r: units.number(r["groups"])),
]
