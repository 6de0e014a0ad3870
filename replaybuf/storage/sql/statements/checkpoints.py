"""Step checkpoints: a row with the lanes, their tallies and the cursors. Groups and payloads aren't copied.

A checkpoint excludes other writers for the time of a few small statements: each write is before it or after it. From
then on, versions of groups that it has are kept when they leave or change (`past`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, literal, select

from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, cursor
from replaybuf.storage.sql.statements.buffer_facts import last_uid, list_checkpoints
from replaybuf.storage.sql.statements.counts import read_lane_tallies, totals
from replaybuf.storage.sql.statements.fence import next_ticket
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.values import Checkpoint, missing_checkpoint


def make_checkpoint(tx: Transaction, step: int, keep: int | None, now: float) -> Checkpoint:
    """Make a checkpoint of the buffer, which replaces an older one of its step. Must exclude other writers.

    All but the last `keep` checkpoints are dropped.
    """
    forget(tx, [row.id for row in tx.execute(_of_buffer(tx).where(checkpoint.c.step == step))])
    lanes = [row._asdict() for row in all_lanes(tx)]
    tallies = read_lane_tallies(tx, [row["id"] for row in lanes])
    groups, size = totals(tallies)
    values = {
        "buffer": tx.scope.buffer,
        "step": step,
        "created_at": now,
        "groups": groups,
        "bytes": size,
        "next_ticket": next_ticket(tx),
        "lanes": lanes,
        "tallies": tallies,
        "last_uid": last_uid(tx),
    }
    tx.newest = new = tx.execute(insert(checkpoint).values(values).returning(checkpoint.c.id)).scalar_one()
    copy_cursors(tx, 0, new)
    note(tx, EventKind.CHECKPOINT, worker=tx.scope.worker, step=step, groups=groups)
    if keep is not None:
        _drop(tx, tx.execute(_of_buffer(tx)).all()[:-keep])
    return Checkpoint(step, now, groups, size)


def read_checkpoints(tx: Transaction) -> list[Checkpoint]:
    """Return the checkpoints of the buffer, in the order in which they were made."""
    made = list_checkpoints(tx, tx.scope.buffer or "")
    return [Checkpoint(one.step, one.created_at, one.groups, one.bytes) for one in made]


def find_checkpoint(tx: Transaction, step: int) -> Any:
    """Return the row of the checkpoint of a step. Raises CheckpointError."""
    row = tx.execute(
        select(checkpoint).where(checkpoint.c.buffer == tx.scope.buffer, checkpoint.c.step == step)
    ).first()
    if row is None:
        raise missing_checkpoint(step, [made.step for made in read_checkpoints(tx)])
    return row


def drop_checkpoint(tx: Transaction, step: int) -> None:
    """Drop the checkpoint of a step. Raises CheckpointError."""
    _drop(tx, [find_checkpoint(tx, step)])


def _drop(tx: Transaction, dropped: Sequence[Any]) -> None:
    forget(tx, [row.id for row in dropped])
    for row in dropped:
        note(tx, EventKind.CHECKPOINT_DROPPED, worker=tx.scope.worker, step=row.step, groups=row.groups)


def _of_buffer(tx: Transaction) -> Any:
    found = select(*(checkpoint.c[name] for name in ("id", "step", "groups")))
    return found.where(checkpoint.c.buffer == tx.scope.buffer).order_by(checkpoint.c.id)


def forget(tx: Transaction, ids: Sequence[int]) -> None:
    """Drop checkpoints. What only they have is deleted later (`past.pass_on`)."""
    if ids:
        tx.newest = None
        tx.execute(delete(cursor).where(cursor.c.checkpoint.in_(ids)))
        tx.execute(delete(checkpoint).where(checkpoint.c.id.in_(ids)))


def copy_cursors(tx: Transaction, old: int, new: int) -> None:
    """Copy the cursors of a checkpoint to another; 0 has the current ones."""
    copied = [literal(new) if column is cursor.c.checkpoint else column for column in cursor.c]
    found = select(*copied).where(cursor.c.buffer == tx.scope.buffer, cursor.c.checkpoint == old)
    tx.execute(insert(cursor).from_select([column.name for column in cursor.c], found))
