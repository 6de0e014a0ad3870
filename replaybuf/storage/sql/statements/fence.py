"""Fences: a restore begins a new epoch of the buffer, and who was there before can't write any more.

Every write transaction reads the buffer's epoch first. A restore keeps all other writers out until it is committed, so
nobody writes into the restored buffer with the old one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.errors import FencedError
from replaybuf.storage.sql.schema.tables import buffer, checkpoint
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.uids import last_uid


def join(connection: Connection, scope: Scope) -> Scope:
    """The scope in the buffer's present epoch."""
    row = _row(connection, scope)
    return replace(scope, epoch=row.epoch or 0, ticket_shift=row.ticket_shift or 0, checkpoint=row.checkpoint or 0)


def check_fence(connection: Connection, scope: Scope) -> Scope:
    """The scope as it is now. Raises FencedError when the buffer was restored since it was joined."""
    row = _row(connection, scope)
    if (row.epoch or 0) != scope.epoch:
        restored = "restored"
        if row.restored_step is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row.restored_at))
            restored = f"restored to the checkpoint of step {row.restored_step} at {at}"
        raise FencedError(
            f"the buffer {scope.buffer!r} was {restored}, after this process had opened it: what it does belongs to "
            "the run before that, and nothing was changed. Build a new buffer to join the restored run"
        )
    shift, newest = row.ticket_shift or 0, row.checkpoint or 0
    if shift == scope.ticket_shift and newest == scope.checkpoint:
        return scope
    return replace(scope, ticket_shift=shift, checkpoint=newest)


def begin_epoch(connection: Connection, scope: Scope, step: int, now: float, ticket_shift: int) -> Scope:
    """Fence off all who have joined before; the scope in the new epoch."""
    epoch = (_row(connection, scope).epoch or 0) + 1
    _write(connection, scope, epoch=epoch, ticket_shift=ticket_shift, restored_step=step, restored_at=now)
    return replace(scope, epoch=epoch, ticket_shift=ticket_shift)


def set_next_ticket(connection: Connection, scope: Scope, ticket: int) -> None:
    """Let the next group have this ticket, and those after it the ones that follow."""
    shift, row = last_uid(connection) + 1 - ticket, _row(connection, scope)
    if shift or row.epoch is not None:
        _write(connection, scope, epoch=row.epoch or 0, ticket_shift=shift)


def _row(connection: Connection, scope: Scope) -> Any:
    return connection.execute(_READ, {"name": scope.buffer}).one()


def _of_buffer(column: Column[Any]) -> ColumnElement[Any]:
    return select(column).where(buffer.c.name == bindparam("name")).scalar_subquery().label(column.name)


# One row, of a buffer without a row in `rb_buffer`, too.
_READ = select(
    func.max(checkpoint.c.id).label("checkpoint"),
    *map(_of_buffer, (buffer.c.epoch, buffer.c.ticket_shift, buffer.c.restored_step, buffer.c.restored_at)),
).where(checkpoint.c.buffer == bindparam("name"))


def _write(connection: Connection, scope: Scope, **values: Any) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    row = dialect.insert(buffer).values(name=scope.buffer, **values)
    connection.execute(row.on_conflict_do_update(index_elements=[buffer.c.name], set_=values))
