"""Damaged payloads: each payload is read and compared with its checksum."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import select, union

from replaybuf.errors import DecodeError, StorageError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.checkup.orphans import MISSING, Aside, put_aside
from replaybuf.storage.sql.inspection.groups import AS_DICTS
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, group, payload
from replaybuf.storage.sql.statements.columns import uid_in

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 500
_MENDED_AT_ONCE = 50

#: A uid, and the size of its payload in bytes.
Named = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Damaged:
    """Groups with damaged payloads: new findings, those already set aside, and those that only checkpoints have."""

    new: list[int]
    aside: list[int]
    kept: list[int]


def list_payloads(tx: Transaction) -> list[Named]:
    """Return the groups with a payload, including those of checkpoints."""
    kept = checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id))
    in_checkpoints = select(checkpoint_group.c.uid, checkpoint_group.c.bytes).where(kept)
    every = union(select(group.c.uid, group.c.bytes), in_checkpoints).subquery()
    query = select(every).join(payload, payload.c.uid == every.c.uid).order_by(every.c.uid)
    return [(uid, size) for uid, size in tx.execute(query)]


def in_batches(named: Sequence[Named]) -> Iterator[list[int]]:
    """Yield the uids in batches to be read at once."""
    batch: list[int] = []
    size = 0
    for uid, nbytes in named:
        if batch and (size + nbytes > _BATCH_BYTES or len(batch) >= _BATCH_GROUPS):
            yield batch
            batch, size = [], 0
        batch.append(uid)
        size += nbytes
    if batch:
        yield batch


def find_damage(reader: Reader, uids: list[int]) -> dict[int, str]:
    """Return which of these payloads are damaged, and why; payloads that are gone by now don't count."""

    def read(tx: Transaction) -> list[tuple[int, bytes]]:
        query = select(payload.c.uid, payload.c.data).where(payload.c.uid.in_(uids))
        return [(uid, data) for uid, data in tx.execute(query)]

    try:
        rows = reader.read(read)
    except StorageError as error:
        if len(uids) == 1:
            return {uids[0]: f"it can't be read: {error}"}
        half = len(uids) // 2
        return find_damage(reader, uids[:half]) | find_damage(reader, uids[half:])
    return {uid: why for uid, data in rows if (why := _why(data)) is not None}


def sort_damaged(tx: Transaction, uids: Collection[int]) -> Damaged:
    """Return these groups, sorted by where they are."""
    there = set(tx.execute(select(group.c.uid).where(uid_in(tx, sorted(uids)))).scalars())
    aside = _set_aside_already(tx, uids)
    return Damaged(sorted(there - aside), sorted(aside), sorted(set(uids) - there))


def put_damaged_aside(tx: Transaction, uids: Collection[int]) -> Aside:
    """Set aside groups that were found damaged and still are, and return them."""
    left = sorted(set(uids) - _set_aside_already(tx, uids))
    reasons = {}
    for start in range(0, len(left), _MENDED_AT_ONCE):
        query = select(group.c.uid, payload.c.data).outerjoin_from(group, payload, payload.c.uid == group.c.uid)
        for uid, data in tx.execute(query.where(uid_in(tx, left[start : start + _MENDED_AT_ONCE]))):
            if (why := _why(data)) is not None:
                reasons[uid] = why
    return put_aside(tx, reasons)


def _set_aside_already(tx: Transaction, uids: Collection[int]) -> set[int]:
    if not uids:
        return set()
    query = select(group.c.uid).where(uid_in(tx, list(uids)), group.c.error.is_not(None))
    return set(tx.execute(query).scalars())


def _why(data: bytes | None) -> str | None:
    if data is None:
        return MISSING
    try:
        AS_DICTS.verify(data)
    except DecodeError as error:
        return str(error)
    return None
