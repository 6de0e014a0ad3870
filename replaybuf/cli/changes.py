"""`replaybuf rm`, `replaybuf requeue`: groups that are chosen by a query, shown, and deleted or brought back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from replaybuf import units
from replaybuf.cli.groups import columns
from replaybuf.cli.options import YES, OfStatus, OfTask, OneBuffer, Url, Where, ask, listing, on_storage, option
from replaybuf.cli.output import Output, print_table
from replaybuf.cli.queries import nothing_in, query_of
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
    print_table(
        [*found.rows, total] if several else found.rows, columns("task_name", "status", "groups"), footer=several
    )
    if found.leased:
        output.note(_leased(found))


def change(choice: Choice, verb: str, work: Callable[[SQLStorage, Node], Awaitable[T]], *, yes: bool) -> T:
    """Ask, do something with the groups that are chosen, and return what that returns. Raises InputError for a no."""
    ask(f"{verb} {groups(choice.found.groups)} of buffer {choice.buffer} in {choice.reader.where}?", yes=yes)
    return on_storage(choice.reader.url, choice.buffer, lambda storage: work(storage, choice.until_now))


def groups(count: int) -> str:
    """Return a number of groups in words."""
    return units.number_of(count, "group")


def _leased(found: Removable) -> str:
    return f"leased, and therefore left alone: {groups(found.leased)}"


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
    conditions = Conditions(where, task, status, uid, everything, "this deletes all")
    choice = choose_groups(open_reader(url), buffer, conditions)
    show_choice(choice, output)
    found, deleted = choice.found, 0
    if found.groups and not dry_run:
        deleted = change(choice, "Delete", lambda storage, query: storage.delete(query), yes=yes)
        output.note(f"{groups(deleted)} deleted")
    if not output.for_people:
        counts = {"groups": found.groups, "leased": found.leased, "deleted": deleted}
        output.rows([{"url": choice.reader.where, "buffer": choice.buffer, **counts}], [])
    elif dry_run:
        output.note("nothing was deleted (--dry-run)")


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

    Groups whose rollouts are all completed, such as filtered ones and those that were delivered too often, can be drawn
    again. The others become aborted, and producers generate them again: those that a worker put as failed, and expired
    ones, whose responses are gone. Errors and failed deliveries are forgotten. Each requeue is an event.

    All the conditions have to hold; without any, --all is needed. A run may go on meanwhile.

    \b
    Examples:
      replaybuf requeue run.db --status failed --dry-run
      replaybuf requeue run.db --status filtered --where '{"reward": {"$gte": 0.5}}'
      replaybuf requeue run.db --uid 17 --uid 23 --yes
    """
    if status is not None and status not in _SET_ASIDE:
        raise typer.BadParameter(f"{status!r:.100} is none of {', '.join(_SET_ASIDE)}.", param_hint="--status")
    conditions = Conditions(where, task, status, uid, everything, "all of them come back")
    choice = choose_groups(open_reader(url), buffer, conditions, _SET_ASIDE)
    show_choice(choice, output)
    found, back = choice.found, dict[str, int]()
    if found.groups and not dry_run:
        moved = change(choice, "Requeue", lambda storage, query: storage.requeue(query), yes=yes)
        back = {str(name): number for name, number in moved.items()}
        output.note(
            "; ".join(f"{groups(number)} now {name}" for name, number in sorted(back.items())) or "none is left"
        )
    if not output.for_people:
        counts = {"groups": found.groups, "leased": found.leased, "completed": 0, "aborted": 0, **back}
        output.rows([{"url": choice.reader.where, "buffer": choice.buffer, **counts}], [])
    elif dry_run:
        output.note("nothing was changed (--dry-run)")
