"""Who waits for a store, and what seldom happens there: for people who look into a run."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import StrEnum

from replaybuf import units
from replaybuf.rules.circumstances import Wait
from replaybuf.rules.limits import Limits

# Beginning with the time, so that a process never repeats the numbers of an earlier one with its name and pid.
_numbers = itertools.count(time.time_ns() // 1000)


@dataclass(slots=True, eq=False)
class Waiting:
    """A wait that others are shown while it lasts, with the limits that it goes by.

    `reason` says why it isn't over; who waits brings it up to date. `worker` is who that is, and `number` unique among
    all waits that a process ever has.
    """

    wait: Wait
    worker: str
    limits: Limits
    reason: str
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A wait that ended by its timeout at `time`, by the clock of this process, and why it wasn't over.

    `task_name` is the task that the reason is about, if it is about one.
    """

    wait: Wait
    worker: str
    time: float
    reason: str
    task_name: str | None = None

    @property
    def groups(self) -> int:
        """The number of groups that were wanted: of the task, if there is one."""
        wants = self.wait.wants
        return sum(wants.values()) if self.task_name is None else wants.get(self.task_name, 0)

    @property
    def detail(self) -> str:
        """How long the wait was, for what, and the reason."""
        lasted = units.age(self.time - (self.time if self.wait.since is None else self.wait.since))
        return f"after {lasted} of waiting for {_FOR[self.wait.kind]}: {self.reason}"


_FOR = {"groups": "groups", "room": "room", "trainer": "the trainer"}


def kind_of_wait(detail: str) -> str:
    """Return of which kind the wait was that gave up with this `detail`; "" for another text."""
    beginning = detail.partition(": ")[0]
    return next((kind for kind, what in _FOR.items() if beginning.endswith(f" of waiting for {what}")), "")


class EventKind(StrEnum):
    """What happens seldom enough to be noted one by one."""

    LEASE_LAPSED = "lease_lapsed"  # its time ran out: the groups are back
    GIVEN_BACK = "given_back"  # by a consumer that failed: `detail` says why
    SET_ASIDE = "set_aside"  # became FAILED: undecodable, or leased too often
    EXPIRED = "expired"  # in a refresh to `step`
    DELETED = "deleted"  # by a query
    REFUSED = "refused"  # puts without room
    IMPORTED = "imported"  # from a file
    CHECKPOINT = "checkpoint"  # of `step` was made
    CHECKPOINT_DROPPED = "checkpoint_dropped"
    RESTORED = "restored"  # to the checkpoint of `step`
    GAVE_UP = "gave_up"  # a wait of more than a second ended by its timeout: `groups` were wanted, `detail` says why
