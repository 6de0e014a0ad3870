"""The history table `rb_past`: versions of groups that were drawn, replaced or changed, for undo and restores.

A row moves there when its group leaves, and is copied there before the first change after a checkpoint. Versions that a
checkpoint has are kept with it (`schema.tables` says which); the others wait for the sweep. A dropped checkpoint passes
its versions on to the one before it. What draws had is kept with their batches, without payloads: a draw that removes
groups moves them, with its id; one that leaves them copies them (`batches`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import STALENESS_NOW, group
from replaybuf.storage.sql.statements.buffer_facts import DROPPED
from replaybuf.storage.sql.statements.files import count_gone

#: The columns of a version that are those of its group.
COLUMNS = ", ".join(column.name for column in group.columns)


def newest(tx: Transaction) -> int:
    """Return the id of the buffer's newest checkpoint, 0 for none, which the fence has read in this transaction."""
    assert tx.newest is not None, "the fence comes first"
    return tx.newest


# Changes and removals

#: The most groups that leave while the answer to COMMIT is awaited, for which there is a timeout.
_MOST_SENT = 1000


def keep(tx: Transaction, uids: Iterable[int]) -> None:
    """Keep these groups as they are for the checkpoints that have them; call it before they are changed."""
    if (at := newest(tx)) and (uids := list(uids)):
        tx.change(_COPY, newest=at, uids=uids, now=time.time())
        tx.change("UPDATE rb_group SET since = :newest WHERE uid {in:uids} AND since < :newest", newest=at, uids=uids)


_COPY = f"""{{insert}} INTO rb_past ({COLUMNS}, until, removed_at)
SELECT {COLUMNS}, CAST(:newest AS bigint), {{moment:now}} FROM rb_group
WHERE uid {{in:uids}} AND since < CAST(:newest AS bigint) {{lock}}"""  # noqa: S608


def leave(tx: Transaction, uids: Sequence[int], *, drawn: bool = False) -> Counter[tuple[int, Tally]]:
    """Remove groups, which become past; those that are `drawn` are of the transaction's last batch.

    Returns the changes of the tallies of bytes that aren't written yet.
    """
    changes: Counter[tuple[int, Tally]] = Counter()
    values = {"uids": uids, "newest": newest(tx), "now": time.time()}
    if uids and tx.dialect.is_remote:
        (tx.send if len(uids) <= _MOST_SENT else tx.change)(_MOVE[drawn], **values)
    elif uids:
        tx.change(f"{_GONE[drawn]} FROM rb_group WHERE uid {{in:uids}}", **values)
        for lane, size in tx.tuples("DELETE FROM rb_group WHERE uid {in:uids} RETURNING lane, bytes", uids=uids):
            changes[(lane, Tally.BYTES)] -= size if type(size) is int else 0
    return changes


def record(tx: Transaction, uids: Sequence[int]) -> None:
    """Copy groups that have stayed in the buffer, as groups of the transaction's last batch."""
    if uids:
        tx.send(_RECORD, uids=uids)


# By whether the groups are of the last batch.
_DRAWN = {False: "0, NULL", True: f"{{draw}}, {STALENESS_NOW}"}
_GONE = {
    drawn: f"""{{insert}} INTO rb_past ({COLUMNS}, until, removed_at, draw, staleness)
SELECT {COLUMNS}, CASE WHEN since < CAST(:newest AS bigint) THEN CAST(:newest AS bigint) END, {{moment:now}}, {draw}"""
    for drawn, draw in _DRAWN.items()
}
_MOVE = {
    drawn: f"""WITH gone AS (DELETE FROM rb_group WHERE uid {{in:uids}} RETURNING *), past AS ({insert} FROM gone)
INSERT INTO rb_tally AS own (lane, name, amount, shard)
SELECT lane, 'bytes', -sum(bytes), {{shard}} FROM gone GROUP BY lane
ON CONFLICT (lane, name, shard) DO UPDATE SET amount = own.amount + excluded.amount"""  # noqa: S608
    for drawn, insert in _GONE.items()
}
_RECORD = f"""{{insert}} INTO rb_past ({COLUMNS}, draw, staleness)
SELECT {COLUMNS}, {_DRAWN[True]} FROM rb_group WHERE uid {{in:uids}}"""  # noqa: S608


def come_back(tx: Transaction, uid: int, since: int) -> None:
    """Forget that a group has changed or left since this version, which is in `rb_group` again."""
    sql = "DELETE FROM rb_past WHERE uid = :uid AND since >= :since AND removed_at IS NOT NULL"
    tx.change(sql, uid=uid, since=since)


def lock(tx: Transaction, uids: Iterable[int]) -> None:
    """Lock the past of groups: a sweep of them, and of their payloads, has ended or skips them."""
    if tx.dialect.is_remote:
        tx.tuples("SELECT uid FROM rb_past WHERE uid {in:uids} ORDER BY uid, since {lock}", uids=sorted(uids))


def is_taken(tx: Transaction, key: str, uid: int, made_before: int) -> bool:
    """Return whether a checkpoint after this one has another group of the past with the key of this group."""
    return bool(tx.tuples(_TAKEN_KEY, key=key, uid=uid, buffer=tx.scope.buffer, checkpoint=made_before))


_TAKEN_KEY = """SELECT 1 FROM rb_past p JOIN rb_checkpoint c ON c.id > p.since AND c.id <= p.until
WHERE p.scoped_key = :key AND p.uid <> :uid AND p.until > :checkpoint AND c.id > :checkpoint AND c.buffer = :buffer
LIMIT 1"""


# Restores

#: Whether a version is of a draw that is recorded.
_RECORDED = "draw > 0 AND EXISTS (SELECT 1 FROM rb_batch b WHERE b.id = draw)"
#: The rows of the buffer's lanes.
OURS = "lane IN (SELECT id FROM rb_lane WHERE buffer = :buffer)"
_VALID = f"until >= :checkpoint AND since < :checkpoint AND {OURS}"


def changed_since(tx: Transaction, checkpoint: int, last_uid: int) -> list[int]:
    """Return the groups that were put or changed since a checkpoint, or restored from an earlier one."""
    values = {"buffer": tx.scope.buffer, "checkpoint": checkpoint}
    query = f"SELECT uid FROM rb_group WHERE +{OURS} AND since >= :checkpoint"  # noqa: S608
    if not last_uid:
        return sorted(tx.values(query, **values))
    # Such a group is newer than the checkpoint, or this has a version of it: others aren't read.
    newer = f"SELECT uid FROM rb_group WHERE uid > :last_uid UNION SELECT uid FROM rb_past WHERE {_VALID}"  # noqa: S608
    candidates = tx.values(newer, **values, last_uid=last_uid)
    return sorted(tx.values(f"{query} AND uid {{in:uids}}", **values, uids=candidates))


def bring_back(tx: Transaction, checkpoint: int) -> None:
    """Return the versions of a checkpoint whose groups have left or changed since; the present ones have left.

    A version that the newest checkpoint has, too, goes on as it was: restoring it again costs nothing. A copy of
    another one begins now.
    """
    values = {"newest": newest(tx), "buffer": tx.scope.buffer, "checkpoint": checkpoint}
    tx.change(f"INSERT INTO rb_group ({COLUMNS}) SELECT {_BACK} FROM rb_past WHERE {_VALID} ORDER BY +uid", **values)  # noqa: S608
    for condition in _SUPERSEDED:
        tx.change(f"UPDATE rb_past SET until = NULL, removed_at = NULL WHERE {condition} AND {_RECORDED}", **values)  # noqa: S608
        tx.change(f"DELETE FROM rb_past WHERE {condition} AND removed_at IS NOT NULL", **values)  # noqa: S608


_BACK = ", ".join(
    "CASE WHEN until < CAST(:newest AS bigint) THEN CAST(:newest AS bigint) ELSE since END"
    if column.name == "since"
    else column.name
    for column in group.columns
)


# Versions of the same groups that no checkpoint has (another change would leave one with the same key), and those that
# go on. Those of recorded draws stay as such.
_SUPERSEDED = (
    f"since >= :newest AND uid IN (SELECT uid FROM rb_past WHERE {_VALID})",  # noqa: S608
    f"until >= :newest AND {_VALID}",
)


# The sweep


def may_sweep(tx: Transaction) -> bool:
    """Return whether this transaction may sweep. One does at a time: two with versions of one group would each leave
    its payload to the other."""
    return tx.try_lock(Lock.SWEEP)


def sweep(tx: Transaction, removed_before: float, limit: int) -> int:
    """Sweep the oldest `limit` versions removed before a time that no checkpoint has; return their number.

    Those of recorded draws stay, without payloads; others are deleted.
    """
    if not may_sweep(tx):
        return 0
    due = tx.tuples(_DUE, before=removed_before, limit=limit)
    if due:
        recorded = set(tx.values("SELECT id FROM rb_batch WHERE id {in:ids}", ids=list({draw for *_, draw in due})))
        version = "uid = :uid AND since = :since AND draw = :draw"
        stay, delete = f"UPDATE rb_past SET removed_at = NULL WHERE {version}", f"DELETE FROM rb_past WHERE {version}"  # noqa: S608
        tx.each(stay, [key for key in due if key[2] in recorded])
        tx.each(delete, [key for key in due if key[2] not in recorded])
        # The payloads of groups of which no version is left but those of draws.
        count_gone(tx, tx.values(_DELETE_PAYLOADS, uids=list({uid for uid, *_ in due})))
    return len(due)


_DUE = """SELECT uid, since, draw FROM rb_past WHERE until IS NULL AND removed_at <= :before
ORDER BY removed_at LIMIT :limit {skip}"""
_DELETE_PAYLOADS = """DELETE FROM rb_payload WHERE uid {in:uids}
AND NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_payload.uid)
AND NOT EXISTS (SELECT 1 FROM rb_past p WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)
RETURNING file"""


def pass_on(tx: Transaction, limit: int) -> int:
    """Pass up to `limit` versions of a dropped checkpoint on to the one before it; return their number.

    Versions that this one doesn't have wait for the sweep.
    """
    dropped = tx.values(f"{DROPPED} ORDER BY id LIMIT 1") if may_sweep(tx) else ()
    return sum(tx.change(_PASS_ON, dropped=number, limit=limit) for number in dropped)


_PASS_ON = """UPDATE rb_past SET until = (
    SELECT max(c.id) FROM rb_checkpoint c JOIN rb_lane l ON l.buffer = c.buffer
    WHERE l.id = rb_past.lane AND c.id < :dropped AND c.id > rb_past.since
) WHERE (uid, since, draw) IN (SELECT uid, since, draw FROM rb_past WHERE until = :dropped LIMIT :limit {lock})"""
