"""The past of groups: versions of rows that left `rb_group`, or were changed there.

A row moves there when its group leaves, and is copied there before the first change after a checkpoint. Versions that a
checkpoint has are kept with it (`schema.tables` says which); the others wait for the sweep. A dropped checkpoint passes
its versions on to the one before it. What draws had is kept with their batches, without payloads: a draw that removes
groups moves them, with its id; one that leaves them copies them (`batches`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import text

from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import STALENESS_NOW, VERSION, group
from replaybuf.storage.sql.statements.buffer_facts import DROPPED
from replaybuf.storage.sql.statements.files import count_gone

_COLUMNS = ", ".join(column.name for column in group.columns)


def newest(tx: Transaction) -> int:
    """Return the id of the buffer's newest checkpoint, 0 for none; it stays so until the end of a write transaction."""
    if tx.newest is None:
        [(tx.newest,)] = tx.fetch(_NEWEST, tx.scope.buffer)
    return tx.newest


_NEWEST = Prepared(lambda _: text("SELECT coalesce(max(id), 0) FROM rb_checkpoint WHERE buffer = :buffer"), "buffer")


def _of_uids(statement: str, *names: str) -> Prepared:
    """Return a statement about groups: `{uids}` is the condition on them, `{locked}` locks their rows."""

    def build(dialect: Dialect) -> Any:
        given = {"locked": dialect.locked, "skip": dialect.skip, "now": dialect.now}
        return text(statement.format(uids=f"uid {dialect.among('uids')}", **given))

    return Prepared(build, *names)


# Changes and removals


def keep(tx: Transaction, uids: Iterable[int]) -> None:
    """Keep these groups as they are for the checkpoints that have them; call it before they are changed."""
    if (at := newest(tx)) and (uids := list(uids)):
        listed = tx.dialect.listed(uids)
        tx.fetch(_COPY, at, listed)
        tx.fetch(_BEGIN, at, listed)


_COPY = _of_uids(
    f"""
INSERT INTO rb_past ({_COLUMNS}, until, removed_at)
SELECT {_COLUMNS}, CAST(:newest AS bigint), {{now}} FROM rb_group
WHERE {{uids}} AND since < CAST(:newest AS bigint) {{locked}}""",  # noqa: S608
    "newest",
    "uids",
)
_BEGIN = _of_uids("UPDATE rb_group SET since = :newest WHERE {uids} AND since < :newest", "newest", "uids")


def leave(tx: Transaction, uids: Sequence[int], draw: int = 0) -> Counter[tuple[int, Tally]]:
    """Remove groups, which become past, by a draw or not; return the changes of the tallies of bytes."""
    gone: Counter[tuple[int, Tally]] = Counter()
    if uids:
        for lane, size in tx.dialect.move_to_past(tx, uids, newest(tx), draw):
            gone[(lane, Tally.BYTES)] -= size if type(size) is int else 0
    return gone


# Draws


def record_of(draw: str, uids: str) -> str:
    """Return the text of the statement that copies groups for a draw, given as text, as are the groups' uids."""
    return f"""INSERT INTO rb_past ({_COLUMNS}, draw, staleness)
SELECT {_COLUMNS}, {draw}, {STALENESS_NOW} FROM rb_group WHERE uid {uids}"""  # noqa: S608


def record(tx: Transaction, draw: int, uids: Iterable[int]) -> None:
    """Copy those of these groups that have stayed in the buffer, as groups of a draw."""
    tx.fetch(_RECORD, draw, tx.dialect.listed(uids))


_RECORD = Prepared(
    lambda dialect: text(record_of("CAST(:draw AS bigint)", dialect.among("uids"))),
    "draw",
    "uids",
)


def come_back(tx: Transaction, uid: int, since: int) -> None:
    """Forget that a group has changed or left since this version, which is in `rb_group` again."""
    tx.fetch(_FORGET, uid, since)


_FORGET = Prepared(
    lambda _: text("DELETE FROM rb_past WHERE uid = :uid AND since >= :since AND removed_at IS NOT NULL"),
    "uid",
    "since",
)


def lock(tx: Transaction, uids: Iterable[int]) -> None:
    """Lock the past of groups: a sweep of them, and of their payloads, has ended or skips them."""
    if tx.dialect.locks_rows:
        tx.fetch(_LOCK, tx.dialect.listed(sorted(uids)))


_LOCK = _of_uids("SELECT uid FROM rb_past WHERE {uids} ORDER BY uid, since FOR UPDATE", "uids")


def in_checkpoints(tx: Transaction, uids: Iterable[int]) -> set[int]:
    """Return those of these groups of which a checkpoint has a past version."""
    return {uid for (uid,) in tx.fetch(_IN_CHECKPOINTS, tx.dialect.listed(uids))}


_IN_CHECKPOINTS = _of_uids("SELECT DISTINCT uid FROM rb_past WHERE {uids} AND until > 0", "uids")


# Restores

#: Whether a version is of a draw that is recorded.
_RECORDED = "draw > 0 AND EXISTS (SELECT 1 FROM rb_batch b WHERE b.id = draw)"
_OURS = "lane IN (SELECT id FROM rb_lane WHERE buffer = :buffer)"
_VALID = f"until >= :checkpoint AND since < :checkpoint AND {_OURS}"


def changed_since(tx: Transaction, checkpoint: int, last_uid: int) -> list[int]:
    """Return the groups that were put or changed since a checkpoint, or restored from an earlier one."""
    return _begun_since(tx, checkpoint, last_uid)


def put_since(tx: Transaction, checkpoint: int, last_uid: int) -> list[int]:
    """Return those of `changed_since` that the checkpoint doesn't have."""
    return _begun_since(tx, checkpoint, last_uid, f"AND uid NOT IN (SELECT uid FROM rb_past WHERE {_VALID})")  # noqa: S608


def _begun_since(tx: Transaction, checkpoint: int, last_uid: int, condition: str = "") -> list[int]:
    values = {"buffer": tx.scope.buffer, "checkpoint": checkpoint}
    begun = f"SELECT uid FROM rb_group WHERE +{_OURS} AND since >= :checkpoint {condition}"  # noqa: S608
    if not last_uid:
        return sorted(tx.values(begun, **values))
    # Such a group is newer than the checkpoint, or this has a version of it: others aren't read.
    newer = f"SELECT uid FROM rb_group WHERE uid > :last_uid UNION SELECT uid FROM rb_past WHERE {_VALID}"  # noqa: S608
    found = tx.dialect.listed(tx.values(newer, **values, last_uid=last_uid))
    return sorted(tx.values(f"{begun} AND uid {tx.dialect.among('uids')}", **values, uids=found))


def bring_back(tx: Transaction, checkpoint: int) -> None:
    """Return the versions of a checkpoint whose groups have left or changed since; the present ones have left.

    A version that the newest checkpoint has, too, goes on as it was: restoring it again costs nothing. A copy of
    another one begins now.
    """
    key = newest(tx), tx.scope.buffer, checkpoint
    tx.fetch(_RETURN, *key)
    for drawn, others in _OVER:
        tx.fetch(drawn, *key)
        tx.fetch(others, *key)


_BACK = ", ".join(
    "CASE WHEN until < CAST(:newest AS bigint) THEN CAST(:newest AS bigint) ELSE since END"
    if column.name == "since"
    else column.name
    for column in group.columns
)


def _returning(statement: str) -> Prepared:
    return Prepared(lambda _: text(statement), "newest", "buffer", "checkpoint")


_RETURN = _returning(f"INSERT INTO rb_group ({_COLUMNS}) SELECT {_BACK} FROM rb_past WHERE {_VALID} ORDER BY +uid")  # noqa: S608
# Versions of the same groups that no checkpoint has (another change would leave one with the same key), and those that
# go on. Those of recorded draws stay as such.
_OVER = [
    (
        _returning(f"UPDATE rb_past SET until = NULL, removed_at = NULL WHERE {over} AND {_RECORDED}"),  # noqa: S608
        _returning(f"DELETE FROM rb_past WHERE {over} AND removed_at IS NOT NULL"),  # noqa: S608
    )
    for over in (
        f"since >= :newest AND uid IN (SELECT uid FROM rb_past WHERE {_VALID})",  # noqa: S608
        f"until >= :newest AND {_VALID}",
    )
]


# The sweep


def may_sweep(tx: Transaction) -> bool:
    """Return whether this transaction may sweep. One does at a time: two with versions of one group would each leave
    its payload to the other."""
    return tx.dialect.try_lock(tx, Lock.SWEEP)


def sweep(tx: Transaction, removed_before: float, limit: int) -> int:
    """Sweep the oldest `limit` versions removed before a time that no checkpoint has; return their number.

    Those of recorded draws stay, without payloads; others are deleted.
    """
    if not may_sweep(tx):
        return 0
    due = tx.fetch(_DUE, removed_before, limit)
    if due:
        uids = tx.dialect.listed({uid for uid, *_ in due})
        recorded = {id for (id,) in tx.fetch(_RECORDED_OF, tx.dialect.listed({draw for *_, draw in due}))}
        tx.run_many(_STAY, [key for key in due if key[2] in recorded])
        tx.run_many(_SWEEP, [key for key in due if key[2] not in recorded])
        _delete_payloads(tx, uids)
    return len(due)


def _delete_payloads(tx: Transaction, uids: Any) -> None:
    """Delete the payloads of those of these groups of which no version is left but those of draws."""
    count_gone(tx, (file for (file,) in tx.fetch(_DELETE, uids)))


_DUE = _of_uids(
    """SELECT uid, since, draw FROM rb_past WHERE until IS NULL AND removed_at <= CAST(:before AS double precision)
ORDER BY removed_at LIMIT CAST(:limit AS bigint) {skip}""",
    "before",
    "limit",
)
_RECORDED_OF = Prepared(lambda dialect: text(f"SELECT id FROM rb_batch WHERE id {dialect.among('ids')}"), "ids")  # noqa: S608
_KEY = "uid = :uid AND since = :since AND draw = :draw"
_STAY = Prepared(lambda _: text(f"UPDATE rb_past SET removed_at = NULL WHERE {_KEY}"), *VERSION)  # noqa: S608
_SWEEP = Prepared(lambda _: text(f"DELETE FROM rb_past WHERE {_KEY}"), *VERSION)  # noqa: S608
_DELETE = _of_uids(
    """DELETE FROM rb_payload WHERE {uids} AND NOT EXISTS (SELECT 1 FROM rb_group g WHERE g.uid = rb_payload.uid)
AND NOT EXISTS (SELECT 1 FROM rb_past p WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)
RETURNING file""",
    "uids",
)


def pass_on(tx: Transaction, limit: int) -> int:
    """Pass up to `limit` versions of a dropped checkpoint on to the one before it; return their number.

    Versions that this one doesn't have wait for the sweep.
    """
    dropped = tx.fetch(_DROPPED, 1) if may_sweep(tx) else ()
    return sum(len(tx.fetch(_PASS_ON, number, limit)) for (number,) in dropped)


_DROPPED = Prepared(lambda _: text(f"{DROPPED} ORDER BY id LIMIT CAST(:limit AS int)"), "limit")
_EARLIER = """(SELECT max(c.id) FROM rb_checkpoint c JOIN rb_lane l ON l.buffer = c.buffer
    WHERE l.id = rb_past.lane AND c.id < CAST(:dropped AS bigint) AND c.id > rb_past.since)"""
_PASS_ON = Prepared(
    lambda dialect: text(
        f"""UPDATE rb_past SET until = {_EARLIER} WHERE (uid, since, draw) IN (
    SELECT uid, since, draw FROM rb_past WHERE until = CAST(:dropped AS bigint)
    LIMIT CAST(:limit AS bigint) {dialect.locked}
) RETURNING uid"""  # noqa: S608
    ),
    "dropped",
    "limit",
)
