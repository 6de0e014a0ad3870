"""Published waits, kinds of events, and what workers counted, as a process records them."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import StrEnum

from replaybuf.rules.circumstances import Wait

#: The counts of a worker's activity, in the order of its marks.
ACTIVITIES = ("groups", "rollouts", "tokens", "failures", "taken")

# Based on the start time, so that a process never repeats the numbers of an earlier one with its name and pid.
_numbers = itertools.count(int(time.time() * 1_000_000))


@dataclass(slots=True, eq=False)
class Waiting:
    """A published wait.

    `reason` says why the wait goes on; the waiting call updates it. `worker` is the waiting worker's name, and `number`
    is unique among all waits of a process.
    """

    wait: Wait
    worker: str
    reason: str
    number: int = field(default_factory=lambda: next(_numbers))


class EventKind(StrEnum):
    """Events rare enough to be recorded one by one."""

    LEASE_LAPSED = "lease_lapsed"  # a lease expired, and its groups are available again
    GIVEN_BACK = "given_back"  # released by a failed consumer; `detail` says why
    SET_ASIDE = "set_aside"  # became FAILED: undecodable, or leased too often
    LEFT_OUT = "left_out"  # unfit rollouts of a group, which goes without them: `detail` says which group they are now
    EXPIRED = "expired"  # in a refresh to `step`
    DELETED = "deleted"  # by a query
    REQUEUED = "requeued"  # failed, filtered or expired groups made available again
    REFUSED = "refused"  # puts without room
    IMPORTED = "imported"  # from a file
    CHECKPOINT = "checkpoint"  # the one of `step` was made
    CHECKPOINT_DROPPED = "checkpoint_dropped"
    RESTORED = "restored"  # to the checkpoint of `step`
    GAVE_UP = "gave_up"  # a wait of over a second timed out: it needed `groups`, `detail` says why it went on
    DATASET_ENDED = "dataset_ended"  # after so many prompts (`groups`) of the ledger `detail`


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event that a worker reports of itself, at a `time` by the clock of its process.

    `draws`: it is of a draw, so the worker is one that draws.
    """

    kind: EventKind
    worker: str
    time: float
    groups: int
    detail: str
    task_name: str | None = None
    draws: bool = False
