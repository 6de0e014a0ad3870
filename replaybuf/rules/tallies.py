"""What a store counts, by task and status, in the same transactions as the events.

For every task, `put` equals `taken + evicted + dropped + deleted + replaced + pruned`, plus the groups in the buffer
(`size`) and the leased ones. That leaves out all counts of the status ARCHIVED, and holds as long as no update moves
groups into the archive or out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from replaybuf.rollouts.status import ASIDE, Status
from replaybuf.rules.level import Level


class Tally(StrEnum):
    """What is counted; events of a group count under the status that it had then."""

    SIZE = "size"  # groups there now, without leased ones
    LEASED = "leased"  # groups leased now
    PUT = "put"
    SAMPLED_NEW = "sampled_new"  # draws of groups that were never drawn before
    SAMPLED_AGAIN = "sampled_again"
    TAKEN = "taken"  # left by being drawn
    EVICTED = "evicted"
    EXPIRED = "expired"  # became EXPIRED in a refresh
    DROPPED = "dropped"  # expired and weren't retryable
    DELETED = "deleted"
    REPLACED = "replaced"  # by a put of the same key, or one that says so
    SET_ASIDE = "set_aside"  # became FAILED: undecodable, or leased too often
    REFUSED = "refused"  # puts without room; nothing was stored
    RETURNED = "returned"  # leases given back
    LEASE_EXPIRED = "lease_expired"  # leases whose time ran out
    PRUNED = "pruned"  # left the archive, or were FILTERED or FAILED and no longer kept


#: A task and a status.
LaneName = tuple[str, Status]
Tallies = Mapping[tuple[str, Status, Tally], int]


def levels(tallies: Tallies, tasks: Iterable[str]) -> dict[str, Level]:
    """Return the level of each task."""

    def level(task: str) -> Level:
        def of(name: Tally) -> int:
            return tallies.get((task, Status.COMPLETED, name), 0)

        return Level(
            buffered=sum(tallies.get((task, status, Tally.SIZE), 0) for status in Status if status not in ASIDE),
            completed=of(Tally.SIZE),
            inserted=of(Tally.PUT),
            sampled=of(Tally.SAMPLED_NEW) + of(Tally.SAMPLED_AGAIN),
        )

    return {task: level(task) for task in tasks}


def sizes_of(tallies: Tallies) -> dict[LaneName, int]:
    """Return the number of groups of each task and status that has any."""
    return {(task, status): n for (task, status, name), n in tallies.items() if name == Tally.SIZE and n}
