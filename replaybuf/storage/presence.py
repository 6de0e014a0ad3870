"""Who works with a store and who waits for it, and what seldom happens there: for people who look into a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Beginning with the time, so that a process never repeats the numbers of an earlier one with its name and pid.
_numbers = itertools.count(time.time_ns() // 1000)


class WaitKind(StrEnum):
    """What a call waits for."""

    GROUPS = "groups"  # a draw: for groups
    ROOM = "room"  # a put: for room
    TRAINER = "trainer"  # a producer: for what the trainer publishes


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that waits, while it does.

    `wants` is the number of groups by task, of one `status`, narrowed by a `query` (as JSON). `since` and `deadline`
    are in seconds since the epoch; without a deadline it waits for ever. `limits` are those in force that may hold it
    back (fields of `Limits`). `reason` says why what it waits for isn't there; the caller brings it up to date.
    `number` is unique among all that a process ever waits for.
    """

    worker: str
    kind: WaitKind
    wants: Mapping[str, int]
    since: float
    status: str | None = None
    query: str | None = None
    deadline: float | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
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
