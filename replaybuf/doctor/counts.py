"""Checks of tallies, uids and leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, groups, number_of, repairable, some, warning
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.inspection.checkup import counts

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

COUNTS, _TOTALS, _UIDS, _LEASES, _DELIVERIES = "counts", "totals", "uids", "leases", "deliveries"

# Every group that was put is counted in one of these.
_ENDS = (
    *(Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.PRUNED),
    *(Tally.SIZE, Tally.LEASED),
)

#: Open buffers end expired leases twice a second.
OVERDUE_SECONDS = 5.0
#: Groups with so many failed deliveries are about to be set aside (`max_deliveries` is 5 by default).
MANY_DELIVERIES = 4


def look_at_counts(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether there are as many groups as were counted."""
    sizes = counts.read_sizes(tx)
    wrong = [
        f"{size.label}: {size.counted:,} {size.name} counted, {size.there:,} there"
        for size in sizes
        if size.counted != size.there
    ]
    if wrong:
        return [repairable(COUNTS, "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if wrong[5:] else ""))]
    if lost := counts.count_laneless(tx):
        return [repairable(COUNTS, f"{lost:,} counts of lanes that are gone", level=Level.WARNING)]
    return [fine(COUNTS, f"{groups(sum(size.there for size in sizes))}, as counted")]


def repair_counts(tx: Transaction, look: Look) -> Sequence[str]:
    """Count the groups anew."""
    lost, wrong = counts.count_anew(tx)
    done = [f"removed {lost:,} counts of lanes that are gone"] if lost else []
    return done + [f"counted {size.name} of {size.label} anew: {size.there - size.counted:+,}" for size in wrong]


def look_at_totals(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether the number put equals the sum of all outcomes."""
    totals = counts.read_totals(tx)
    wrong = [
        f"{task_name}: {of[str(Tally.PUT)]:,} put, {ended:,} accounted for"
        for (_, task_name), of in sorted(totals.items())
        if (ended := sum(of[str(name)] for name in _ENDS)) != of[str(Tally.PUT)]
    ]
    if wrong:
        # Updates that move groups into the archive or out of it cause this, too.
        return [warning(_TOTALS, some(wrong), "nothing, where buffer.update() archived groups; else tell who wrote it")]
    return [fine(_TOTALS, f"what was put is what became of it ({number_of(len(totals), 'task')})")]


def look_at_uids(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether the next uid is unused."""
    uids = counts.read_uids(tx)
    if uids.last is None:
        return [repairable(_UIDS, "the counter of uids is gone")]
    if uids.last < uids.used:
        text = f"uid {uids.used:,} is in use, and the counter is at {uids.last:,}: puts would fail"
        return [repairable(_UIDS, text)]
    return [fine(_UIDS, f"the last one given is {uids.last:,}")]


def repair_uids(tx: Transaction, look: Look) -> Sequence[str]:
    """Move the counter of uids past those in use."""
    wrong = counts.mend_uids(tx)
    return [f"raised the counter of uids from {wrong.last or 0:,} to {wrong.used:,}"] if wrong else []


def look_at_leases(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether expired leases were ended."""
    leases = counts.read_leases(tx, OVERDUE_SECONDS)
    if leases.overdue:
        over = f"whose lease was over up to {-leases.first:,.0f} s ago: nobody has the buffer open"
        return [repairable(_LEASES, f"{groups(leases.overdue)} {over}", level=Level.WARNING)]
    if leases.count and leases.last < 0:
        return [fine(_LEASES, f"{groups(leases.count)} leased, whose lease was over just now")]
    text = f"{groups(leases.count)} leased, the longest for another {leases.last:,.0f} s" if leases.count else "none"
    return [fine(_LEASES, text)]


def repair_leases(tx: Transaction, look: Look) -> Sequence[str]:
    """End the expired leases."""
    ended = counts.end_overdue(tx)
    return [f"gave back {groups(count)} of the buffer {buffer} whose lease was over" for buffer, count in ended.items()]


def look_at_deliveries(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether groups fail again and again."""
    if uids := counts.delivered_often(tx, MANY_DELIVERIES):
        text = f"{groups(len(uids))} leased {MANY_DELIVERIES} times or more in vain: {some(uids)}"
        return [warning(_DELIVERIES, text, "look at them (replaybuf show URL UID) and at their consumers' logs")]
    return [fine(_DELIVERIES, f"no group was leased {MANY_DELIVERIES} times in vain")]


CHECKS = (
    Check(COUNTS, look_at_counts, repair_counts),
    Check(_TOTALS, look_at_totals),
    Check(_UIDS, look_at_uids, repair_uids),
    Check(_LEASES, look_at_leases, repair_leases),
    Check(_DELIVERIES, look_at_deliveries),
)
