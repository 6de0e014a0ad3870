"""Step checkpoints: the metadata of a buffer, copied by the database itself. Payloads stay where they are.

A payload is kept while a group or a checkpoint has its uid. PostgreSQL copies from one snapshot while others write; an
advisory lock keeps the sweep away meanwhile, so that no payload goes that the copy is going to need.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, exists, func, insert, literal, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.schema.tables import checkpoint, checkpoint_group, cursor, garbage, group
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.lanes import Scope, all_lanes
from replaybuf.storage.sql.statements.uids import last_uid
from replaybuf.storage.values import Checkpoint, missing_checkpoint

_SWEEP_LOCK = 0x5EB11


def keep_sweeps_away(connection: Connection) -> None:
    """Let no sweep run, and no other checkpoint be made or dropped, until the end of the transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SWEEP_LOCK})


def may_sweep(connection: Connection) -> bool:
    """Whether a sweep may run: not while a checkpoint is made or dropped."""
    if connection.dialect.name != "postgresql":
        return True
    locked = connection.execute(text("SELECT pg_try_advisory_xact_lock_shared(:key)"), {"key": _SWEEP_LOCK})
    return bool(locked.scalar())


async def make_checkpoint(database: Database, scope: Scope, step: int, keep: int | None) -> Checkpoint:
    """Keep the buffer as it is now. Others go on writing: all the time on PostgreSQL, on SQLite after it."""

    def copy(connection: Connection) -> Checkpoint:
        return copy_groups(connection, check_fence(connection, scope), step, keep, time.time())

    if database.dialect == "sqlite":
        return await database.write(copy)
    # Its snapshot is younger than the guard: what it finds, no sweep has begun to delete.
    return await database.write_from_snapshot(copy, keep_sweeps_away)


def copy_groups(connection: Connection, scope: Scope, step: int, keep: int | None, now: float) -> Checkpoint:
    """Copy the metadata of all groups, the lanes, the counts and the cursors, and drop checkpoints beyond `keep`."""
    of_step = select(checkpoint.c.id).where(checkpoint.c.buffer == scope.buffer, checkpoint.c.step == step)
    forget(connection, list(connection.execute(of_step).scalars()))
    lanes = [row._asdict() for row in all_lanes(connection, scope)]
    ours = group.c.lane.in_([row["id"] for row in lanes])
    count, size = connection.execute(select(func.count(), func.sum(group.c.bytes)).where(ours)).one()
    made = Checkpoint(step, now, int(count), int(size or 0))
    values = {
        "buffer": scope.buffer,
        "step": step,
        "created_at": now,
        "groups": made.groups,
        "bytes": made.bytes,
        "next_ticket": last_uid(connection) + 1 - scope.ticket_shift,
        "lanes": lanes,
        "tallies": read_lane_tallies(connection, [row["id"] for row in lanes]),
    }
    new = connection.execute(insert(checkpoint).values(values).returning(checkpoint.c.id)).scalar_one()
    _copy(connection, new, ours)
    _copy_cursors(connection, scope, new)
    if keep is not None:
        ids = list(connection.execute(_of_buffer(scope).with_only_columns(checkpoint.c.id)).scalars())
        forget(connection, ids[:-keep])
    return made


def _copy_cursors(connection: Connection, scope: Scope, new: int) -> None:
    copied = [literal(new) if column is cursor.c.checkpoint else column for column in cursor.c]
    now = select(*copied).where(cursor.c.buffer == scope.buffer, cursor.c.checkpoint == 0)
    connection.execute(insert(cursor).from_select([column.name for column in cursor.c], now))


def undo_draw(
    connection: Connection, scope: Scope, since: int, drawn: Mapping[int, int], counts: Mapping[tuple[int, Tally], int]
) -> None:
    """A draw has been undone that nobody received: undo it in the checkpoints, too, that were made after it.

    `drawn` has how often each group had been drawn before, `counts` is what the undoing has added to the tallies, and
    `since` the checkpoint that was the last one when the groups were drawn.
    """
    for made in connection.execute(_of_buffer(scope).where(checkpoint.c.id > since)).all():
        copied = [checkpoint_group.c.checkpoint == made.id, checkpoint_group.c.uid.in_(list(drawn))]
        there = connection.execute(select(checkpoint_group.c.uid, checkpoint_group.c.times_sampled).where(*copied))
        if {row.uid: row.times_sampled for row in there} == drawn:
            continue  # it was made before the draw
        connection.execute(delete(checkpoint_group).where(*copied))
        _copy(connection, made.id, group.c.uid.in_(list(drawn)))
        tallies = Counter({(row["lane"], row["name"]): row["amount"] for row in made.tallies})
        tallies.update({(lane_id, str(name)): n for (lane_id, name), n in counts.items()})
        rows = [{"lane": lane_id, "name": name, "amount": n} for (lane_id, name), n in tallies.items()]
        whole = select(func.count(), func.sum(checkpoint_group.c.bytes)).where(copied[0])
        count, size = connection.execute(whole).one()
        values = {"tallies": rows, "groups": int(count), "bytes": int(size or 0)}
        connection.execute(update(checkpoint).where(checkpoint.c.id == made.id).values(values))


def _copy(connection: Connection, checkpoint_id: int, condition: ColumnElement[bool]) -> None:
    """Copy groups into a checkpoint."""
    rows = select(literal(checkpoint_id), *group.columns).where(condition).order_by(group.c.uid)
    connection.execute(insert(checkpoint_group).from_select([column.name for column in checkpoint_group.c], rows))


def read_checkpoints(connection: Connection, scope: Scope) -> list[Checkpoint]:
    """The checkpoints of the buffer, in the order in which they were made."""
    return [
        Checkpoint(row.step, row.created_at, row.groups, row.bytes) for row in connection.execute(_of_buffer(scope))
    ]


def find_checkpoint(connection: Connection, scope: Scope, step: int) -> Any:
    """The row of the checkpoint of a step. Raises CheckpointError."""
    row = connection.execute(_of_buffer(scope).where(checkpoint.c.step == step)).first()
    if row is None:
        raise missing_checkpoint(step, [made.step for made in read_checkpoints(connection, scope)])
    return row


def drop_checkpoint(connection: Connection, scope: Scope, step: int) -> None:
    """Forget the checkpoint of a step. Raises CheckpointError."""
    keep_sweeps_away(connection)
    forget(connection, [find_checkpoint(connection, scope, step).id])


def _of_buffer(scope: Scope) -> Any:
    return select(checkpoint).where(checkpoint.c.buffer == scope.buffer).order_by(checkpoint.c.id)


def forget(connection: Connection, ids: Sequence[int]) -> None:
    """Delete checkpoints. Their groups, and the payloads that nothing needs any more, are left to the sweep."""
    if ids:
        connection.execute(delete(cursor).where(cursor.c.checkpoint.in_(ids)))
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(ids)))


def with_groups(connection: Connection) -> list[int]:
    """The checkpoints that have groups, deleted ones too: a look at an index for each, however many groups."""
    numbers: list[int] = []
    while True:
        later = checkpoint_group.c.checkpoint > (numbers[-1] if numbers else -1)
        number = connection.execute(select(func.min(checkpoint_group.c.checkpoint)).where(later)).scalar()
        if number is None:
            return numbers
        numbers.append(number)


def forgotten(connection: Connection) -> list[int]:
    """The checkpoints that were deleted, and have groups left."""
    there = set(connection.execute(select(checkpoint.c.id)).scalars())
    return [number for number in with_groups(connection) if number not in there]


def sweep_forgotten(connection: Connection, limit: int, now: float) -> int:
    """Delete up to `limit` groups of a checkpoint that was deleted; how many. Payloads nobody needs become garbage."""
    left = forgotten(connection) if may_sweep(connection) else []
    if not left:
        return 0
    number = left[0]
    ours = select(checkpoint_group.c.uid).where(checkpoint_group.c.checkpoint == number)
    uids = list(connection.execute(ours.order_by(checkpoint_group.c.uid).limit(limit)).scalars())
    if not uids:
        return 0  # another process was faster
    chosen = checkpoint_group.c.checkpoint == number, checkpoint_group.c.uid.between(uids[0], uids[-1])
    other = checkpoint_group.alias("other")
    unneeded = select(checkpoint_group.c.uid, literal(now, garbage.c.removed_at.type)).where(
        *chosen,
        ~exists().where(group.c.uid == checkpoint_group.c.uid),
        ~exists().where(other.c.uid == checkpoint_group.c.uid, other.c.checkpoint.in_(select(checkpoint.c.id))),
    )
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    into = dialect.insert(garbage).from_select(["uid", "removed_at"], unneeded)
    connection.execute(into.on_conflict_do_nothing())
    connection.execute(delete(checkpoint_group).where(*chosen))
    return len(uids)
