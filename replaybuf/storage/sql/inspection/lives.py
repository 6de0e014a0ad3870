"""The life of a group: who put it, every draw that had it, what befell it, and where it is now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.batches import Batch, batches_with, moment
from replaybuf.storage.sql.inspection.groups import buffers_of, now_of, show_group
from replaybuf.storage.sql.schema.records import event
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, group, lane
from replaybuf.storage.sql.statements.making import whole


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that befell a group: the `kind` of an event, when, by whom, at which train step."""

    at: datetime
    kind: str
    worker: str | None
    step: int | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known of a group's put, also when it has left: from its row, a checkpoint's, or a draw's."""

    buffer: str
    task_name: str
    created_at: datetime | None
    worker: str | None
    train_step: int | None
    oldest_model_step: int | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class Life:
    """All that is known of a group.

    `there` is its row in the view `groups` with its trained step, None when it has left. `replaces` are the groups that
    it was put in place of, as far as they are known (`schema.tables`), `replaced_by` those that were put in its place.
    `checkpoints` are the train steps of the checkpoints that hold it.
    """

    uid: int
    origin: Origin
    there: dict[str, Any] | None
    draws: Sequence[Batch]
    happenings: Sequence[Happening]
    replaces: Sequence[int]
    replaced_by: Sequence[int]
    checkpoints: Sequence[int]
    now: datetime
    several: bool


def life_of(tx: Transaction, uid: int) -> Life | None:
    """Return the life of a group of any buffer, or None when nothing is known of it."""
    found = tx.execute(_ROW.where(group.c.uid == uid)).first()
    kept = _in_checkpoints(tx, uid)
    buffers = buffers_of(tx)
    row = found or (kept[-1] if kept else None)
    draws: list[Batch] = []
    buffer = ""
    for buffer in [row.buffer] if row else buffers:
        if draws := batches_with(tx, buffer, uid):
            break
    if row is None and not draws:
        return None
    origin = _origin(row, draws, buffer)
    shown = show_group(tx, uid, payload=False) if found else None
    return Life(
        uid=uid,
        origin=origin,
        there=None if shown is None or found is None else shown.group | _holding(found),
        draws=draws,
        happenings=_happenings(tx, origin.buffer, uid),
        replaces=[] if row is None else sorted(row.made_from or ()),
        replaced_by=_replaced_by(tx, origin.buffer, uid),
        checkpoints=[one.checkpoint_step for one in kept],
        now=now_of(tx),
        several=len(buffers) > 1,
    )


def last_uid(tx: Transaction) -> int:
    """Return the last uid that was given in the database, 0 when none was."""
    return tx.dialect.last_uid(tx.connection)


_PUT = ("uid", "created_at", "worker", "put_step", "oldest_step", "reward", "made_from")
_LANE = lane.c.buffer, lane.c.task_name
_ROW = select(*(group.c[name] for name in (*_PUT, "holder", "trained_step")), *_LANE).select_from(
    group.join(lane, lane.c.id == group.c.lane)
)


def _in_checkpoints(tx: Transaction, uid: int) -> list[Any]:
    """Return the group as the checkpoints have it that do, in their order: a look-up in each."""
    ours = checkpoint.join(checkpoint_group, checkpoint_group.c.checkpoint == checkpoint.c.id)
    columns = (checkpoint_group.c[name] for name in _PUT)
    chosen = select(checkpoint.c.step.label("checkpoint_step"), *columns, *_LANE).select_from(
        ours.join(lane, lane.c.id == checkpoint_group.c.lane)
    )
    return list(tx.execute(chosen.where(checkpoint_group.c.uid == uid, whole).order_by(checkpoint.c.id)))


def _origin(row: Any, draws: Sequence[Batch], buffer: str) -> Origin:
    if row is None:
        mine = draws[0].members[0]
        return Origin(buffer, mine.task_name, mine.created_at, mine.worker, None, mine.oldest_model_step, mine.reward)
    return Origin(
        row.buffer, row.task_name, moment(row.created_at), row.worker, row.put_step, row.oldest_step, row.reward
    )


def _holding(row: Any) -> dict[str, Any]:
    return {"worker": row.worker, "put_step": row.put_step, "leased_by": row.holder, "trained_step": row.trained_step}


def _happenings(tx: Transaction, buffer: str, uid: int) -> list[Happening]:
    columns = (event.c[name] for name in ("happened_at", "kind", "worker", "step", "detail", "uids"))
    chosen = select(*columns).where(event.c.buffer == buffer, tx.dialect.has_number(event.c.uids, uid))
    return [
        Happening(at, row.kind, row.worker, row.step, row.detail)
        for row in tx.execute(chosen.order_by(event.c.id))
        if (at := moment(row.happened_at)) is not None
    ]


def _replaced_by(tx: Transaction, buffer: str, uid: int) -> list[int]:
    """Return the groups that were put in place of one: their uids are higher."""
    later = group.c.uid > uid, group.c.made_from.is_not(None), tx.dialect.has_number(group.c.made_from, uid)
    chosen = select(group.c.uid).select_from(group.join(lane, lane.c.id == group.c.lane))
    return list(tx.execute(chosen.where(lane.c.buffer == buffer, *later).order_by(group.c.uid)).scalars())
