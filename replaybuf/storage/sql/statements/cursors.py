"""Cursors of prompt ledgers, and the prompts that are put, leased from the beginning, when one moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.storage.sql.schema.tables import cursor
from replaybuf.storage.sql.statements.fence import join
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.leases import begin_lease, hold, rows_of
from replaybuf.storage.sql.statements.put import store
from replaybuf.storage.sql.statements.rows import EncodedGroup, GroupRow
from replaybuf.storage.values import Cursor


def read_cursors(connection: Connection, scope: Scope) -> list[Cursor]:
    """The buffer's cursors as they are now."""
    columns = select(cursor.c.name, cursor.c.version, cursor.c.position, cursor.c.value)
    now = columns.where(cursor.c.buffer == scope.buffer, cursor.c.checkpoint == 0)
    return [Cursor(*row) for row in connection.execute(now)]


def read_cursor(connection: Connection, scope: Scope, name: str) -> Cursor:
    """One of them; version 0 where there is none."""
    found = next((one for one in read_cursors(connection, scope) if one.name == name), Cursor(name))
    return replace(found, epoch=join(connection, scope).epoch)


def write_cursors(connection: Connection, scope: Scope, cursors: Sequence[Cursor]) -> None:
    """Write cursors into a buffer that has none."""
    if cursors:
        connection.execute(insert(cursor), [_row(scope, one) for one in cursors])


def claim(
    connection: Connection, scope: Scope, groups: Sequence[EncodedGroup], moved: Cursor, seconds: float, now: float
) -> tuple[list[GroupRow], int, float] | None:
    """Move a cursor and put groups under a lease: their rows, its token, and when it ends.

    None where somebody else has moved the cursor, or a restore has.
    """
    if not move_cursor(connection, scope, moved):
        return None
    uids = store(connection, scope, groups, now, evicting=False)
    rows = rows_of(connection, scope, uids)
    for row, encoded in zip(rows, groups, strict=True):
        row.payload, row.verified = encoded.payload, True
    token, until = begin_lease(connection, seconds)
    hold(connection, scope, rows, token, until)
    return rows, token, until


def move_cursor(connection: Connection, scope: Scope, moved: Cursor) -> bool:
    """Write the cursor, unless somebody else has moved it since it was read, or a restore has; whether it was."""
    if moved.epoch != scope.epoch:
        return False
    values = _row(scope, moved) | {"version": moved.version + 1}
    if moved.version == 0:
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        return connection.execute(dialect.insert(cursor).values(values).on_conflict_do_nothing()).rowcount > 0
    unmoved = (
        cursor.c.buffer == scope.buffer,
        cursor.c.name == moved.name,
        cursor.c.checkpoint == 0,
        cursor.c.version == moved.version,
    )
    return connection.execute(update(cursor).where(*unmoved).values(values)).rowcount > 0


def _row(scope: Scope, one: Cursor) -> dict[str, Any]:
    return {
        "buffer": scope.buffer,
        "name": one.name,
        "checkpoint": 0,
        "version": one.version,
        "position": one.position,
        "value": one.value,
    }
