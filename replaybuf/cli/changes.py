"""`replaybuf rm`, `replaybuf requeue`: delete or bring back the groups that match a query, after confirmation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer

from replaybuf import units
from replaybuf.cli.app import TEXT, YES, OfStatus, OfTask, OneBuffer, Out, Url, Where, ask, on_storage, option
from replaybuf.cli.groups import nothing_in, query_of
from replaybuf.cli.output import Output, print_table
from replaybuf.errors import InputError
from replaybuf.query import LogicNode, Node, ScalarNode, SetNode
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_queries import Removable, removable
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.view.columns import columns

T = TypeVar("T")
Uids = Annotated[list[int] | None, option("--uid", "Only this group. May be repeated.", metavar="UID")]
Everything = Annotated[bool, option("--all", "All groups, if no condition is given.")]


def _query(
    where: str | None, task: str | None, status: str | None, uids: list[int] | None, everything: bool, does: str
) -> Node:
    """Return the conjunction of all conditions. Raises InputError when there is none and --all isn't given.

    `does` is the part of its message about the effect on all groups ("this deletes all").
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


def _others(found: Removable) -> str:
    """Return a sentence about matching groups, none of which can be brought back."""
    numbers: dict[str, int] = {}
    for row in found.rows:
        numbers[row["status"]] = numbers.get(row["status"], 0) + row["groups"]
    said = [f"{_groups(count)} {status}" for status, count in sorted(numbers.items())]
    said += [f"{_groups(found.leased)} leased"] if found.leased else []
    return f"what matches can't be brought back: {', '.join(said)}; failed, filtered and expired groups can"


def _change(
    url: str,
    output: Output,
    buffer: str | None,
    task: str | None,
    query: Node,
    verb: str,
    work: Callable[[SQLStorage, Node], Awaitable[T]],
    *,
    dry_run: bool,
    yes: bool,
    whatever: Node | None = None,
) -> tuple[dict[str, Any], T | None]:
    """Show the selected groups, ask for confirmation, and run `work` on them. Raises InputError without it.

    Returns a row for machine-readable output, and the result of `work`; None when no group matched, or in a dry run.
    Groups that are put after the count are left alone. `whatever` is the query without the statuses that the command
    can change.
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
    row = {"url": reader.where, "buffer": name, "groups": found.groups, "leased": found.leased}
    if not found.groups or dry_run:
        return row, None
    ask(f"{verb} {_groups(found.groups)} of buffer {name} in {reader.where}?", yes=yes)
    until_now = LogicNode("$and", (query, ScalarNode("uid", "$lte", found.last)))
    return row, on_storage(reader.url, name, lambda storage: work(storage, until_now))


def _tell(output: Output, row: dict[str, Any], done: str) -> None:
    """Print the numbers in a machine-readable format, or a sentence about the result."""
    if not output.for_people:
        output.rows([row], [])
    elif done:
        output.note(done)


def _groups(count: int) -> str:
    return units.number_of(count, "group")


def rm(
    url: Url,
    output: Out = TEXT,
    where: Where = None,
    task: OfTask = None,
    status: OfStatus = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: OneBuffer = None,
    dry_run: Annotated[bool, option("--dry-run", "Only say what would be deleted.")] = False,
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
    row, deleted = _change(
        url, output, buffer, task, query, "Delete", lambda storage, of: storage.delete(of), dry_run=dry_run, yes=yes
    )
    nothing = "nothing was deleted (--dry-run)" if dry_run else ""
    _tell(output, row | {"deleted": deleted or 0}, nothing if deleted is None else f"{_groups(deleted)} deleted")


_SET_ASIDE = ("failed", "filtered", "expired")


def requeue(
    url: Url,
    output: Out = TEXT,
    where: Where = None,
    task: OfTask = None,
    status: Annotated[
        str | None, option("--status", "Only groups that are failed, filtered or expired.", metavar="STATUS")
    ] = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: OneBuffer = None,
    dry_run: Annotated[bool, option("--dry-run", "Only say what would come back.")] = False,
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
    set_aside = LogicNode("$and", (query, SetNode("status", "$in", _SET_ASIDE)))
    row, moved = _change(
        *(url, output, buffer, task, set_aside, "Requeue", lambda storage, of: storage.requeue(of)),
        dry_run=dry_run,
        yes=yes,
        whatever=query,
    )
    back = {str(name): number for name, number in (moved or {}).items()}
    told = "; ".join(f"{_groups(number)} now {name}" for name, number in sorted(back.items())) or "none is left"
    nothing = "nothing was changed (--dry-run)" if dry_run else ""
    _tell(output, row | {"completed": 0, "aborted": 0, **back}, nothing if moved is None else told)
