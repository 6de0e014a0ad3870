"""Checks that lanes, uids, checkpoints and counts agree with the groups that are there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from replaybuf.cli.doctor import Check, CheckContext, Finding, fine, groups, problem, repairable
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements.buffer_facts import find_last_uid
from replaybuf.storage.sql.statements.checkpoints import raise_uid
from replaybuf.storage.sql.statements.counts import add_counts, set_aside
from replaybuf.storage.sql.statements.lanes import need_lane
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.values.rollouts.statuses import Status

#: What to do with groups that were set aside.
FORGET = 'buffer.delete({"uid": ...}) when nobody needs to know of them'

_FREE = """SELECT g.uid, l.buffer, l.task_name, l.status FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.uid {in:uids} AND NOT l.leased ORDER BY g.uid"""


def set_groups_aside(tx: Transaction, reasons: Mapping[int, str]) -> list[str]:
    """Set groups with unreadable payloads aside as FAILED, each with its reason as error. Return the repairs done.

    Archived groups stay ARCHIVED, and get the reason, too. Leased groups are left to their consumers.
    """
    homes: dict[tuple[str, str, Status], list[int]] = {}
    for uid, buffer, task_name, status in tx.tuples(_FREE, uids=list(reasons)):
        homes.setdefault((buffer, task_name, Status(status)), []).append(uid)
    done = []
    for (buffer, task_name, status), uids in homes.items():
        why = {uid: reasons[uid] for uid in uids}
        if status == Status.ARCHIVED:
            tx.each("UPDATE rb_group SET error = :error WHERE uid = :uid", [(text, uid) for uid, text in why.items()])
            done.append(f"said so in the error of {groups(len(uids))} of the archive: {some(uids)}")
        else:
            own = tx.of(Scope(buffer))
            set_aside(own, need_lane(own, (task_name, status)), why)
            done.append(f"set {groups(len(uids))} of the task {task_name} aside as failed: {some(uids)}")
    return done


# Lanes

#: The task for groups whose own task is unknown, and their error.
LOST = "lost+found"
_WHY_LOST = "its task and status were lost"
_LANELESS = "SELECT uid FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = g.lane) ORDER BY uid"


def _find_lanes(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether every group has a lane."""
    if uids := tx.values(_LANELESS):
        return [repairable(f"{groups(len(uids))} of no task and status: {some(uids)}")]
    lanes = units.number_of(tx.value("SELECT count(*) FROM rb_lane"), "lane")
    return [fine(f"every group is in one of {lanes} (a task's groups of one status)")]


_SET_APART = """UPDATE rb_group SET lane = :lane, error = :error, lease = NULL, leased_until = NULL, holder = NULL,
pinned_staleness = coalesce(pinned_staleness, 0) WHERE uid {in:uids}"""


def _repair_lanes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set groups without a lane aside, as FAILED groups of a task of their own."""
    if not (uids := tx.values(_LANELESS)):
        return []
    home = need_lane(tx, (LOST, Status.FAILED))
    tx.change(_SET_APART, lane=home.id, error=_WHY_LOST, uids=uids)
    enter_race(tx, home, uids)
    add_counts(tx, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
    return [f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"]


# Counts

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


def _find_counts(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the tallies equal the numbers of groups."""
    wrong = [
        f"{label}: {int(counted):,} {name} counted, {int(there):,} there"
        for _, name, label, counted, there in tx.tuples(_WRONG_COUNTS)
    ]
    if wrong:
        return [repairable("; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if wrong[5:] else ""))]
    count = tx.value("SELECT count(*) FROM rb_group")
    return [fine(f"{groups(count)}, as counted")]


def _repair_counts(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Recount the groups."""
    done = []
    for lane, name, label, counted, there in tx.tuples(_WRONG_COUNTS):
        add_counts(tx, {(lane, Tally(name)): int(there - counted)})
        done.append(f"counted {name} of {label} anew: {int(there - counted):+,}")
    return done


# Uids

_HIGHEST_UID = """
SELECT max(uid) FROM (
    SELECT max(uid) AS uid FROM rb_group UNION ALL SELECT max(lease) FROM rb_group
    UNION ALL SELECT max(uid) FROM rb_payload UNION ALL SELECT max(uid) FROM rb_past
    UNION ALL SELECT max(last_uid) FROM rb_batch UNION ALL SELECT max(lease) FROM rb_batch) used"""


def _find_uids(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the next uid is unused."""
    used, last = tx.value(_HIGHEST_UID) or 0, find_last_uid(tx)
    if last is None:
        return [repairable("the counter of uids is gone")]
    if last < used:
        return [repairable(f"uid {used:,} is in use, and the counter is at {last:,}: puts would fail")]
    return [fine(f"the last one given is {last:,}")]


def _repair_uids(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Move the counter of uids past those in use."""
    used, last = tx.value(_HIGHEST_UID) or 0, find_last_uid(tx)
    if last is None:
        tx.change("INSERT INTO rb_counter (name, value) VALUES ('uid', 0)")
    elif last >= used:
        return []
    raise_uid(tx, used)
    return [f"raised the counter of uids from {last or 0:,} to {used:,}"]


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


def _find_checkpoints(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether each checkpoint has as many groups as it records, and their payloads."""
    made = tx.tuples(_RECORDED)
    for lanes in tx.values("SELECT CAST(lanes AS text) FROM rb_checkpoint"):
        json.loads(lanes)  # SQLite allows any text there; without the lanes nothing can be restored
    if wrong := [text for row in made if (text := _wrong_checkpoint(*map(int, row)))]:
        mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
        return [problem(some(wrong, 3), mend)]
    return [fine(f"{len(made):,}, all whole (steps {some([row[0] for row in made])})" if made else "none")]


def _wrong_checkpoint(step: int, groups: int, nbytes: int, groups_there: int, bytes_there: int, bare: int) -> str:
    if (groups_there, bytes_there) != (groups, nbytes):
        said = f"{groups:,} groups of {nbytes:,} bytes"
        return f"the checkpoint of step {step} had {said}, and has {groups_there:,} of {bytes_there:,}"
    if bare:
        return f"{bare:,} of the {groups_there:,} payloads of the checkpoint of step {step} are missing"
    return ""


LANES = Check("lanes", _find_lanes, [_repair_lanes])
COUNTS = Check("counts", _find_counts, [_repair_counts])
UIDS = Check("uids", _find_uids, [_repair_uids])
CHECKPOINTS = Check("checkpoints", _find_checkpoints)
