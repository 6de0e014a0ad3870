"""Checks that groups, payloads, lanes and garbage belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, select, text, update

from replaybuf import units
from replaybuf.doctor.findings import Check, CheckContext, Finding, Severity, fine, groups, repairable, warning
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.measures import unreadable_rewards
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import FREE, add_counts, set_aside
from replaybuf.storage.sql.statements.lanes import Lane, need_lane
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.ordering import enter_races
from replaybuf.storage.sql.statements.upkeep import sweep, wall_clock
from replaybuf.storage.sql.tasks.sweeper import GRACE_SECONDS
from replaybuf.units import some

#: The task for groups whose own task is unknown, and their error.
LOST = "lost+found"
WHY_LOST = "its task and status were lost"
MISSING = "its payload is missing"
#: What to do with groups that were set aside.
FORGET = 'buffer.delete({"uid": ...}) when nobody needs to know of them'
#: The number and age at which payloads that wait to be swept are a finding.
BACKLOG = 1000
BACKLOG_SECONDS = 60.0

_SWEPT_AT_ONCE = 10_000


def set_groups_aside(tx: Transaction, reasons: Mapping[int, str]) -> list[str]:
    """Make groups with unreadable payloads FAILED, with the reason; return what was done.

    Archived ones stay in the archive, with the reason. Leased ones are left to their consumers.
    """
    if not reasons:
        return []
    found = select(group.c.uid, lane).select_from(group.join(lane, lane.c.id == group.c.lane))
    free = found.where(uid_in(tx, list(reasons)), lane.c.leased.is_(False)).order_by(group.c.uid)
    archived: list[int] = []
    homes: dict[int, tuple[str, Lane, list[int]]] = {}
    for row in tx.execute(free).all():
        if row.status == Status.ARCHIVED:
            archived.append(row.uid)
            tx.execute(update(group).where(group.c.uid == row.uid).values(error=reasons[row.uid]))
        else:
            homes.setdefault(row.id, (row.buffer, Lane.of(row), []))[2].append(row.uid)
    done = [f"said so in the error of {groups(len(archived))} of the archive: {some(archived)}"] if archived else []
    for buffer, home, uids in homes.values():
        set_aside(tx.of(Scope(buffer)), home, {uid: reasons[uid] for uid in uids})
        done.append(f"set {groups(len(uids))} of the task {home.task_name} aside as failed: {some(uids)}")
    return done


# Lanes

_LANELESS = "SELECT uid FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = g.lane) ORDER BY uid"


def find_lanes(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every group has a lane."""
    if uids := tx.values(_LANELESS):
        return [repairable(f"{groups(len(uids))} of no task and status: {some(uids)}")]
    lanes = units.number_of(tx.value("SELECT count(*) FROM rb_lane"), "lane")
    return [fine(f"every group is in one of {lanes} (a task's groups of one status)")]


def repair_lanes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set groups without a lane aside, as FAILED groups of a task of their own."""
    if not (uids := tx.values(_LANELESS)):
        return []
    home = need_lane(tx, (LOST, Status.FAILED))
    free: dict[str, Any] = {**FREE, "lane": home.id, "error": WHY_LOST}
    tx.execute(update(group).where(uid_in(tx, uids)).values(free))
    stepless = and_(uid_in(tx, uids), group.c.pinned_staleness.is_(None))
    tx.execute(update(group).where(stepless).values(pinned_staleness=0))
    enter_races(tx, home, uids)
    add_counts(tx, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
    return [f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"]


# Leases

# Groups that only their lane, or only their lease, says are leased.
_HALF_LEASED = """
SELECT g.uid, g.lease, l.leased, l.buffer, l.task_name, l.status FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.leased AND (g.lease IS NULL OR g.leased_until IS NULL)
    OR NOT l.leased AND (g.lease IS NOT NULL OR g.leased_until IS NOT NULL)
ORDER BY g.uid"""


def find_leased(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether leased groups, and no others, are in the lanes of leased groups."""
    if uids := tx.values(_HALF_LEASED):
        return [repairable(f"{groups(len(uids))} half leased: {some(uids)}")]
    count = tx.value("SELECT count(*) FROM rb_group WHERE lease IS NOT NULL")
    return [fine(f"{groups(count)} leased, all in the lanes for them")]


def repair_leased(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Free groups that are half leased; end leases that have no end now."""
    uids = []
    for uid, lease, leased, buffer, task_name, status in tx.table(_HALF_LEASED)[1]:
        own = tx.of(Scope(buffer))
        home = need_lane(own, (task_name, Status(status)))
        if leased and lease is not None:
            values: dict[str, Any] = {"leased_until": store_clock(tx)}
        else:
            values = {**FREE, "lane": home.id}
        tx.execute(update(group).where(group.c.uid == uid).values(values))
        if leased and lease is None:
            add_counts(tx, {(home.id, Tally.LEASED): -1, (home.id, Tally.SIZE): 1})
            enter_races(own, home, [uid])
        uids.append(uid)
    return [f"gave back {groups(len(uids))} that were half leased: {some(uids)}"] if uids else []


# Payloads

_BARE = """
SELECT uid, error FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_payload p WHERE p.uid = g.uid) ORDER BY uid"""


def find_payloads(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every group has its payload."""
    bare = tx.table(_BARE)[1]
    if new := [uid for uid, error in bare if error is None]:
        context.damaged |= dict.fromkeys(new, MISSING)
        return [repairable(f"{groups(len(new))} without a payload: {some(new)}")]
    if bare:
        found = f"{groups(len(bare))} without a payload, set aside already: {some([uid for uid, _ in bare])}"
        return [warning(found, FORGET)]
    return [fine("every group has its payload")]


def repair_payloads(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups without a payload."""
    bare = tx.table(_BARE)[1]
    return set_groups_aside(tx, {uid: MISSING for uid, error in bare if error is None})


#: The numbers of checkpoints with groups, as `found`: an index look-up each, however many groups they have.
WITH_CHECKPOINTS = """
WITH RECURSIVE found(number) AS (
    SELECT min(checkpoint) FROM rb_checkpoint_group
    UNION ALL
    SELECT (SELECT min(c.checkpoint) FROM rb_checkpoint_group c WHERE c.checkpoint > found.number)
    FROM found WHERE found.number IS NOT NULL)"""
# Payloads that nothing needs and no sweep would delete. (It gets to those of dropped checkpoints.)
_LEAKED_PAYLOADS = f"""{WITH_CHECKPOINTS}
SELECT {{columns}} FROM rb_payload p
WHERE NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = p.uid)
    AND NOT EXISTS (SELECT 1 FROM rb_garbage w WHERE w.uid = p.uid)
    AND NOT EXISTS (
        SELECT 1 FROM rb_checkpoint_group c WHERE c.uid = p.uid AND c.checkpoint IN (SELECT number FROM found))"""  # noqa: S608
_COUNT_LEAKED = _LEAKED_PAYLOADS.format(columns="count(*)")
_SWEEP_LEAKED = "INSERT INTO rb_garbage (uid, removed_at) " + _LEAKED_PAYLOADS.format(columns="p.uid, :now")


def find_leaked(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every payload belongs to a group, or waits to be swept."""
    if count := tx.value(_COUNT_LEAKED):
        return [repairable(f"{count:,} payloads of groups that are gone, which nobody would delete")]
    return [fine("none")]


def repair_leaked(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Leave payloads that nobody needs to the sweep."""
    count = tx.execute(text(_SWEEP_LEAKED), {"now": wall_clock(tx)}).rowcount
    return [f"left {count:,} leaked payloads to the sweep"] if count else []


# Garbage

_WANTED = "EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_garbage.uid)"


def find_garbage(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check how much garbage waits to be swept, and whether all of it is garbage."""
    found = []
    if uids := tx.values(f"SELECT uid FROM rb_garbage WHERE {_WANTED} ORDER BY uid"):  # noqa: S608
        wanted = f"{groups(len(uids))} that are there are to be swept, too: {some(uids)}"
        found.append(repairable(wanted, level=Severity.WARNING))
    [(count, oldest)] = tx.table("SELECT count(*), min(removed_at) FROM rb_garbage")[1]
    age = 0.0 if oldest is None else tx.seconds() - oldest
    backlog = f"{count:,} payloads wait to be swept" + (f", the oldest for {age:,.0f} s" if count else "")
    if count >= BACKLOG and age >= BACKLOG_SECONDS:
        # Any process that has the buffer open sweeps.
        why = f"{backlog}: nobody has the buffer open, or it falls behind"
        found.append(repairable(why, level=Severity.WARNING))
    return found or [fine(backlog)]


def repair_garbage(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Take payloads of existing groups off the list, and sweep those that have waited long enough."""
    wanted = tx.execute(text(f"DELETE FROM rb_garbage WHERE {_WANTED}")).rowcount  # noqa: S608
    swept = sweep(tx, wall_clock(tx) - GRACE_SECONDS, _SWEPT_AT_ONCE)
    done = [f"took {groups(wanted)} off the list of what is to be swept"] if wanted else []
    return [*done, f"swept {swept:,} payloads"] if swept else done


# Rewards


def find_rewards(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all rewards are numbers that SQL can read."""
    found = unreadable_rewards(tx)
    if not found:
        return [fine("all are numbers")]
    where = [
        f"{units.number_of(one.rollouts, 'rollout')} of {one.task_name} {one.status} ({one.what})" for one in found
    ]
    return [
        warning(
            f"no numbers, and so in no mean and no order: {some(where)}; group {found[0].uid} is one",
            "put finite numbers, or name the part of a dict that counts: reward_key= in the config of who puts",
        )
    ]


CHECKS = (
    Check("lanes", find_lanes, repair_lanes),
    Check("leased groups", find_leased, repair_leased),
    Check("payloads", find_payloads, repair_payloads),
    Check("leaked payloads", find_leaked, repair_leaked),
    Check("garbage", find_garbage, repair_garbage),
    Check("rewards", find_rewards),
)
