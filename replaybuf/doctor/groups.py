"""Checks that groups, payloads, lanes and garbage belong together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, groups, number_of, repairable, some, warning
from replaybuf.storage.sql.inspection.checkup import orphans
from replaybuf.storage.sql.inspection.checkup.orphans import LOST, MISSING, Aside
from replaybuf.storage.sql.inspection.overview import read_backlog

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_LANES, _LEASED, _PAYLOADS, _LEAKED, _GARBAGE = "lanes", "leased groups", "payloads", "leaked payloads", "garbage"

#: What to do with groups that were set aside.
FORGET = 'buffer.delete({"uid": ...}) when nobody needs to know of them'
#: The number and age at which payloads that wait to be swept are a finding.
BACKLOG = 1000
BACKLOG_SECONDS = 60.0


def said(aside: Aside) -> list[str]:
    """Return what was done with groups whose payload can't be read."""
    archived = aside.archived
    done = [f"said so in the error of {groups(len(archived))} of the archive: {some(archived)}"] if archived else []
    for task, uids in aside.failed:
        done.append(f"set {groups(len(uids))} of the task {task} aside as failed: {some(uids)}")
    return done


def look_at_lanes(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether every group has a lane."""
    if uids := orphans.laneless(tx):
        return [repairable(_LANES, f"{groups(len(uids))} of no task and status: {some(uids)}")]
    lanes = number_of(orphans.count_lanes(tx), "lane")
    return [fine(_LANES, f"every group is in one of {lanes} (a task's groups of one status)")]


def repair_lanes(tx: Transaction, look: Look) -> Sequence[str]:
    """Set groups without a lane aside, as FAILED groups of a task of their own."""
    uids = orphans.adopt_laneless(tx)
    what = f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"
    return [what] if uids else []


def look_at_leased(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether leased groups, and no others, are in the lanes of leased groups."""
    if uids := orphans.half_leased(tx):
        return [repairable(_LEASED, f"{groups(len(uids))} half leased: {some(uids)}")]
    return [fine(_LEASED, f"{groups(orphans.count_leased(tx))} leased, all in the lanes for them")]


def repair_leased(tx: Transaction, look: Look) -> Sequence[str]:
    """Free groups that are half leased; end leases that have no end now."""
    uids = orphans.give_back_half_leased(tx)
    return [f"gave back {groups(len(uids))} that were half leased: {some(uids)}"] if uids else []


def look_at_payloads(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether every group has its payload."""
    bare = orphans.bare_groups(tx)
    if new := [uid for uid, error in bare.items() if error is None]:
        look.damaged |= dict.fromkeys(new, MISSING)
        return [repairable(_PAYLOADS, f"{groups(len(new))} without a payload: {some(new)}")]
    if bare:
        text = f"{groups(len(bare))} without a payload, set aside already: {some(list(bare))}"
        return [warning(_PAYLOADS, text, FORGET)]
    return [fine(_PAYLOADS, "every group has its payload")]


def repair_payloads(tx: Transaction, look: Look) -> Sequence[str]:
    """Set aside groups without a payload."""
    return said(orphans.put_bare_aside(tx))


def look_at_leaked(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether every payload belongs to a group, or waits to be swept."""
    if count := orphans.count_leaked(tx):
        return [repairable(_LEAKED, f"{count:,} payloads of groups that are gone, which nobody would delete")]
    return [fine(_LEAKED, "none")]


def repair_leaked(tx: Transaction, look: Look) -> Sequence[str]:
    """Leave payloads that nobody needs to the sweep."""
    count = orphans.sweep_leaked(tx)
    return [f"left {count:,} leaked payloads to the sweep"] if count else []


def look_at_garbage(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check how much garbage waits to be swept, and whether all of it is garbage."""
    found = []
    if uids := orphans.wanted_garbage(tx):
        text = f"{groups(len(uids))} that are there are to be swept, too: {some(uids)}"
        found.append(repairable(_GARBAGE, text, level=Level.WARNING))
    count, oldest = read_backlog(tx)
    age = 0.0 if oldest is None else time.time() - oldest
    text = f"{count:,} payloads wait to be swept" + (f", the oldest for {age:,.0f} s" if count else "")
    if count >= BACKLOG and age >= BACKLOG_SECONDS:
        # Any process that has the buffer open sweeps.
        text = f"{text}: nobody has the buffer open, or it falls behind"
        found.append(repairable(_GARBAGE, text, level=Level.WARNING))
    return found or [fine(_GARBAGE, text)]


def repair_garbage(tx: Transaction, look: Look) -> Sequence[str]:
    """Take payloads of existing groups off the list, and sweep those that have waited long enough."""
    wanted, swept = orphans.mend_garbage(tx)
    done = [f"took {groups(wanted)} off the list of what is to be swept"] if wanted else []
    return [*done, f"swept {swept:,} payloads"] if swept else done


CHECKS = (
    Check(_LANES, look_at_lanes, repair_lanes),
    Check(_LEASED, look_at_leased, repair_leased),
    Check(_PAYLOADS, look_at_payloads, repair_payloads),
    Check(_LEAKED, look_at_leaked, repair_leaked),
    Check(_GARBAGE, look_at_garbage, repair_garbage),
)
