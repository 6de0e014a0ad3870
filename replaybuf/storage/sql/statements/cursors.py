"""Cursors of prompt ledgers, and claims: prompts that are put under a lease when a cursor moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from replaybuf.errors import ReplayBufError
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.fence import FENCE, Row, join
from replaybuf.storage.sql.statements.leases import begin_lease, hold, rows_of
from replaybuf.storage.sql.statements.new_rows import EncodedGroup, check_size
from replaybuf.storage.sql.statements.presence import note_again
from replaybuf.storage.sql.statements.prompts import note_drawn
from replaybuf.storage.sql.statements.put import put_groups, store
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Cursor


def read_cursor(tx: Transaction, name: str) -> Cursor:
    """Return the cursor of this name; version 0 if there is none."""
    [(*fence, version, position, value)] = tx.tuples(_CURSOR, buffer=tx.scope.buffer, cursor=name)
    join(tx, Row(*fence))
    found = Cursor(name) if version is None else Cursor(name, version, position, value)
    return replace(found, epoch=tx.scope.epoch)


_CURSOR = f"""SELECT fence.*, c.version, c.position, c.value FROM ({FENCE}) AS fence
LEFT JOIN rb_cursor c ON c.buffer = :buffer AND c.checkpoint = 0 AND c.name = :cursor"""  # noqa: S608
_INSERT = """INSERT INTO rb_cursor (buffer, name, checkpoint, version, position, value)
VALUES (:buffer, :name, 0, :version, :position, :value)"""
_MOVE = """UPDATE rb_cursor SET version = :version, position = :position, value = :value
WHERE buffer = :buffer AND name = :name AND checkpoint = 0 AND version = :known"""


def write_cursors(tx: Transaction, cursors: Sequence[Cursor]) -> None:
    """Write cursors into a buffer that has none."""
    if cursors:
        tx.each(_INSERT, [(tx.scope.buffer, one.name, one.version, one.position, one.value) for one in cursors])


def claim(
    tx: Transaction,
    groups: Sequence[EncodedGroup],
    moved: Cursor,
    seconds: float,
    epochs: Mapping[int, int] | None = None,
) -> tuple[list[GroupRow], int, float] | None:
    """Move a cursor and put groups under a lease; return their rows, and the lease's token and end.

    None if another process or a restore has moved the cursor. `epochs` has those of prompts that are drawn by order.
    """
    if not move_cursor(tx, moved):
        return None
    if epochs is not None:
        note_drawn(tx, moved.name, moved.version + 1, epochs)
    for one in groups:
        check_size(tx, one)
    uids = store(tx, groups, evicting=False)
    rows = rows_of(tx, uids)
    for row, encoded in zip(rows, groups, strict=True):
        row.payload = encoded.payload
    token, until = begin_lease(tx, seconds)
    hold(tx, rows, token, until, groups[0].group.worker if groups else None)
    return rows, token, until


def put_with_cursor(
    tx: Transaction, groups: Sequence[EncodedGroup], moved: Cursor, event: EventKind | None = None
) -> bool:
    """Move a cursor and put groups; return False, and do nothing, if another process has moved it."""
    if not move_cursor(tx, moved):
        return False
    for outcome in put_groups(tx, groups):
        if isinstance(outcome, ReplayBufError):
            raise outcome
    if groups and event is not None:
        note_again(tx, event, adds=True, worker=groups[0].group.worker, groups=len(groups), detail=moved.name)
    return True


def move_cursor(tx: Transaction, moved: Cursor) -> bool:
    """Write the cursor unless it was moved since its read, or the buffer restored; return whether it was written."""
    if moved.epoch != tx.scope.epoch:
        return False
    values = {"version": moved.version + 1, "position": moved.position, "value": moved.value}
    if moved.version == 0:
        sql = f"{_INSERT} ON CONFLICT DO NOTHING"
        return tx.change(sql, buffer=tx.scope.buffer, name=moved.name, **values) > 0
    return tx.change(_MOVE, buffer=tx.scope.buffer, name=moved.name, known=moved.version, **values) > 0
