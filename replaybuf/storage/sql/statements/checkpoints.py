"""Step checkpoints: a buffer's metadata, copied inside the database. Payloads are kept in place.

A payload is kept while a group or a checkpoint has its uid. PostgreSQL copies from one snapshot during concurrent
writes; an advisory lock blocks sweeps meanwhile, so that no payload that the copy needs is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, insert, literal, not_, select, update

from replaybuf.rules.transitions import Tally
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Prepared, Row, Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, cursor, garbage, group
from replaybuf.storage.sql.statements.buffer_facts import MAKER_SILENT_SECONDS, last_uid, list_checkpoints
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.fence import next_ticket
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.sql.statements.rows import STORED, uid_in
from replaybuf.storage.values import Checkpoint, missing_checkpoint


def keep_sweeps_away(tx: Transaction) -> None:
    """Block sweeps, and the making of other checkpoints, until the end of the transaction."""
    tx.dialect.lock(tx, Lock.SWEEP)


def may_sweep(tx: Transaction) -> bool:
    """Return whether no checkpoint is being made in its own transaction; none starts before the end of this one."""
    return tx.dialect.try_lock(tx, Lock.SWEEP, shared=True)


def make_checkpoint(tx: Transaction, step: int, keep: int | None, now: float) -> Checkpoint:
    """Make a checkpoint in one step: copy the metadata of the buffer's groups, its lanes, tallies and cursors.

    All but the last `keep` checkpoints are dropped.
    """
    mark = begin(tx, step, now)
    return publish_alone(tx, copy_groups(tx, mark, mark.last, now), keep)


def make_beginning(tx: Transaction, step: int, keep: int | None, now: float, groups: int) -> Mark | Checkpoint | None:
    """Begin an incremental checkpoint and copy its first groups; return it complete if these are all.

    Returns None when another checkpoint is being made.
    """
    forget(tx, list(tx.execute(select(checkpoint.c.id).where(silent(now))).scalars()))
    if is_any_made(tx, now):
        return None
    mark = begin(tx, step, now)
    mark = copy_groups(tx, mark, next_bound(tx, mark, groups), now)
    if mark.copied_to == mark.last:
        return publish_alone(tx, mark, keep)
    keep_changing(tx, mark)
    return mark


def publish_alone(tx: Transaction, mark: Mark, keep: int | None) -> Checkpoint:
    """Publish a checkpoint; drop an older one of its step, and all but the last `keep`."""
    of_step = select(checkpoint.c.id).where(checkpoint.c.buffer == tx.scope.buffer, checkpoint.c.step == mark.step)
    forget(tx, list(tx.execute(of_step.where(whole)).scalars()))
    made = publish(tx, mark)
    note(tx, EventKind.CHECKPOINT, worker=tx.scope.worker, step=made.step, groups=made.groups)
    if keep is not None:
        _drop(tx, tx.execute(_of_buffer(tx)).all()[:-keep])
    return made


@dataclass(frozen=True, slots=True)
class Undone:
    """A draw that was undone because its caller didn't receive it.

    `since` is the id of the last checkpoint at the draw, `drawn` has the number of earlier draws of each group,
    `counts` are the changes of the tallies by the undo, and `rows` are the groups after it.
    """

    since: int
    drawn: Mapping[int, int]
    counts: Mapping[tuple[int, Tally], int]
    rows: Sequence[Row]

    @classmethod
    def now(
        cls, tx: Transaction, since: int, drawn: Mapping[int, int], counts: Mapping[tuple[int, Tally], int]
    ) -> Self:
        """Return a draw that was undone in this transaction."""
        return cls(since, drawn, counts, tx.fetch(_STORED, tx.dialect.listed(drawn)))


# JSON as text, which may be damaged.
_STORED = Prepared(lambda dialect: select(*STORED).where(dialect.one_of(group.c.uid, "uids")), "uids")


def undo_draw(tx: Transaction, undone: Undone) -> Undone | None:
    """Undo a draw in the checkpoints made after it.

    Returns the rest of the undo, to be run after the commit of a checkpoint being made in its own transaction; or None.
    """
    none_is_made = may_sweep(tx)
    drawn, newest = undone.drawn, undone.since
    later = select(checkpoint).where(checkpoint.c.buffer == tx.scope.buffer, checkpoint.c.id > undone.since)
    for made in tx.execute(later.order_by(checkpoint.c.id)).all():
        newest = made.id
        ours = uid_in(tx, drawn, checkpoint_group.c.uid)
        copied = checkpoint_group.c.checkpoint == made.id, ours
        there = tx.execute(select(checkpoint_group.c.uid, checkpoint_group.c.times_sampled).where(*copied))
        if {row.uid: row.times_sampled for row in there} == drawn:
            continue  # the checkpoint was made before the draw
        counted = ours if made.copied_to is None else and_(ours, checkpoint_group.c.uid <= made.copied_to)
        before, bytes_before = size_of(tx, made.id, counted)
        tx.execute(delete(checkpoint_group).where(*copied))
        tx.insert(checkpoint_group, [(made.id, *row) for row in undone.rows])
        after, bytes_after = size_of(tx, made.id, counted)
        tallies = Counter({(row["lane"], row["name"]): row["amount"] for row in made.tallies})
        tallies.update({(lane_id, str(name)): n for (lane_id, name), n in undone.counts.items()})
        values = {
            "tallies": [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in tallies.items()],
            "groups": made.groups + after - before,
            "bytes": made.bytes + bytes_after - bytes_before,
        }
        tx.execute(update(checkpoint).where(checkpoint.c.id == made.id).values(values))
    return None if none_is_made else replace(undone, since=newest)


def read_checkpoints(tx: Transaction) -> list[Checkpoint]:
    """Return the checkpoints of the buffer, in the order in which they were made."""
    made = list_checkpoints(tx, tx.scope.buffer or "")
    return [Checkpoint(one.step, one.created_at, one.groups, one.bytes) for one in made]


def find_checkpoint(tx: Transaction, step: int) -> Any:
    """Return the row of the checkpoint of a step. Raises CheckpointError."""
    row = tx.execute(_of_buffer(tx).where(checkpoint.c.step == step)).first()
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
    return select(checkpoint).where(checkpoint.c.buffer == tx.scope.buffer, whole).order_by(checkpoint.c.id)


def forget(tx: Transaction, ids: Sequence[int]) -> None:
    """Drop checkpoints, complete or not. Their groups, and unneeded payloads, are deleted by the sweep."""
    if ids:
        for number in ids:
            tx.dialect.end_keeping(tx, number)
        tx.execute(delete(cursor).where(cursor.c.checkpoint.in_(ids)))
        tx.execute(delete(checkpoint).where(checkpoint.c.id.in_(ids)))


def numbers_with_groups() -> Select[int]:
    """Return the query of checkpoint ids with groups, also dropped ones: an index look-up per checkpoint."""
    number = checkpoint_group.c.checkpoint
    found = select(func.min(number).label("number")).cte("found", recursive=True)
    later = select(func.min(number)).where(number > found.c.number).scalar_subquery()
    found = found.union_all(select(later).where(found.c.number.is_not(None)))
    return select(found.c.number).where(found.c.number.is_not(None))


def forgotten(tx: Transaction, now: float) -> dict[int, bool]:
    """Return the ids of checkpoints to be swept: True for an abandoned one, False for a dropped one."""
    marks = tx.execute(select(checkpoint.c.id, silent(now))).all()
    there = {number for number, _ in marks}
    dropped = {number: False for number in tx.execute(numbers_with_groups()).scalars() if number not in there}
    return dropped | {number: True for number, given_up in marks if given_up}


def sweep_forgotten(tx: Transaction, limit: int, now: float) -> int:
    """Delete up to `limit` groups of a dropped checkpoint; return their number. Unneeded payloads become garbage."""
    left = forgotten(tx, now) if may_sweep(tx) else {}
    if not left:
        return 0
    number, given_up = next(iter(left.items()))
    if given_up:
        forget(tx, [number])
    ours = select(checkpoint_group.c.uid).where(checkpoint_group.c.checkpoint == number)
    first = ours.order_by(checkpoint_group.c.uid).limit(limit).subquery()
    count, last = tx.execute(select(func.count(), func.max(first.c.uid))).one()
    if not count:
        return 0  # another process was faster
    chosen = checkpoint_group.c.checkpoint == number, checkpoint_group.c.uid <= last
    other = checkpoint_group.alias("other")
    unneeded = select(checkpoint_group.c.uid, literal(now, garbage.c.removed_at.type)).where(
        *chosen,
        ~exists().where(group.c.uid == checkpoint_group.c.uid),
        ~exists().where(other.c.uid == checkpoint_group.c.uid, other.c.checkpoint.in_(select(checkpoint.c.id))),
    )
    into = tx.dialect.insert(garbage).from_select(["uid", "removed_at"], unneeded)
    tx.execute(into.on_conflict_do_nothing())
    tx.execute(delete(checkpoint_group).where(*chosen))
    return int(count)


#: Complete checkpoints, which can be restored.
whole: ColumnElement[bool] = checkpoint.c.copied_to.is_(None)


class DroppedError(Exception):
    """The incomplete checkpoint is gone: the buffer was restored, or its maker missed heartbeats."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An incomplete checkpoint: its start, the last uid at that time, and the uid up to which groups are copied."""

    id: int
    step: int
    created_at: float
    last: int
    copied_to: int = 0


def begin(tx: Transaction, step: int, now: float) -> Mark:
    """Begin a checkpoint of the current state, with no groups copied yet."""
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
    copy_cursors(tx, 0, new)
    return Mark(new, step, now, last_uid(tx))


def keep_changing(tx: Transaction, mark: Mark) -> None:
    """Copy groups before they change from now on, since the others are copied in later transactions."""
    lanes = [row["id"] for row in _find(tx, mark).lanes]
    tx.dialect.begin_keeping(tx, mark.id, mark.last, lanes)


def next_bound(tx: Transaction, mark: Mark, groups: int) -> int:
    """Return the uid that ends the next batch of this number of groups, of any buffer; the last uid if fewer remain.

    The query reads the pages that the copy will need, without blocking writers.
    """
    left = select(group.c.uid).where(group.c.uid > mark.copied_to, group.c.uid <= mark.last)
    found = tx.execute(left.order_by(group.c.uid).offset(groups - 1).limit(1)).scalar()
    return mark.last if found is None else int(found)


def copy_groups(tx: Transaction, mark: Mark, up_to: int, now: float) -> Mark:
    """Copy the next groups, up to a uid. Raises DroppedError."""
    row = _find(tx, mark)
    between = group.c.uid > mark.copied_to, group.c.uid <= up_to
    ours = select(literal(mark.id), *group.columns).where(*between, group.c.lane.in_([one["id"] for one in row.lanes]))
    into = tx.dialect.insert(checkpoint_group).from_select(
        [column.name for column in checkpoint_group.c], ours.order_by(group.c.uid)
    )
    tx.execute(into.on_conflict_do_nothing())
    copied = checkpoint_group.c.uid > mark.copied_to, checkpoint_group.c.uid <= up_to
    count, size = size_of(tx, mark.id, *copied)
    values = {"groups": row.groups + count, "bytes": row.bytes + size, "copied_to": up_to, "created_at": now}
    tx.execute(update(checkpoint).where(checkpoint.c.id == mark.id).values(values))
    return replace(mark, copied_to=up_to)


def publish(tx: Transaction, mark: Mark) -> Checkpoint:
    """Complete a checkpoint whose groups are copied, so that it can be restored. Raises DroppedError."""
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


def copy_cursors(tx: Transaction, old: int, new: int) -> None:
    """Copy the cursors of a checkpoint to another; 0 has the current ones."""
    copied = [literal(new) if column is cursor.c.checkpoint else column for column in cursor.c]
    found = select(*copied).where(cursor.c.buffer == tx.scope.buffer, cursor.c.checkpoint == old)
    tx.execute(insert(cursor).from_select([column.name for column in cursor.c], found))


def size_of(tx: Transaction, checkpoint_id: int, *conditions: ColumnElement[bool]) -> tuple[int, int]:
    """Return the number of groups of a checkpoint that meet the conditions, and their bytes."""
    chosen = checkpoint_group.c.checkpoint == checkpoint_id, *conditions
    count, size = tx.execute(select(func.count(), func.sum(checkpoint_group.c.bytes)).where(*chosen)).one()
    return int(count), int(size or 0)


# Liveness of makers


def silent(now: float | ColumnElement[float]) -> ColumnElement[bool]:
    """Return the condition for incomplete checkpoints with a dead maker."""
    return and_(~whole, not_(checkpoint.c.created_at.between(now - MAKER_SILENT_SECONDS, now + MAKER_SILENT_SECONDS)))


def is_any_made(tx: Transaction, now: float) -> bool:
    """Return whether a checkpoint of any buffer is being made. There is one at a time."""
    made = select(checkpoint.c.id).where(~whole, ~silent(now)).limit(1)
    return tx.execute(made).first() is not None


def forget_marks(tx: Transaction) -> None:
    """Drop the buffer's incomplete checkpoints."""
    ours = select(checkpoint.c.id).where(checkpoint.c.buffer == tx.scope.buffer, ~whole)
    forget(tx, list(tx.execute(ours).scalars()))
