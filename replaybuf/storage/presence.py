"""Who waits for a store, and what seldom happens there: for people who look into a run."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import StrEnum

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
