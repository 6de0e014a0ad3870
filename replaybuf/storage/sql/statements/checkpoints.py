"""Step checkpoints: the metadata of a buffer, copied by the database itself. Payloads stay where they are.

A payload is kept while a group or a checkpoint has its uid. PostgreSQL copies from one snapshot while others write; an
advisory lock keeps the sweep away meanwhile, so that no payload that the copy will need is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, insert, literal, select, update

from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, cursor, garbage, group
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.tickets import next_ticket
from replaybuf.storage.values import Checkpoint, missing_checkpoint


def keep_sweeps_away(tx: Transaction) -> None:
    """Prevent sweeps, and the making and dropping of other checkpoints, until the end of the transaction."""
    tx.dialect.lock(tx.connection, Lock.SWEEP)


def may_sweep(tx: Transaction) -> bool:
    """Return whether a sweep may run: not while a checkpoint is made or dropped."""
    return tx.dialect.try_lock(tx.connection, Lock.SWEEP, shared=True)


def make_checkpoint(tx: Transaction, step: int, keep: int | None, now: float) -> Checkpoint:
    """Make a checkpoint: copy the metadata of the buffer's groups, its lanes, tallies and cursors.

    All but the last `keep` checkpoints are dropped.
    """
    of_step = select(checkpoint.c.id).where(checkpoint.c.buffer == tx.scope.buffer, checkpoint.c.step == step)
    forget(tx, list(tx.execute(of_step).scalars()))
    lanes = [row._asdict() for row in all_lanes(tx)]
    ours = group.c.lane.in_([row["id"] for row in lanes])
    count, size = tx.execute(select(func.count(), func.sum(group.c.bytes)).where(ours)).one()
    made = Checkpoint(step, now, int(count), int(size or 0))
    values = {
        "buffer": tx.scope.buffer,
        "step": step,
        "created_at": now,
        "groups": made.groups,
        "bytes": made.bytes,
        "next_ticket": next_ticket(tx),
        "lanes": lanes,
        "tallies": read_lane_tallies(tx, [row["id"] for row in lanes]),
    }
    new = tx.execute(insert(checkpoint).values(values).returning(checkpoint.c.id)).scalar_one()
    _copy(tx, new, ours)
    _copy_cursors(tx, new)
    if keep is not None:
        ids = list(tx.execute(_of_buffer(tx).with_only_columns(checkpoint.c.id)).scalars())
        forget(tx, ids[:-keep])
    return made


def _copy_cursors(tx: Transaction, new: int) -> None:
    copied = [literal(new) if column is cursor.c.checkpoint else column for column in cursor.c]
    now = select(*copied).where(cursor.c.buffer == tx.scope.buffer, cursor.c.checkpoint == 0)
    tx.execute(insert(cursor).from_select([column.name for column in cursor.c], now))


def undo_draw(tx: Transaction, since: int, drawn: Mapping[int, int], counts: Mapping[tuple[int, Tally], int]) -> None:
    """Undo a draw that nobody received, in the checkpoints that were made after it.

    `drawn` has the number of earlier draws of each group, `counts` is what the undoing added to the tallies, and
    `since` is the checkpoint that was the last one at the draw.
    """
    for made in tx.execute(_of_buffer(tx).where(checkpoint.c.id > since)).all():
        copied = [checkpoint_group.c.checkpoint == made.id, checkpoint_group.c.uid.in_(list(drawn))]
        there = tx.execute(select(checkpoint_group.c.uid, checkpoint_group.c.times_sampled).where(*copied))
        if {row.uid: row.times_sampled for row in there} == drawn:
            continue  # it was made before the draw
        tx.execute(delete(checkpoint_group).where(*copied))
        _copy(tx, made.id, group.c.uid.in_(list(drawn)))
        tallies = Counter({(row["lane"], row["name"]): row["amount"] for row in made.tallies})
        tallies.update({(lane_id, str(name)): n for (lane_id, name), n in counts.items()})
        rows = [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in tallies.items()]
        whole = select(func.count(), func.sum(checkpoint_group.c.bytes)).where(copied[0])
        count, size = tx.execute(whole).one()
        values = {"tallies": rows, "groups": int(count), "bytes": int(size or 0)}
        tx.execute(update(checkpoint).where(checkpoint.c.id == made.id).values(values))


def _copy(tx: Transaction, checkpoint_id: int, condition: ColumnElement[bool]) -> None:
    """Copy groups into a checkpoint."""
    rows = select(literal(checkpoint_id), *group.columns).where(condition).order_by(group.c.uid)
    tx.execute(insert(checkpoint_group).from_select([column.name for column in checkpoint_group.c], rows))


def read_checkpoints(tx: Transaction) -> list[Checkpoint]:
    """Return the checkpoints of the buffer, in the order in which they were made."""
    return [Checkpoint(row.step, row.created_at, row.groups, row.bytes) for row in tx.execute(_of_buffer(tx))]


def find_checkpoint(tx: Transaction, step: int) -> Any:
    """Return the row of the checkpoint of a step. Raises CheckpointError."""
    row = tx.execute(_of_buffer(tx).where(checkpoint.c.step == step)).first()
    if row is None:
        raise missing_checkpoint(step, [made.step for made in read_checkpoints(tx)])
    return row


def drop_checkpoint(tx: Transaction, step: int) -> None:
    """Drop the checkpoint of a step. Raises CheckpointError."""
    keep_sweeps_away(tx)
    forget(tx, [find_checkpoint(tx, step).id])


def _of_buffer(tx: Transaction) -> Any:
    return select(checkpoint).where(checkpoint.c.buffer == tx.scope.buffer).order_by(checkpoint.c.id)


def forget(tx: Transaction, ids: Sequence[int]) -> None:
    """Drop checkpoints. Their groups, and the payloads that nothing else needs, are left to the sweep."""
    if ids:
        tx.execute(delete(cursor).where(cursor.c.checkpoint.in_(ids)))
        tx.execute(delete(checkpoint).where(checkpoint.c.id.in_(ids)))


def with_groups(tx: Transaction) -> list[int]:
    """Return the checkpoints with groups, dropped ones too: one index look-up each, however many groups."""
    numbers: list[int] = []
    while True:
        later = checkpoint_group.c.checkpoint > (numbers[-1] if numbers else -1)
        number = tx.execute(select(func.min(checkpoint_group.c.checkpoint)).where(later)).scalar()
        if number is None:
            return numbers
        numbers.append(number)


def forgotten(tx: Transaction) -> list[int]:
    """Return the dropped checkpoints that have groups left."""
    there = set(tx.execute(select(checkpoint.c.id)).scalars())
    return [number for number in with_groups(tx) if number not in there]


def sweep_forgotten(tx: Transaction, limit: int, now: float) -> int:
    """Delete up to `limit` groups of a dropped checkpoint; return their number. Unneeded payloads become garbage."""
    left = forgotten(tx) if may_sweep(tx) else []
    if not left:
        return 0
    number = left[0]
    ours = select(checkpoint_group.c.uid).where(checkpoint_group.c.checkpoint == number)
    uids = list(tx.execute(ours.order_by(checkpoint_group.c.uid).limit(limit)).scalars())
    if not uids:
        return 0  # another process was faster
    chosen = checkpoint_group.c.checkpoint == number, checkpoint_group.c.uid.between(uids[0], uids[-1])
    other = checkpoint_group.alias("other")
    unneeded = select(checkpoint_group.c.uid, literal(now, garbage.c.removed_at.type)).where(
        *chosen,
        ~exists().where(group.c.uid == checkpoint_group.c.uid),
        ~exists().where(other.c.uid == checkpoint_group.c.uid, other.c.checkpoint.in_(select(checkpoint.c.id))),
    )
    into = tx.dialect.insert(garbage).from_select(["uid", "removed_at"], unneeded)
    tx.execute(into.on_conflict_do_nothing())
    tx.execute(delete(checkpoint_group).where(*chosen))
    return len(uids)
