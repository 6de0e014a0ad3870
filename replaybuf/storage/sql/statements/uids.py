"""Uids: reserving them, and making room for those of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, exists, func, or_, select, union

from replaybuf.storage.portable import check_empty
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import (
    checkpoint,
    checkpoint_group,
    cursor,
    garbage,
    group,
    lane,
    payload,
    tally,
)
from replaybuf.storage.sql.statements.checkpoints import forget, may_sweep
from replaybuf.storage.sql.statements.making import marks_of_buffer


def uids_in_checkpoints(tx: Transaction, uids: Iterable[int]) -> list[int]:
    """Return those of these groups that a checkpoint of the buffer has, or may have once it is made."""
    chosen = list(uids)
    if not chosen:
        return []
    if not may_sweep(tx):  # one that is being made in a transaction of its own; none will be before the end of this
        return sorted(chosen)
    if not tx.scope.checkpoint:
        return []
    ours = checkpoint.c.buffer == tx.scope.buffer
    copied = select(checkpoint_group.c.uid).where(
        checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id).where(ours)), checkpoint_group.c.uid.in_(chosen)
    )
    being_made = exists().where(ours, group.c.uid > checkpoint.c.copied_to)
    to_be_copied = select(group.c.uid).where(group.c.uid.in_(chosen), being_made)
    return sorted(tx.execute(union(copied, to_be_copied)).scalars())


def make_room(tx: Transaction) -> None:
    """Remove the remains of an empty buffer. Raises NotEmptyError when it isn't empty."""
    ours = select(lane.c.id).where(lane.c.buffer == tx.scope.buffer)
    count = int(tx.execute(select(func.count()).where(group.c.lane.in_(ours))).scalar_one())
    forget(tx, marks_of_buffer(tx))
    steps = select(checkpoint.c.step).where(checkpoint.c.buffer == tx.scope.buffer).order_by(checkpoint.c.id)
    check_empty(count, list(tx.execute(steps).scalars()))
    tx.execute(delete(cursor).where(cursor.c.buffer == tx.scope.buffer))
    tx.execute(delete(tally).where(tally.c.lane.in_(ours)))
    tx.execute(delete(lane).where(lane.c.buffer == tx.scope.buffer))
    # Garbage of other buffers may yet be given back to them, or belong to their checkpoints: the sweep knows when to
    # delete it.
    if not tx.execute(select(exists().where(lane.c.buffer != tx.scope.buffer))).scalar():
        tx.execute(delete(payload).where(payload.c.uid.in_(select(garbage.c.uid))))
        tx.execute(delete(garbage))


def free_shift(tx: Transaction, last: int) -> int:
    """Return what to add to a snapshot's uids, up to `last`: 0 unless other buffers of the database use them."""
    taken = or_(exists().where(payload.c.uid <= last), exists().where(garbage.c.uid <= last))
    return tx.dialect.last_uid(tx.connection) if tx.execute(select(taken)).scalar() else 0


def raise_uid(tx: Transaction, last: int) -> None:
    """Make sure that no uid up to `last` is given again."""
    tx.dialect.set_last_uid(tx.connection, max(last, tx.dialect.last_uid(tx.connection)))
