"""`replaybuf rm`, `replaybuf requeue`: groups that are chosen by a query, shown, and deleted or brought back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from replaybuf import units
from replaybuf.cli.groups import columns, nothing_in, query_of
from replaybuf.cli.options import YES, OfStatus, OfTask, OneBuffer, Url, Where, ask, listing, on_storage, option
from replaybuf.cli.output import Output, print_table
from replaybuf.errors import InputError
from replaybuf.query import LogicNode, Node, ScalarNode, SetNode
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_queries import Removable, removable
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

T = TypeVar("T")

Uids = Annotated[list[int] | None, option("--uid", metavar="UID", help="Only this group. May be repeated.")]
Everything = Annotated[bool, option("--all", help="All groups, if no condition is given.")]


@dataclass(frozen=True, slots=True)
class MatchingGroups:
    """The groups of a buffer that match a query, found out before anything changes."""

    reader: Reader
    buffer: str
    query: Node
    found: Removable


def _query(
    where: str | None, task: str | None, status: str | None, uids: list[int] | None, everything: bool, does: str
) -> Node:
    """Return all the conditions together. Raises InputError when there is none and --all isn't given.

    `does` says what happens to all without any ("this deletes all").
    """
    query = query_of(where, task, status)
    if uids:
        query = LogicNode("$and", (query, SetNode("uid", "$in", tuple(uids))))
    if _is_everything(query) and not everything:
        raise InputError(f"without a condition (--where, --task, --status, --uid) {does}: give --all to do so")
    return query


def _is_everything(query: Node) -> bool:
    """Return whether a query has no condition."""
    return isinstance(query, LogicNode) and query.relation == "$and" and all(map(_is_everything, query.conditions))


def _choose(
    url: str, buffer: str | None, task: str | None, query: Node, output: Output, whatever: Node | None = None
) -> MatchingGroups:
    """Return the groups that are chosen; show people which they are, by task and status, and which are leased.

    `whatever` is the query without the statuses that the command can change.
    """
    reader = open_reader(url)
    name = reader.read(lambda tx: choose(tx, buffer))
    found = reader.read(lambda tx: removable(tx, name, query))
    if found.groups and output.for_people:
        total = [{"task_name": "total", "status": "", "groups": found.groups}] if len(found.rows) > 1 else []
        print_table([*found.rows, *total], columns("task_name", "status", "groups"), footer=bool(total))
    if found.leased:
        output.note(f"leased, and therefore left alone: {_groups(found.leased)}")
    elif not found.groups and output.for_people:
        others = None if whatever is None else reader.read(lambda tx: removable(tx, name, whatever))
        output.note(_others(others) if others and (others.groups or others.leased) else nothing_in(reader, name, task))
    return MatchingGroups(reader, name, query, found)


def _others(found: Removable) -> str:
    """Return which groups match, where none of them can be brought back."""
    numbers: dict[str, int] = {}
    for row in found.rows:
        numbers[row["status"]] = numbers.get(row["status"], 0) + row["groups"]
    said = [f"{_groups(count)} {status}" for status, count in sorted(numbers.items())]
    said += [f"{_groups(found.leased)} leased"] if found.leased else []
    return f"what matches can't be brought back: {', '.join(said)}; failed, filtered and expired groups can"


def _change(choice: MatchingGroups, verb: str, work: Callable[[SQLStorage, Node], Awaitable[T]], *, yes: bool) -> T:
    """Ask, do something with the groups that are chosen, and return what that returns. Raises InputError for a no.

    Groups that are put after the others were counted are left alone.
    """
    ask(f"{verb} {_groups(choice.found.groups)} of buffer {choice.buffer} in {choice.reader.where}?", yes=yes)
    until_now = LogicNode("$and", (choice.query, ScalarNode("uid", "$lte", choice.found.last)))
    return on_storage(choice.reader.url, choice.buffer, lambda storage: work(storage, until_now))


def _tell(choice: MatchingGroups, output: Output, done: Mapping[str, int], what: str, *, dry_run: bool) -> None:
    """Print the numbers for programs; tell people that nothing was done in a dry run."""
    found = choice.found
    if not output.for_people:
        counts = {"groups": found.groups, "leased": found.leased, **done}
        output.rows([{"url": choice.reader.where, "buffer": choice.buffer, **counts}], [])
    elif dry_run:
        output.note(f"nothing was {what} (--dry-run)")


def _groups(count: int) -> str:
    return units.number_of(count, "group")


@listing
def rm(
    url: Url,
    output: Output,
    where: Where = None,
    task: OfTask = None,
    status: OfStatus = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: OneBuffer = None,
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
    query = _query(where, task, status, uid, everything, "this deletes all")
    choice, deleted = _choose(url, buffer, task, query, output), 0
    if choice.found.groups and not dry_run:
        deleted = _change(choice, "Delete", lambda storage, chosen: storage.delete(chosen), yes=yes)
        output.note(f"{_groups(deleted)} deleted")
    _tell(choice, output, {"deleted": deleted}, "deleted", dry_run=dry_run)


_SET_ASIDE = ("failed", "filtered", "expired")


@listing
def requeue(
    url: Url,
    output: Output,
    where: Where = None,
    task: OfTask = None,
    status: Annotated[
        str | None, option("--status", metavar="STATUS", help="Only groups that are failed, filtered or expired.")
    ] = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: OneBuffer = None,
    dry_run: Annotated[bool, option("--dry-run", help="Only say what would come back.")] = False,
    yes: Annotated[bool, YES] = False,
) -> None:
    """Bring back groups that are failed, filtered or expired, after asking with their exact number.

    Groups whose rollouts all have their responses, such as filtered ones and those that were delivered too often, can
    be drawn again. The others become aborted, and producers generate them again: those that a worker put as failed, and
    expired ones, whose responses are gone. A group's error and failed deliveries are forgotten; what its rollouts say
    of errors stays with them until they are generated again. Each requeue is an event.

    All the conditions have to hold; without any, --all is needed. A run may go on meanwhile.

    \b
    Examples:
      replaybuf requeue run.db --status failed --dry-run
      replaybuf requeue run.db --status filtered --where '{"reward": {"$gte": 0.5}}'
      replaybuf requeue run.db --uid 17 --uid 23 --yes
    """
    if status is not None and status not in _SET_ASIDE:
        raise typer.BadParameter(f"{status!r:.100} is none of {', '.join(_SET_ASIDE)}.", param_hint="--status")
    query = _query(where, task, status, uid, everything, "all of them come back")
    chosen, query = query, LogicNode("$and", (query, SetNode("status", "$in", _SET_ASIDE)))
    choice, back = _choose(url, buffer, task, query, output, chosen), dict[str, int]()
    if choice.found.groups and not dry_run:
        moved = _change(choice, "Requeue", lambda storage, chosen: storage.requeue(chosen), yes=yes)
        back = {str(name): number for name, number in moved.items()}
        told = "; ".join(f"{_groups(number)} now {name}" for name, number in sorted(back.items()))
        output.note(told or "none is left")
    _tell(choice, output, {"completed": 0, "aborted": 0, **back}, "changed", dry_run=dry_run)
