"""Checks that groups, payloads, lanes and garbage are consistent, and that counts, uids and checkpoints agree."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from replaybuf import units
from replaybuf.doctor import Check, CheckContext, Finding, Severity, fine, groups, problem, repairable, warning
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.measures import tallies_of, unreadable_rewards
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.statements.buffer_facts import DROPPED, find_last_uid, list_leased
from replaybuf.units import some

MISSING = "its payload is missing"
#: What to do with groups that were set aside.
FORGET = 'buffer.delete({"uid": ...}) when nobody needs to know of them'
#: Limits for a finding: the number of payloads that wait for the sweep, and their age.
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

# Groups that are marked as leased by their lane only, or by their lease only.
HALF_LEASED = """
SELECT g.uid, g.lease, l.leased, l.buffer, l.task_name, l.status FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.leased AND (g.lease IS NULL OR g.leased_until IS NULL)
    OR NOT l.leased AND (g.lease IS NOT NULL OR g.leased_until IS NOT NULL)
ORDER BY g.uid"""


def find_leased(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether exactly the leased groups are in the lanes of leased groups."""
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


# Payloads that nothing refers to, and no sweep would delete.
LEAKED_PAYLOADS = """rb_payload WHERE NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_payload.uid)
    AND NOT EXISTS (SELECT 1 FROM rb_past p WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)"""


def find_leaked(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every payload belongs to a group, or waits for the sweep."""
    if count := tx.value(f"SELECT count(*) FROM {LEAKED_PAYLOADS}"):  # noqa: S608
        return [repairable(f"{count:,} payloads of groups that are gone, which nobody would delete")]
    return [fine("none")]


# Garbage


def find_garbage(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check the number of payloads that wait for the sweep."""
    waiting = "SELECT count(*), min(removed_at) FROM rb_past WHERE until IS NULL AND removed_at IS NOT NULL"
    [(count, oldest)] = tx.table(waiting)[1]
    age = 0.0 if oldest is None else tx.seconds() - oldest
    backlog = f"{count:,} payloads wait to be swept" + (f", the oldest for {age:,.0f} s" if count else "")
    if count >= BACKLOG and age >= BACKLOG_SECONDS:
        # Any process that has the buffer open sweeps.
        why = f"{backlog}: nobody has the buffer open, or it falls behind"
        return [repairable(why, level=Severity.WARNING)]
    return [fine(backlog)]


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


# Every group that was put is counted in exactly one of these.
_ENDS = (
    *(Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.PRUNED),
    *(Tally.SIZE, Tally.LEASED),
)

#: Open buffers end a lease within half a second of its end, within four if there are many buffers or all are idle.
OVERDUE_SECONDS = 5.0
#: Groups with this many failed deliveries will soon be set aside (`max_deliveries` is 5 by default).
MANY_DELIVERIES = 4

# Sizes by lane


@dataclass(frozen=True, slots=True)
class _Size:
    """The number of groups (SIZE or LEASED) of a lane by its tally, and the actual number; or the BYTES of a buffer."""

    lane: int
    name: Tally
    label: str
    counted: int
    there: int


# Leased groups count in the lane that they came from.
_THERE = """
SELECT coalesce(home.id, l.id) AS lane, l.leased AS leased, count(*)
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_lane home ON l.leased AND NOT home.leased
    AND home.buffer = l.buffer AND home.task_name = l.task_name AND home.status = l.status
GROUP BY 1, 2"""
_COUNTED = "SELECT lane, name, sum(amount) FROM rb_tally WHERE name IN ('size', 'leased') GROUP BY lane, name"
_BYTES = """
SELECT buffer, min(id), (
    SELECT coalesce(sum(t.amount), 0) FROM rb_lane l JOIN rb_tally t ON t.lane = l.id
    WHERE l.buffer = rb_lane.buffer AND t.name = 'bytes'
), (SELECT coalesce(sum(g.bytes), 0) FROM rb_lane l JOIN rb_group g ON g.lane = l.id WHERE l.buffer = rb_lane.buffer)
FROM rb_lane GROUP BY buffer ORDER BY buffer"""
LANELESS_TALLIES = "rb_tally WHERE NOT EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = rb_tally.lane)"


def sizes_of(tx: ReadTransaction) -> list[_Size]:
    labels = {
        lane: f"{task} {status}" for lane, task, status in tx.table("SELECT id, task_name, status FROM rb_lane")[1]
    }
    there: Counter[tuple[int, Tally]] = Counter()
    for lane, leased, count in tx.table(_THERE)[1]:
        there[lane, Tally.LEASED if leased else Tally.SIZE] += int(count)
    counted = {(lane, Tally(name)): int(amount) for lane, name, amount in tx.table(_COUNTED)[1] if lane in labels}
    sizes = [
        _Size(lane, name, labels[lane], counted.get((lane, name), 0), there[lane, name])
        for lane, name in sorted(counted.keys() | there.keys())
    ]
    return sizes + [
        _Size(lane, Tally.BYTES, f"the buffer {buffer}", int(counted), int(there))
        for buffer, lane, counted, there in tx.table(_BYTES)[1]
    ]


def find_counts(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the tallies equal the numbers of groups."""
    sizes = sizes_of(tx)
    wrong = [
        f"{size.label}: {size.counted:,} {size.name} counted, {size.there:,} there"
        for size in sizes
        if size.counted != size.there
    ]
    if wrong:
        return [repairable("; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if wrong[5:] else ""))]
    if lost := tx.value(f"SELECT count(*) FROM {LANELESS_TALLIES}"):  # noqa: S608
        return [repairable(f"{lost:,} counts of lanes that are gone", level=Severity.WARNING)]
    return [fine(f"{groups(sum(size.there for size in sizes if size.name != Tally.BYTES))}, as counted")]


# Totals since the beginning


def find_totals(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the number put equals the sum of all outcomes."""
    totals: dict[tuple[str, str], Counter[Tally]] = defaultdict(Counter)
    for buffer, tallies in tallies_of(tx, None).items():
        for (task_name, status, name), amount in tallies.items():
            if status != Status.ARCHIVED:
                totals[buffer, task_name][name] += amount
    wrong = [
        f"{task_name}: {of[Tally.PUT]:,} put, {ended:,} accounted for"
        for (_, task_name), of in sorted(totals.items())
        if (ended := sum(of[name] for name in _ENDS)) != of[Tally.PUT]
    ]
    if wrong:
        # Updates that move groups into the archive or out of it cause this, too.
        return [warning(some(wrong), "nothing, where buffer.update() archived groups; else tell who wrote it")]
    return [fine(f"what was put is what became of it ({units.number_of(len(totals), 'task')})")]


# Uids

_HIGHEST_UID = """
SELECT max(uid) FROM (
    SELECT max(uid) AS uid FROM rb_group UNION ALL SELECT max(lease) FROM rb_group
    UNION ALL SELECT max(uid) FROM rb_payload UNION ALL SELECT max(uid) FROM rb_past
    UNION ALL SELECT max(last_uid) FROM rb_batch UNION ALL SELECT max(lease) FROM rb_batch) used"""


def uids_of(tx: ReadTransaction) -> tuple[int, int | None]:
    """Return the highest uid in use, and the last uid assigned (None when the counter is missing)."""
    return tx.value(_HIGHEST_UID) or 0, find_last_uid(tx)


def find_uids(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the next uid is unused."""
    used, last = uids_of(tx)
    if last is None:
        return [repairable("the counter of uids is gone")]
    if last < used:
        return [repairable(f"uid {used:,} is in use, and the counter is at {last:,}: puts would fail")]
    return [fine(f"the last one given is {last:,}")]


# Leases


def find_leases(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether expired leases were ended."""
    now = tx.seconds()
    found = list_leased(tx, None, now - OVERDUE_SECONDS)
    count, overdue = sum(one.groups for one in found), sum(one.overdue for one in found)
    last = max((one.last for one in found), default=0.0)
    if overdue:
        first = min(one.first for one in found)
        over = f"whose lease was over up to {now - first:,.0f} s ago: nobody has the buffer open"
        return [repairable(f"{groups(overdue)} {over}", level=Severity.WARNING)]
    if count and last < now:
        return [fine(f"{groups(count)} leased, whose lease was over just now")]
    return [fine(f"{groups(count)} leased, the longest for another {last - now:,.0f} s" if count else "none")]


_OFTEN = """
SELECT g.uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.deliveries >= :times AND l.status <> :failed ORDER BY g.uid"""


def find_deliveries(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check for groups whose deliveries fail repeatedly."""
    uids = tx.values(_OFTEN, times=MANY_DELIVERIES, failed=str(Status.FAILED))
    if uids:
        found = f"{groups(len(uids))} leased {MANY_DELIVERIES} times or more in vain: {some(uids)}"
        return [warning(found, "look at them (replaybuf show URL UID) and at their consumers' logs")]
    return [fine(f"no group was leased {MANY_DELIVERIES} times in vain")]


# Step checkpoints

# The groups and bytes of each checkpoint as recorded and as counted, and the number of its missing payloads.
_RECORDED = """
SELECT c.step, c.groups, c.bytes, count(v.uid), coalesce(sum(v.bytes), 0), count(v.uid) - count(p.uid)
FROM rb_checkpoint c LEFT JOIN (
    SELECT l.buffer, g.uid, g.bytes, g.since, g.until FROM (
        SELECT uid, bytes, lane, since, CAST(NULL AS bigint) AS until FROM rb_group
        UNION ALL SELECT uid, bytes, lane, since, until FROM rb_past WHERE until IS NOT NULL
    ) g JOIN rb_lane l ON l.id = g.lane
) v ON v.buffer = c.buffer AND v.since < c.id AND (v.until IS NULL OR v.until >= c.id)
LEFT JOIN rb_payload p ON p.uid = v.uid GROUP BY c.id, c.step, c.groups, c.bytes ORDER BY c.id"""


def find_checkpoints(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether each checkpoint has as many groups as it records, and their payloads."""
    made = tx.table(_RECORDED)[1]
    for lanes in tx.values("SELECT CAST(lanes AS text) FROM rb_checkpoint"):
        json.loads(lanes)  # SQLite allows any text there; without the lanes nothing can be restored
    wrong = [text for row in made if (text := _wrong_checkpoint(*map(int, row)))]
    mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
    if wrong:
        return [problem(some(wrong, 3), mend)]
    steps = f" (steps {some([row[0] for row in made])})" if made else ""
    left = len(tx.values(DROPPED))
    waiting = f"; what is left of {units.number_of(left, 'dropped checkpoint')} waits to be swept" if left else ""
    return [fine((f"{len(made):,}, all whole{steps}" if made else "none") + waiting)]


def _wrong_checkpoint(step: int, groups: int, nbytes: int, groups_there: int, bytes_there: int, bare: int) -> str:
    if (groups_there, bytes_there) != (groups, nbytes):
        said = f"{groups:,} groups of {nbytes:,} bytes"
        return f"the checkpoint of step {step} had {said}, and has {groups_there:,} of {bytes_there:,}"
    if bare:
        return f"{bare:,} of the {groups_there:,} payloads of the checkpoint of step {step} are missing"
    return ""


COUNT_CHECKS = (
    Check("counts", find_counts),
    Check("totals", find_totals),
    Check("uids", find_uids),
    Check("leases", find_leases),
    Check("deliveries", find_deliveries),
    Check("checkpoints", find_checkpoints),
)
