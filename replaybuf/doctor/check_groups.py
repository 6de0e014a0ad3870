"""Checks that groups, payloads, lanes and garbage belong together."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf import units
from replaybuf.doctor.findings import Check, CheckContext, Finding, Severity, fine, groups, repairable, warning
from replaybuf.storage.sql.inspection.measures import unreadable_rewards
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.units import some

MISSING = "its payload is missing"
#: What to do with groups that were set aside.
FORGET = 'buffer.delete({"uid": ...}) when nobody needs to know of them'
#: The number and age at which payloads that wait to be swept are a finding.
BACKLOG = 1000
BACKLOG_SECONDS = 60.0


# Lanes

LANELESS = "SELECT uid FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = g.lane) ORDER BY uid"


def find_lanes(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every group has a lane."""
    if uids := tx.values(LANELESS):
        return [repairable(f"{groups(len(uids))} of no task and status: {some(uids)}")]
    lanes = units.number_of(tx.value("SELECT count(*) FROM rb_lane"), "lane")
    return [fine(f"every group is in one of {lanes} (a task's groups of one status)")]


# Leases

# Groups that only their lane, or only their lease, says are leased.
HALF_LEASED = """
SELECT g.uid, g.lease, l.leased, l.buffer, l.task_name, l.status FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.leased AND (g.lease IS NULL OR g.leased_until IS NULL)
    OR NOT l.leased AND (g.lease IS NOT NULL OR g.leased_until IS NOT NULL)
ORDER BY g.uid"""


def find_leased(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether leased groups, and no others, are in the lanes of leased groups."""
    if uids := tx.values(HALF_LEASED):
        return [repairable(f"{groups(len(uids))} half leased: {some(uids)}")]
    count = tx.value("SELECT count(*) FROM rb_group WHERE lease IS NOT NULL")
    return [fine(f"{groups(count)} leased, all in the lanes for them")]


# Payloads

BARE = """
SELECT uid, error FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_payload p WHERE p.uid = g.uid) ORDER BY uid"""


def find_payloads(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every group has its payload."""
    bare = tx.table(BARE)[1]
    if new := [uid for uid, error in bare if error is None]:
        context.damaged |= dict.fromkeys(new, MISSING)
        return [repairable(f"{groups(len(new))} without a payload: {some(new)}")]
    if bare:
        found = f"{groups(len(bare))} without a payload, set aside already: {some([uid for uid, _ in bare])}"
        return [warning(found, FORGET)]
    return [fine("every group has its payload")]


#: The numbers of checkpoints with groups, as `found`: an index look-up each, however many groups they have.
WITH_CHECKPOINTS = """
WITH RECURSIVE found(number) AS (
    SELECT min(checkpoint) FROM rb_checkpoint_group
    UNION ALL
    SELECT (SELECT min(c.checkpoint) FROM rb_checkpoint_group c WHERE c.checkpoint > found.number)
    FROM found WHERE found.number IS NOT NULL)"""
# Payloads that nothing needs and no sweep would delete. (It gets to those of dropped checkpoints.)
LEAKED_PAYLOADS = f"""{WITH_CHECKPOINTS}
SELECT {{columns}} FROM rb_payload p
WHERE NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = p.uid)
    AND NOT EXISTS (SELECT 1 FROM rb_garbage w WHERE w.uid = p.uid)
    AND NOT EXISTS (
        SELECT 1 FROM rb_checkpoint_group c WHERE c.uid = p.uid AND c.checkpoint IN (SELECT number FROM found))"""  # noqa: S608
_COUNT_LEAKED = LEAKED_PAYLOADS.format(columns="count(*)")


def find_leaked(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every payload belongs to a group, or waits to be swept."""
    if count := tx.value(_COUNT_LEAKED):
        return [repairable(f"{count:,} payloads of groups that are gone, which nobody would delete")]
    return [fine("none")]


# Garbage

WANTED = "EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_garbage.uid)"


def find_garbage(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check how much garbage waits to be swept, and whether all of it is garbage."""
    found = []
    if uids := tx.values(f"SELECT uid FROM rb_garbage WHERE {WANTED} ORDER BY uid"):  # noqa: S608
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
    Check("lanes", find_lanes),
    Check("leased groups", find_leased),
    Check("payloads", find_payloads),
    Check("leaked payloads", find_leaked),
    Check("garbage", find_garbage),
    Check("rewards", find_rewards),
)
