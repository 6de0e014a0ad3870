"""Checks that lanes, uids, checkpoints and counts agree with the stored groups."""

from __future__ import annotations

from replaybuf.cli.doctor import Examination, Finding, in_one_transaction, verdict
from replaybuf.common import units
from replaybuf.common.units import groups, some
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import last_uid
from replaybuf.storage.sql.statements.checkpoints import raise_uid
from replaybuf.storage.sql.statements.counts import add_counts

_LANELESS = "SELECT uid FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = g.lane) ORDER BY uid"


@in_one_transaction
def check_lanes(tx: Transaction, examination: Examination) -> Finding:
    """Check whether every group has a lane."""
    uids = tx.values(_LANELESS)
    defect = f"{groups(len(uids))} of no task and status: {some(uids)}" if uids else ""
    lanes = units.number_of(tx.value("SELECT count(*) FROM rb_lane"), "lane")
    mend = "restore the database from a snapshot or a backup"
    return verdict(defect, f"every group is in one of {lanes} (a task's groups of one status)", mend)


# The lane and the name of each tally that is wrong, for people what it counts, what is counted and what is there.
# Leased groups count in the lane that they came from; the bytes of a buffer are the sum of those of its lanes.
_WRONG_COUNTS = """
WITH there AS (
    SELECT coalesce(home.id, l.id) AS lane, CASE WHEN l.leased THEN 'leased' ELSE 'size' END AS name, count(*) AS n
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_lane home ON l.leased AND NOT home.leased
        AND home.buffer = l.buffer AND home.task_name = l.task_name AND home.status = l.status
    GROUP BY 1, 2
), counted AS (
    SELECT lane, name, sum(amount) AS n FROM rb_tally WHERE name IN ('size', 'leased') GROUP BY lane, name
), sizes AS (
    SELECT b.id AS lane, coalesce((SELECT sum(t.amount) FROM rb_lane l JOIN rb_tally t ON t.lane = l.id
        WHERE l.buffer = b.buffer AND t.name = 'bytes'), 0) AS counted, coalesce((SELECT sum(g.bytes) FROM rb_lane l
        JOIN rb_group g ON g.lane = l.id WHERE l.buffer = b.buffer), 0) AS there, b.buffer
    FROM rb_lane b WHERE b.id = (SELECT min(id) FROM rb_lane l WHERE l.buffer = b.buffer)
)
SELECT l.id, k.name, l.task_name || ' ' || l.status, coalesce(c.n, 0), coalesce(t.n, 0)
FROM rb_lane l CROSS JOIN (SELECT 'size' AS name UNION ALL SELECT 'leased') k
LEFT JOIN counted c ON c.lane = l.id AND c.name = k.name LEFT JOIN there t ON t.lane = l.id AND t.name = k.name
WHERE coalesce(c.n, 0) <> coalesce(t.n, 0)
UNION ALL SELECT lane, 'bytes', 'the buffer ' || buffer, counted, there FROM sizes WHERE counted <> there
ORDER BY 1, 2"""


@in_one_transaction
def check_counts(tx: Transaction, examination: Examination) -> Finding:
    """Check whether the tallies equal the numbers of groups."""
    rows = tx.tuples(_WRONG_COUNTS)
    defects = [f"{label}: {counted:,} {name} counted, {real:,} there" for _, name, label, counted, real in rows]
    count = tx.value("SELECT count(*) FROM rb_group")
    return verdict(some(defects), f"{groups(count)} outside of checkpoints, as counted", cure=mend_counts)


def mend_counts(tx: Transaction) -> str:
    """Correct tallies that are wrong; return "" if none is."""
    corrections = [
        (lane, name, label, int(real) - int(counted)) for lane, name, label, counted, real in tx.tuples(_WRONG_COUNTS)
    ]
    add_counts(tx, {(lane, Tally(name)): difference for lane, name, _, difference in corrections})
    changes = [f"{name} of {label} ({difference:+,})" for _, name, label, difference in corrections]
    return f"counted again {'; '.join(changes)}" if changes else ""


_HIGHEST_UID = """
SELECT max(uid) FROM (
    SELECT max(uid) AS uid FROM rb_group UNION ALL SELECT max(lease) FROM rb_group
    UNION ALL SELECT max(uid) FROM rb_payload UNION ALL SELECT max(uid) FROM rb_past
    UNION ALL SELECT max(last_uid) FROM rb_batch UNION ALL SELECT max(lease) FROM rb_batch) used"""


@in_one_transaction
def check_uids(tx: Transaction, examination: Examination) -> Finding:
    """Check whether the next uid is unused."""
    highest, last = tx.value(_HIGHEST_UID) or 0, last_uid(tx)
    defect = f"uid {highest:,} is in use, and the counter is at {last:,}: puts would fail" if last < highest else ""
    return verdict(defect, f"the last one given is {last:,}", cure=_raise_uids)


def _raise_uids(tx: Transaction) -> str:
    highest, last = tx.value(_HIGHEST_UID) or 0, last_uid(tx)
    raise_uid(tx, highest)
    return f"raised the counter of uids from {last:,} to {highest:,}"


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


@in_one_transaction
def check_checkpoints(tx: Transaction, examination: Examination) -> Finding:
    """Check whether each checkpoint has as many groups as it records, and their payloads."""
    rows = tx.tuples(_RECORDED)
    defects = [text for row in rows if (text := _wrong_checkpoint(*map(int, row)))]
    summary = f"{len(rows):,}, all whole (steps {some([row[0] for row in rows])})" if rows else "none"
    mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
    return verdict(some(defects, 3), summary, mend)


def _wrong_checkpoint(step: int, groups: int, nbytes: int, groups_there: int, bytes_there: int, missing: int) -> str:
    if (groups_there, bytes_there, missing) == (groups, nbytes, 0):
        return ""
    there = f"{groups_there:,} of {bytes_there:,}, {missing:,} of them without payload"
    return f"the checkpoint of step {step} had {groups:,} groups of {nbytes:,} bytes, and has {there}"
