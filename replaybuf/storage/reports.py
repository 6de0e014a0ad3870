"""Who waits for a store, and what seldom happens there: for people who look into a run."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import StrEnum

from replaybuf import units
from replaybuf.rules.circumstances import Wait
from replaybuf.rules.limits import Limits

#: When this process began, by its own clock, as far as anybody who waits or holds something can tell.
PROCESS_BEGAN = time.time()
# Beginning with that time, so that a process never repeats the numbers of an earlier one with its name and pid.
_numbers = itertools.count(int(PROCESS_BEGAN * 1_000_000))


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


def process_began(number: int) -> float:
    """Return when the process began that has a wait of this number."""
    return number / 1_000_000


class EventKind(StrEnum):
    """What happens seldom enough to be noted one by one."""

    LEASE_LAPSED = "lease_lapsed"  # its time ran out: the groups are back
    GIVEN_BACK = "given_back"  # by a consumer that failed: `detail` says why
    SET_ASIDE = "set_aside"  # became FAILED: undecodable, or leased too often
    EXPIRED = "expired"  # in a refresh to `step`
    DELETED = "deleted"  # by a query
    REQUEUED = "requeued"  # failed, filtered or expired groups that are back
    REFUSED = "refused"  # puts without room
    IMPORTED = "imported"  # from a file
    CHECKPOINT = "checkpoint"  # of `step` was made
    CHECKPOINT_DROPPED = "checkpoint_dropped"
    RESTORED = "restored"  # to the checkpoint of `step`
    GAVE_UP = "gave_up"  # a wait of more than a second ended by its timeout: `groups` were wanted, `detail` says why
    DATASET_ENDED = "dataset_ended"  # after so many prompts (`groups`) of the ledger `detail`
    LIMITS = "limits"  # by which a worker draws, as JSON in `detail`, where they aren't those that were noted last


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event that a worker reports of itself, at a `time` by the clock of its process."""

    kind: EventKind
    worker: str
    time: float
    groups: int
    detail: str
    task_name: str | None = None


def timeout_event(wait: Wait, worker: str, time: float, reason: str, task_name: str | None = None) -> WorkerEvent:
    """Return the event of a wait that ended by its timeout, and why it wasn't over.

    `task_name` is the task that the reason is about, if it is about one. The event has the number of groups that were
    wanted (of the task, if there is one), and says how long the wait was, for what, and the reason.
    """
    wanted = sum(wait.wants.values()) if task_name is None else wait.wants.get(task_name, 0)
    detail = f"after {lasted(wait.kind, time - (time if wait.since is None else wait.since))}: {reason}"
    return WorkerEvent(EventKind.GAVE_UP, worker, time, wanted, detail, task_name)


def lasted(kind: str, seconds: float) -> str:
    """Return `2.0m of waiting for groups`, of a wait of this kind."""
    return f"{units.age(seconds)} of waiting for {_FOR[kind]}"


_FOR = {"groups": "groups", "room": "room", "trainer": "the trainer"}


def kind_of_wait(detail: str) -> str:
    """Return of which kind the wait was that gave up with this `detail`; "" for another text."""
    beginning = detail.partition(": ")[0]
    return next((kind for kind, what in _FOR.items() if beginning.endswith(f" of waiting for {what}")), "")
