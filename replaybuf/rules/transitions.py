"""What can happen to a group: where it goes, what is counted, what it remembers.

Each function is one event and says what becomes of one group. They are pure, so that all backends do the same: memory
group by group, SQL with one statement for all groups of a task that change alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Limits
from replaybuf.rules.tallies import Tally


class Place(NamedTuple):
    """Where a group of a task is: among those of its status, of which ARCHIVED is the archive, or leased from there."""

    status: Status
    leased: bool = False

    @property
    def tally(self) -> Tally:
        """What counts the groups that are here now."""
        return Tally.LEASED if self.leased else Tally.SIZE


class Group(Protocol):
    """What a transition depends on."""

    @property
    def status(self) -> Status: ...

    @property
    def times_sampled(self) -> int: ...

    @property
    def deliveries(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Transition:
    """A group's step from one place to another; None is where it is before it is put, and after it has left for good.

    `draws` and `deliveries` are added to its `times_sampled` and `deliveries`; one that begins `afresh` has no
    deliveries and no error any more. `error` says why it has become FAILED. `counts` is what is added to the tallies of
    its task; it isn't compared, so that equal transitions are those that change groups alike.
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
        """Whether the group is elsewhere afterwards, or gone."""
        return self.before != self.after

    @property
    def enters_races(self) -> bool:
        """Whether the group gets new keys in the races of where it is now: it came there, or was drawn and stays."""
        return self.after is not None and not self.after.leased and (self.moves or self.draws > 0)

    @property
    def pins_staleness(self) -> bool:
        """Whether the group's staleness stays what it is: it doesn't follow the train step of its place any more."""
        return self.moves and self.before is not None and self.after is not None and not self.before.leased

    @property
    def undone(self) -> Transition:
        """The step back of a draw or a lease that nobody received."""
        counts = {name: -n for name, n in self.counts.items()}
        return Transition(self.after, self.before, -self.draws, -self.deliveries, counts=counts)


# Coming


def put(status: Status) -> Transition:
    """A group is put."""
    return _step(None, Place(status), {Tally.PUT: 1})


def dropped(status: Status) -> Transition:
    """A group had expired before it could be stored: it was put, and is gone at once."""
    return _nowhere(status, Tally.PUT, Tally.DROPPED)


def refused(status: Status) -> Transition:
    """There was no room for a group."""
    return _nowhere(status, Tally.REFUSED)


def undrawn(group: Group) -> Status:
    """The status of a group as if it had never been drawn: what a draw has archived was COMPLETED."""
    return Status.COMPLETED if group.status == Status.ARCHIVED and group.times_sampled else group.status


# Draws and leases


def drawn(group: Group, limits: Limits) -> Transition:
    """A group is drawn, and nobody will give it back."""
    after, taken = _consumed(group.status, group.times_sampled + 1, limits)
    return _step(Place(group.status), after, {_sampled(group.times_sampled): 1, **taken}, draws=1)


def leased(group: Group) -> Transition:
    """A group is drawn under a lease."""
    status, sampled = group.status, {_sampled(group.times_sampled): 1}
    return _step(Place(status), Place(status, leased=True), sampled, draws=1, deliveries=1)


def acknowledged(group: Group, limits: Limits) -> Transition:
    """A leased group has been consumed."""
    after, taken = _consumed(group.status, group.times_sampled, limits)
    return _step(Place(group.status, leased=True), after, taken, afresh=True)


def given_back(group: Group, limits: Limits, reason: str | None) -> Transition:
    """A consumer gives a leased group back, for a reason; without one the delivery doesn't count."""
    return _returned(group, limits, Tally.RETURNED, reason)


def lapsed(group: Group, limits: Limits) -> Transition:
    """A group was leased for a time that is over."""
    return _returned(group, limits, Tally.LEASE_EXPIRED, "its consumer was silent for too long")


def unleased(group: Group) -> Transition:
    """A lease of a group is undone: nobody received it, or its consumer is unknown."""
    status, sampled = group.status, {_sampled(group.times_sampled - 1): -1}
    return _step(Place(status, leased=True), Place(status), sampled, draws=-1, deliveries=-1)


# Changing and leaving


def set_aside(status: Status, error: str) -> Transition:
    """A group can't be decoded."""
    return _step(Place(status), Place(Status.FAILED), {Tally.SET_ASIDE: 1}, error=error)


def expired(status: Status) -> Transition:
    """A group is too old, and stays to be generated again."""
    return _step(Place(status), Place(Status.EXPIRED), {Tally.EXPIRED: 1})


def updated(status: Status, new: Status) -> Transition:
    """Somebody gives a group a status."""
    return _step(Place(status), Place(new), {}, afresh=True)


def removed(place: Place, why: Tally) -> Transition:
    """A group leaves without being drawn: EVICTED, DROPPED, DELETED, REPLACED or PRUNED."""
    return _step(place, None, {why: 1})


def _returned(group: Group, limits: Limits, why: Tally, reason: str | None) -> Transition:
    """A leased group goes back as if it had not been drawn; one that was delivered too often becomes FAILED."""
    before, counts = Place(group.status, leased=True), {why: 1, _sampled(group.times_sampled - 1): -1}
    if reason is None or not 0 < limits.max_deliveries <= group.deliveries:
        return _step(before, Place(group.status), counts, draws=-1, deliveries=-1 if reason is None else 0)
    error = f"delivered {group.deliveries} times without acknowledgement; the last time {reason}"
    return _step(before, Place(Status.FAILED), {**counts, Tally.SET_ASIDE: 1}, draws=-1, error=error)


def _consumed(status: Status, times_sampled: int, limits: Limits) -> tuple[Place | None, dict[Tally, int]]:
    """Where a group goes that was drawn so often, and what is counted: it stays, is archived, or leaves."""
    if limits.keeps(status, times_sampled):
        return Place(status), {}
    archived = status == Status.COMPLETED and limits.archives
    return Place(Status.ARCHIVED) if archived else None, {Tally.TAKEN: 1}


def _nowhere(status: Status, *events: Tally) -> Transition:
    return Transition(None, None, counts={(status, name): 1 for name in events})


def _sampled(times_before: int) -> Tally:
    """How a draw of a group counts that was drawn so often before."""
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
    """The transition that counts who is where, and these events, under the status that the group had."""
    home = before or after
    assert home is not None
    counts = {(home.status, name): n for name, n in events.items()}
    if before != after:
        for place, n in ((before, -1), (after, 1)):
            if place is not None:
                counts[(place.status, place.tally)] = n
    return Transition(before, after, draws, deliveries, afresh, error, counts)
