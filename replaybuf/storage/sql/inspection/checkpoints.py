"""The step checkpoints in a database, and whether each is whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import exists, func, select

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.groups import looking_at
from replaybuf.storage.sql.schema.records import worker
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, group, lane, payload
from replaybuf.storage.sql.statements.checkpoints import forgotten
from replaybuf.storage.sql.statements.making import whole
from replaybuf.storage.values import missing_checkpoint

_SEEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint, as described in its own row."""

    id: int
    buffer: str
    step: int
    created_at: datetime
    groups: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds, and the number of its groups that have lost their payload."""

    groups: int
    bytes: int
    bare: int


@dataclass(frozen=True, slots=True)
class Since:
    """What restoring a checkpoint would do: the groups that were put since, those of it that have left, and the names
    of those who have the buffer open, as far as they were seen in the last minute."""

    put: int
    left: int
    users: list[str]


def list_checkpoints(tx: Transaction, buffer: str | None = None) -> list[Made]:
    """Return the checkpoints of one buffer or of all, in the order in which they were made."""
    query = select(checkpoint).where(whole).order_by(checkpoint.c.buffer, checkpoint.c.id)
    if buffer is not None:
        query = query.where(checkpoint.c.buffer == buffer)
    return [
        Made(row.id, row.buffer, row.step, datetime.fromtimestamp(row.created_at, UTC), row.groups, row.bytes)
        for row in looking_at(tx, buffer).execute(query)
    ]


def find_made(tx: Transaction, name: str, step: int) -> Made:
    """Return the checkpoint of a step of a buffer. Raises CheckpointError."""
    there = list_checkpoints(tx, name)
    for one in there:
        if one.step == step:
            return one
    raise missing_checkpoint(step, [one.step for one in there])


def since(tx: Transaction, made: Made) -> Since:
    """Return what restoring a checkpoint would do now."""
    here, same = checkpoint_group.c.checkpoint == made.id, checkpoint_group.c.uid == group.c.uid
    groups = group.join(lane, lane.c.id == group.c.lane)
    put = select(func.count()).select_from(groups).where(lane.c.buffer == made.buffer, ~exists().where(here, same))
    left = select(func.count()).select_from(checkpoint_group).where(here, ~exists().where(same))
    seen = worker.c.seen_at > time.time() - _SEEN_SECONDS, worker.c.ended_at.is_(None)
    users = select(worker.c.name).distinct().where(worker.c.buffer == made.buffer, *seen).order_by(worker.c.name)
    count = tx.execute(put).scalar_one(), tx.execute(left).scalar_one()
    return Since(*count, list(tx.execute(users).scalars()))


def contents_of(tx: Transaction, made: Made) -> Contents:
    """Return the contents of a checkpoint."""
    here = checkpoint_group.c.checkpoint == made.id
    sizes = select(func.count(), func.coalesce(func.sum(checkpoint_group.c.bytes), 0)).where(here)
    count, nbytes = tx.execute(sizes).one()
    bare = select(func.count()).where(here, ~exists().where(payload.c.uid == checkpoint_group.c.uid))
    return Contents(count, int(nbytes), tx.execute(bare).scalar_one())


def count_dropped(tx: Transaction) -> int:
    """Return the number of dropped checkpoints that wait to be swept."""
    return len(forgotten(tx, time.time()))
