"""Making a checkpoint: begun, copied, published; in one transaction, or in one for each of many pieces.

PostgreSQL copies from one state of the database while others write. SQLite has one writer at a time, who would have to
wait for all of the copy. There it is made in pieces, behind a mark: a row of `rb_checkpoint` with what is small, and
the uid up to which groups have been copied. Until it is published, triggers copy each group beyond that uid as it was
at the mark when anybody is about to change or remove it.

So neither the state nor the payloads that it needs depend on the maker being alive: a mark whose maker has been silent
is dropped by the first process to notice, and its groups are left to the sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, literal, not_, select, update

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, cursor, group
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.tickets import next_ticket
from replaybuf.storage.values import Checkpoint

#: A maker that has copied nothing for so long is gone. (One that isn't begins anew.)
SILENT_SECONDS = 10.0

#: The checkpoints that can be restored.
whole: ColumnElement[bool] = checkpoint.c.copied_to.is_(None)


class DroppedError(Exception):
    """The mark is gone: the buffer was restored, or its maker had been silent for too long."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint that is being made: when it was begun, the last uid given by then, and up to which it is copied."""

    id: int
    step: int
    created_at: float
    last: int
    copied_to: int = 0


def begin(tx: Transaction, step: int, now: float) -> Mark:
    """Mark the present state as that of a checkpoint, with no groups copied yet."""
    lanes = [row._asdict() for row in all_lanes(tx)]
    values = {
        "buffer": tx.scope.buffer,
        "step": step,
        "created_at": now,
        "groups": 0,
        "bytes": 0,
        "next_ticket": next_ticket(tx),
        "lanes": lanes,
        "tallies": read_lane_tallies(tx, [row["id"] for row in lanes]),
        "copied_to": 0,
    }
    new = tx.execute(insert(checkpoint).values(values).returning(checkpoint.c.id)).scalar_one()
    _copy_cursors(tx, new)
    return Mark(new, step, now, tx.dialect.last_uid(tx.connection))


def keep_changing(tx: Transaction, mark: Mark) -> None:
    """Copy groups before they change from now on: the others are copied in later transactions."""
    lanes = [row["id"] for row in _find(tx, mark).lanes]
    tx.dialect.begin_keeping(tx, mark.id, mark.last, lanes)


def next_bound(tx: Transaction, mark: Mark, groups: int) -> int:
    """Return the uid up to which there are so many groups of any buffer to copy next; the last one when they end.

    Looking for it reads the pages that the copy will need, while others may write.
    """
    left = select(group.c.uid).where(group.c.uid > mark.copied_to, group.c.uid <= mark.last)
    found = tx.execute(left.order_by(group.c.uid).offset(groups - 1).limit(1)).scalar()
    return mark.last if found is None else int(found)


def copy_groups(tx: Transaction, mark: Mark, up_to: int, now: float) -> Mark:
    """Copy the next groups, up to a uid. Raises DroppedError."""
    row = _find(tx, mark)
    between = group.c.uid > mark.copied_to, group.c.uid <= up_to
    copy_rows(tx, mark.id, and_(*between, group.c.lane.in_([one["id"] for one in row.lanes])))
    copied = checkpoint_group.c.uid > mark.copied_to, checkpoint_group.c.uid <= up_to
    count, size = size_of(tx, mark.id, *copied)
    values = {"groups": row.groups + count, "bytes": row.bytes + size, "copied_to": up_to, "created_at": now}
    tx.execute(update(checkpoint).where(checkpoint.c.id == mark.id).values(values))
    return replace(mark, copied_to=up_to)


def publish(tx: Transaction, mark: Mark) -> Checkpoint:
    """Make a checkpoint whose groups are copied one that can be restored. Raises DroppedError."""
    row = _find(tx, mark)
    tx.dialect.end_keeping(tx, mark.id)
    values = {"copied_to": None, "created_at": mark.created_at}
    tx.execute(update(checkpoint).where(checkpoint.c.id == mark.id).values(values))
    return Checkpoint(mark.step, mark.created_at, row.groups, row.bytes)


def _find(tx: Transaction, mark: Mark) -> Any:
    row = tx.execute(select(checkpoint).where(checkpoint.c.id == mark.id)).first()
    if row is None:
        raise DroppedError
    return row


def _copy_cursors(tx: Transaction, new: int) -> None:
    copied = [literal(new) if column is cursor.c.checkpoint else column for column in cursor.c]
    now = select(*copied).where(cursor.c.buffer == tx.scope.buffer, cursor.c.checkpoint == 0)
    tx.execute(insert(cursor).from_select([column.name for column in cursor.c], now))


def copy_rows(tx: Transaction, checkpoint_id: int, condition: ColumnElement[bool]) -> None:
    """Copy groups as they are into a checkpoint that doesn't have them yet."""
    rows = select(literal(checkpoint_id), *group.columns).where(condition).order_by(group.c.uid)
    into = tx.dialect.insert(checkpoint_group).from_select([column.name for column in checkpoint_group.c], rows)
    tx.execute(into.on_conflict_do_nothing())


def size_of(tx: Transaction, checkpoint_id: int, *conditions: ColumnElement[bool]) -> tuple[int, int]:
    """Return the number of groups of a checkpoint that meet the conditions, and their bytes."""
    chosen = checkpoint_group.c.checkpoint == checkpoint_id, *conditions
    count, size = tx.execute(select(func.count(), func.sum(checkpoint_group.c.bytes)).where(*chosen)).one()
    return int(count), int(size or 0)


# Who makes one


def silent(now: float | ColumnElement[float]) -> ColumnElement[bool]:
    """Return the condition for marks whose maker is gone."""
    return and_(~whole, not_(checkpoint.c.created_at.between(now - SILENT_SECONDS, now + SILENT_SECONDS)))


def is_any_made(tx: Transaction, now: float) -> bool:
    """Return whether somebody is making a checkpoint, of any buffer. They are made one after the other."""
    made = select(checkpoint.c.id).where(~whole, ~silent(now)).limit(1)
    return tx.execute(made).first() is not None


def marks_of_buffer(tx: Transaction) -> list[int]:
    """Return the numbers of the checkpoints of the buffer that are being made, or were given up."""
    ours = select(checkpoint.c.id).where(checkpoint.c.buffer == tx.scope.buffer, ~whole)
    return list(tx.execute(ours).scalars())
