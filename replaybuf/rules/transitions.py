"""State transitions of groups: the new place, the tallies, and the recorded history.

Each function is one event and returns the transition of one group. They are pure; SQL carries them out, with one
statement for all groups of a task that change alike (`storage.sql.statements.counts`). At the end: tallies by task as
figures for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from replaybuf.rules.limits import Level, Limits
from replaybuf.values.rollouts.statuses import ASIDE, UNFIT, Status


class Tally(StrEnum):
    """Names of counts; an event of a group counts under the status that the group had then."""

    SIZE = "size"  # groups there now, without leased ones
    LEASED = "leased"  # groups leased now
    BYTES = "bytes"  # of the payloads of both; only the sum over all statuses has a meaning
    PUT = "put"
    SAMPLED_NEW = "sampled_new"  # draws of groups that were never drawn before
    SAMPLED_AGAIN = "sampled_again"
    TAKEN = "taken"  # removed by a draw
    EVICTED = "evicted"
    EXPIRED = "expired"  # became EXPIRED in a refresh
    DROPPED = "dropped"  # expired and weren't retryable
    DELETED = "deleted"
    REPLACED = "replaced"  # by a put of the same key, or one that names it
    SET_ASIDE = "set_aside"  # became FAILED: undecodable, or leased too often
    REFUSED = "refused"  # puts without room; nothing was stored
    RETURNED = "returned"  # leases released
    LEASE_EXPIRED = "lease_expired"  # leases that expired
    PRUNED = "pruned"  # ARCHIVED, FILTERED or FAILED ones removed by retention


#: A task and a status.
LaneName = tuple[str, Status]
Tallies = Mapping[tuple[str, Status, Tally], int]


_DRAWS = (Tally.SAMPLED_NEW, Tally.SAMPLED_AGAIN)
_TAKING_ROOM = tuple(status for status in Status if status not in ASIDE)


def total(tallies: Tallies, task: str, name: Tally, statuses: Iterable[Status] = Status) -> int:
    """Return the sum of a tally over these statuses."""
    return sum(tallies.get((task, status, name), 0) for status in statuses)


def level_of(tallies: Tallies, task: str) -> Level:
    """Return the level of a task."""
    counted = (Tally.SIZE, Tally.PUT, Tally.SAMPLED_NEW, Tally.SAMPLED_AGAIN)
    size, inserted, new, again = (tallies.get((task, Status.COMPLETED, name), 0) for name in counted)
    return Level(total(tallies, task, Tally.SIZE, _TAKING_ROOM), size, inserted, new + again)


def expired_ever(tallies: Tallies, task: str) -> int:
    """Return the number of expired groups of a task: in a refresh, which may drop them, or before their put."""
    fresh = [status for status in Status if status != Status.EXPIRED]
    came_expired = total(tallies, task, Tally.PUT, [Status.EXPIRED])
    return total(tallies, task, Tally.EXPIRED) + total(tallies, task, Tally.DROPPED, fresh) + came_expired


def sizes_of(tallies: Tallies) -> dict[LaneName, int]:
    """Return the number of groups of each task and status that has any."""
    return {(task, status): n for (task, status, name), n in tallies.items() if name == Tally.SIZE and n}


class Place(NamedTuple):
    """The place of a group in a task: with the groups of its status (ARCHIVED is the archive), or leased from there."""

    status: Status
    leased: bool = False

    @property
    def tally(self) -> Tally:
        """The tally of the groups at this place."""
        return Tally.LEASED if self.leased else Tally.SIZE


class Group(Protocol):
    """The properties of a group that transitions depend on."""

    @property
    def status(self) -> Status: ...

    @property
    def times_sampled(self) -> int: ...

    @property
    def deliveries(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Transition:
    """A group's move from one place to another; None stands for before its put and after its removal.

    `draws` and `deliveries` are added to its `times_sampled` and `deliveries`; with `afresh` both the deliveries and
    the error are cleared. `error` says why it became FAILED. `counts` are the changes of its task's tallies; they are
    excluded from equality, so that transitions that change groups alike are equal.
    """

    before: Place | None
    after: Place | None
    draws: int = 0
    deliveries: int = 0
    afresh: bool = False
    error: str | None = None
    counts: Mapping[tuple[Status, Tally], int] = field(default_factory=dict, compare=False)

    @property
    def moves(self) -> bool:
        """Whether the group's place changes, or the group is removed."""
        return self.before != self.after

    @property
    def enters_races(self) -> bool:
        """Whether the group gets new sampling keys: its place has changed, or it was drawn and stays."""
        return self.after is not None and not self.after.leased and (self.moves or self.draws > 0)

    @property
    def pins_staleness(self) -> bool:
        """Whether the group gets a staleness override: it no longer follows the train step of its place."""
        return self.moves and self.before is not None and self.after is not None and not self.before.leased

    @property
    def undone(self) -> Transition:
        """The transition that undoes an undelivered draw or lease."""
        counts = {name: -n for name, n in self.counts.items()}
        return Transition(self.after, self.before, -self.draws, -self.deliveries, counts=counts)


# Puts


def put(status: Status) -> Transition:
    """Return the transition of a group that is put. Rollouts of a group that fills count with their group."""
    return _step(None, Place(status), {} if status == Status.FILLING else {Tally.PUT: 1})


def dropped(status: Status) -> Transition:
    """Return the transition of a put that stores nothing: the group expired, or is unfit and none is kept."""
    return _never_stored(status, Tally.PUT, Tally.PRUNED if status in UNFIT else Tally.DROPPED)


def refused(status: Status) -> Transition:
    """Return the transition of a put that was refused for lack of room."""
    return _never_stored(status, Tally.REFUSED)


# Draws and leases


def drawn(group: Group, limits: Limits) -> Transition:
    """Return the transition of a group that is drawn without a lease."""
    after, events = _place_after_draws(group.status, group.times_sampled + 1, limits)
    return _step(Place(group.status), after, {_tally_of_draw(group.times_sampled): 1, **events}, draws=1)


def leased(group: Group) -> Transition:
    """Return the transition of a group that is drawn under a lease."""
    status, sampled = group.status, {_tally_of_draw(group.times_sampled): 1}
    return _step(Place(status), Place(status, leased=True), sampled, draws=1, deliveries=1)


def acknowledged(group: Group, limits: Limits) -> Transition:
    """Return the transition of a leased group that was consumed."""
    after, events = _place_after_draws(group.status, group.times_sampled, limits)
    return _step(Place(group.status, leased=True), after, events, afresh=True)


def given_back(group: Group, limits: Limits, reason: str | None) -> Transition:
    """Return the transition of a released group; without a reason the delivery doesn't count."""
    return _back_as_undrawn(group, limits, Tally.RETURNED, reason)


def lapsed(group: Group, limits: Limits) -> Transition:
    """Return the transition of a group whose lease has expired."""
    return _back_as_undrawn(group, limits, Tally.LEASE_EXPIRED, "its consumer was silent for too long")


def unleased(group: Group) -> Transition:
    """Return the transition of a group whose lease is undone: it wasn't delivered, or its consumer is unknown."""
    status, sampled = group.status, {_tally_of_draw(group.times_sampled - 1): -1}
    return _step(Place(status, leased=True), Place(status), sampled, draws=-1, deliveries=-1)


# Changes and removals


def set_aside(status: Status, error: str) -> Transition:
    """Return the transition of a group that can't be decoded."""
    events = {Tally.SET_ASIDE: 1, Tally.PUT: 1} if status == Status.FILLING else {Tally.SET_ASIDE: 1}
    return _step(Place(status), Place(Status.FAILED), events, error=error)


def expired(status: Status) -> Transition:
    """Return the transition of a group that is too old, and stays to be regenerated."""
    return _step(Place(status), Place(Status.EXPIRED), {Tally.EXPIRED: 1})


def updated(status: Status, new: Status) -> Transition:
    """Return the transition of a group whose status an update sets."""
    return _step(Place(status), Place(new), {}, afresh=True)


def removed(place: Place, why: Tally) -> Transition:
    """Return the transition of a group that is removed other than by a draw: EVICTED, DROPPED, DELETED, REPLACED,
    PRUNED. Rollouts of a group that fills weren't counted as put, and aren't as removed."""
    return _step(place, None, {} if place.status == Status.FILLING else {why: 1})


def is_last(group: Group, limits: Limits) -> bool:
    """Return whether a leased group is set aside if this delivery fails, too."""
    return 0 < limits.max_deliveries <= group.deliveries


def _back_as_undrawn(group: Group, limits: Limits, event: Tally, reason: str | None) -> Transition:
    """Return the transition of a leased group that returns as if undrawn; after too many deliveries it is FAILED."""
    before, counts = Place(group.status, leased=True), {event: 1, _tally_of_draw(group.times_sampled - 1): -1}
    if reason is None or not is_last(group, limits):
        return _step(before, Place(group.status), counts, draws=-1, deliveries=-1 if reason is None else 0)
    error = f"delivered {group.deliveries} times without acknowledgement; the last time {reason}"
    return _step(before, Place(Status.FAILED), {**counts, Tally.SET_ASIDE: 1}, draws=-1, error=error)


def _place_after_draws(status: Status, times_sampled: int, limits: Limits) -> tuple[Place | None, dict[Tally, int]]:
    """Return the place of a group after this many draws (the same, the archive, or None), and tallies."""
    if limits.keeps(status, times_sampled) or status == Status.ARCHIVED:
        return Place(status), {}
    archived = status == Status.COMPLETED and limits.archives
    return Place(Status.ARCHIVED) if archived else None, {Tally.TAKEN: 1}


def _never_stored(status: Status, *events: Tally) -> Transition:
    return Transition(None, None, counts={(status, name): 1 for name in events})


def _tally_of_draw(times_before: int) -> Tally:
    """Return the tally for a draw of a group with this many earlier draws."""
    return Tally.SAMPLED_AGAIN if times_before else Tally.SAMPLED_NEW


def _step(
    before: Place | None,
    after: Place | None,
    events: dict[Tally, int],
    *,
    draws: int = 0,
    deliveries: int = 0,
    afresh: bool = False,
    error: str | None = None,
) -> Transition:
    """Return the transition, with tallies for the group's places and these events under the status that it had.

    Draws of archived groups count as those of completed ones.
    """
    home = before or after
    assert home is not None
    archived = home.status == Status.ARCHIVED
    counts = {(Status.COMPLETED if archived and name in _DRAWS else home.status, name): n for name, n in events.items()}
    if before != after:
        for place, n in ((before, -1), (after, 1)):
            if place is not None:
                counts[(place.status, place.tally)] = n
    return Transition(before, after, draws, deliveries, afresh, error, counts)


_LEVEL_TALLIES = (Tally.SIZE, Tally.LEASED, Tally.BYTES)
#: The totals of each task since the beginning, over all processes.
TOTALS = (*(str(name) for name in Tally if name not in _LEVEL_TALLIES), "taken_unfinished")
UNFINISHED = TOTALS[-1]
#: The totals that count completed groups only: those that were trained on.
OF_COMPLETED = ("sampled_new", "sampled_again", "taken")


def of_tasks(tallies: Tallies) -> dict[str, dict[str, Any]]:
    """Return the current numbers of groups, and the totals since the beginning, by task."""
    tasks: dict[str, dict[str, Any]] = {}
    for task in sorted({task for task, _, _ in tallies}):
        of_task = {(status, name): n for (owner, status, name), n in tallies.items() if owner == task}
        tasks[task] = {
            "buffered": {str(s): of_task.get((s, Tally.SIZE), 0) for s in Status if s != Status.ARCHIVED},
            "leased": sum(n for (_, tally), n in of_task.items() if tally == Tally.LEASED),
            "archived": of_task.get((Status.ARCHIVED, Tally.SIZE), 0),
            **{name: _total(name, of_task) for name in TOTALS},
        }
    return tasks


def _total(name: str, of_task: Mapping[tuple[Status, Tally], int]) -> int:
    """Return a total of a task. Draws of unfinished groups have a total of their own."""
    if name == UNFINISHED:
        return sum(n for (status, tally), n in of_task.items() if tally == Tally.TAKEN and status != Status.COMPLETED)
    if name in OF_COMPLETED:
        return of_task.get((Status.COMPLETED, Tally(name)), 0)
    return sum(n for (_, tally), n in of_task.items() if tally == name)
