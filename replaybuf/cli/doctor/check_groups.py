"""Checks that lanes, uids, checkpoints and counts agree with the groups that are there."""

from __future__ import annotations

import json
from collections.abc import Iterator

from replaybuf.cli.doctor import Examination, Finding, fine, groups, in_one_transaction, problem, repairable
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import find_last_uid
from replaybuf.storage.sql.statements.checkpoints import raise_uid
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.lanes import need_lane
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.values.rollouts.statuses import Status

#: The task for groups whose own task is unknown, and their error.
LOST = "lost+found"
_WHY_LOST = "its task and status were lost"
_LANELESS = "SELECT uid FROM rb_group g WHERE NOT EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = g.lane) ORDER BY uid"
_SET_ASIDE = """UPDATE rb_group SET lane = :lane, error = :error, lease = NULL, leased_until = NULL, holder = NULL,
pinned_staleness = coalesce(pinned_staleness, 0) WHERE uid {in:uids}"""


@in_one_transaction
def check_lanes(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether every group has a lane. Without one it becomes a FAILED group of a task of its own."""
    uids = tx.values(_LANELESS)

    def cure() -> str:
        home = need_lane(tx, (LOST, Status.FAILED))
        tx.change(_SET_ASIDE, lane=home.id, error=_WHY_LOST, uids=uids)
        enter_race(tx, home, uids)
        add_counts(tx, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
        return f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"

    if uids:
        yield repairable(f"{groups(len(uids))} of no task and status: {some(uids)}", cure)
    else:
        lanes = units.number_of(tx.value("SELECT count(*) FROM rb_lane"), "lane")
        yield fine(f"every group is in one of {lanes} (a task's groups of one status)")


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
def check_counts(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether the tallies equal the numbers of groups."""
    wrong = [(*row[:3], int(row[3]), int(row[4])) for row in tx.tuples(_WRONG_COUNTS)]

    def cure() -> str:
        for lane, name, _, counted, there in wrong:
            add_counts(tx, {(lane, Tally(name)): there - counted})
        return "counted again " + "; ".join(
            f"{name} of {label} ({there - counted:+,})" for _, name, label, counted, there in wrong
        )

    if wrong:
        said = [f"{label}: {counted:,} {name} counted, {there:,} there" for _, name, label, counted, there in wrong]
        yield repairable(some(said), cure)
    else:
        count = tx.value("SELECT count(*) FROM rb_group")
        yield fine(f"{groups(count)}, as counted")


_HIGHEST_UID = """
SELECT max(uid) FROM (
    SELECT max(uid) AS uid FROM rb_group UNION ALL SELECT max(lease) FROM rb_group
    UNION ALL SELECT max(uid) FROM rb_payload UNION ALL SELECT max(uid) FROM rb_past
    UNION ALL SELECT max(last_uid) FROM rb_batch UNION ALL SELECT max(lease) FROM rb_batch) used"""


@in_one_transaction
def check_uids(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether the next uid is unused."""
    used, last = tx.value(_HIGHEST_UID) or 0, find_last_uid(tx)

    def cure() -> str:
        if last is None:
            tx.change("INSERT INTO rb_counter (name, value) VALUES ('uid', 0)")
        raise_uid(tx, used)
        return f"raised the counter of uids from {last or 0:,} to {used:,}"

    if last is None:
        yield repairable("the counter of uids is gone", cure)
    elif last < used:
        yield repairable(f"uid {used:,} is in use, and the counter is at {last:,}: puts would fail", cure)
    else:
        yield fine(f"the last one given is {last:,}")


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
def check_checkpoints(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether each checkpoint has as many groups as it records, and their payloads."""
    made = tx.tuples(_RECORDED)
    for lanes in tx.values("SELECT CAST(lanes AS text) FROM rb_checkpoint"):
        json.loads(lanes)  # SQLite allows any text there; without the lanes nothing can be restored
    if wrong := [text for row in made if (text := _wrong_checkpoint(*map(int, row)))]:
        mend = "make another one, then buffer.drop_checkpoint(step); a restore would bring back what is there"
        yield problem(some(wrong, 3), mend)
    else:
        yield fine(f"{len(made):,}, all whole (steps {some([row[0] for row in made])})" if made else "none")


def _wrong_checkpoint(step: int, groups: int, nbytes: int, groups_there: int, bytes_there: int, bare: int) -> str:
    if (groups_there, bytes_there) != (groups, nbytes):
        said = f"{groups:,} groups of {nbytes:,} bytes"
        return f"the checkpoint of step {step} had {said}, and has {groups_there:,} of {bytes_there:,}"
    if bare:
        return f"{bare:,} of the {groups_there:,} payloads of the checkpoint of step {step} are missing"
    return ""
