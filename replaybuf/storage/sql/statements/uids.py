"""Uids: giving them out, and making room for those of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, delete, exists, func, or_, select, text, update

from replaybuf.storage.portable import check_empty
from replaybuf.storage.sql.schema.tables import (
    checkpoint,
    checkpoint_group,
    counter,
    cursor,
    garbage,
    group,
    lane,
    payload,
    tally,
    uid_sequence,
)
from replaybuf.storage.sql.statements.lanes import Scope


def reserve_uids(connection: Connection, count: int) -> list[int]:
    """The next uids; they are never given again, even when the transaction fails (PostgreSQL: leaving a gap)."""
    if connection.dialect.name == "postgresql":
        series = func.generate_series(1, count).table_valued("n")
        return [int(uid) for (uid,) in connection.execute(select(uid_sequence.next_value()).select_from(series))]
    raised = update(counter).where(counter.c.name == "uid").values(value=counter.c.value + count)
    last = connection.execute(raised.returning(counter.c.value)).scalar_one()
    return list(range(last - count + 1, last + 1))


def uids_in_checkpoints(connection: Connection, scope: Scope, uids: Iterable[int]) -> list[int]:
    """Those of these groups that a checkpoint of the buffer has."""
    chosen = list(uids)
    if not scope.checkpoint or not chosen:
        return []
    ids = select(checkpoint.c.id).where(checkpoint.c.buffer == scope.buffer)
    kept = checkpoint_group.c.checkpoint.in_(ids), checkpoint_group.c.uid.in_(chosen)
    return sorted(set(connection.execute(select(checkpoint_group.c.uid).where(*kept)).scalars()))


def make_room(connection: Connection, scope: Scope) -> None:
    """Remove what an empty buffer has left behind. Raises NotEmptyError when it isn't empty."""
    ours = select(lane.c.id).where(lane.c.buffer == scope.buffer)
    count = int(connection.execute(select(func.count()).where(group.c.lane.in_(ours))).scalar_one())
    steps = select(checkpoint.c.step).where(checkpoint.c.buffer == scope.buffer).order_by(checkpoint.c.id)
    check_empty(count, list(connection.execute(steps).scalars()))
    connection.execute(delete(cursor).where(cursor.c.buffer == scope.buffer))
    connection.execute(delete(tally).where(tally.c.lane.in_(ours)))
    connection.execute(delete(lane).where(lane.c.buffer == scope.buffer))
    # What was taken from other buffers may yet be given back to them, or is of their checkpoints: the sweep knows when
    # it may go.
    if not connection.execute(select(exists().where(lane.c.buffer != scope.buffer))).scalar():
        connection.execute(delete(payload).where(payload.c.uid.in_(select(garbage.c.uid))))
        connection.execute(delete(garbage))


def free_shift(connection: Connection, last: int) -> int:
    """What to add to the uids of a snapshot, up to `last`: 0 unless other buffers of the database have such groups."""
    taken = or_(exists().where(payload.c.uid <= last), exists().where(garbage.c.uid <= last))
    return last_uid(connection) if connection.execute(select(taken)).scalar() else 0


def last_uid(connection: Connection) -> int:
    """The last uid that was given."""
    if connection.dialect.name == "postgresql":
        last, called = connection.execute(text("SELECT last_value, is_called FROM rb_uid")).one()
        return int(last) if called else int(last) - 1
    return int(connection.execute(select(counter.c.value).where(counter.c.name == "uid")).scalar_one())


def raise_uid(connection: Connection, last: int) -> None:
    """Give no uid up to `last` again."""
    last = max(last, last_uid(connection))
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.setval(uid_sequence.name, max(last, 1), last > 0)))
    else:
        connection.execute(update(counter).where(counter.c.name == "uid").values(value=last))
