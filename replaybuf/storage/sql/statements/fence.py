"""Fencing and tickets. A restore begins a new epoch of the buffer, which fences off writers of earlier epochs.

Every write transaction reads the buffer's epoch first. A restore excludes all other writers until its commit, so no
transaction with an old epoch writes into the restored buffer.

A ticket is a group's sampling id, which determines its random draws (`rules.policies`): its uid, less the uids skipped
by restores (`Scope.ticket_shift`). Uids are never reused; but groups put after a restore get the tickets, and so the
chances, that they would have had without it. The column is NULL where the ticket is the uid.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, bindparam, func, select

from replaybuf.errors import FencedError
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Prepared, Scope, Transaction
from replaybuf.storage.sql.schema.records import event
from replaybuf.storage.sql.schema.tables import IDENTITY, buffer, checkpoint, info
from replaybuf.storage.sql.statements.buffer_facts import last_uid


def join(tx: Transaction, row: Row | None = None) -> None:
    """Update the scope of a transaction to the buffer's current epoch, read here or by `FENCE`."""
    row = row or _row(tx)
    tx.newest = row.checkpoint or 0
    tx.scope = replace(tx.scope, epoch=row.epoch or 0, ticket_shift=row.ticket_shift or 0)


def joined(tx: Transaction) -> Scope:
    """Return the scope of a transaction, updated to the buffer's current epoch, with the database's id."""
    join(tx)
    number = tx.execute(select(info.c.value).where(info.c.name == IDENTITY)).scalar()
    return replace(tx.scope, database=number)


def check_fence(tx: Transaction) -> None:
    """Update the scope of a transaction. Raises FencedError if the buffer was restored since it was joined.

    The first statement of every transaction that writes for a buffer.
    """
    compare(tx, _row(tx))


def is_fenced_off(tx: Transaction) -> bool:
    """Return whether the buffer was restored since it was joined."""
    return (_row(tx).epoch or 0) != tx.scope.epoch


def compare(tx: Transaction, row: Row) -> None:
    """Check the fence against a row read by `FENCE`."""
    if (row.epoch or 0) != tx.scope.epoch:
        raise _fenced_off(tx, row)
    tx.newest, shift = row.checkpoint or 0, row.ticket_shift or 0
    if shift != tx.scope.ticket_shift:
        tx.scope = replace(tx.scope, ticket_shift=shift)


def _fenced_off(tx: Transaction, row: Row) -> FencedError:
    restored = "restored"
    if row.restored_step is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row.restored_at))
        restored = f"restored to the checkpoint of step {row.restored_step} at {at}{_by(tx, row)}"
    return FencedError(
        f"the buffer {tx.scope.buffer!r} was {restored}, after this process had opened it: what it does belongs to the "
        "run before that, and nothing was changed. End this process if another one goes on from there, as a trainer "
        "does that was started anew; one that should join the restored run, such as a worker, builds a new buffer"
    )


def _by(tx: Transaction, row: Row) -> str:
    """Return the worker of the restore, if known."""
    restored = (event.c.buffer == tx.scope.buffer, event.c.kind == EventKind.RESTORED.value)
    last = select(event.c.worker, event.c.step).where(*restored).order_by(event.c.id.desc()).limit(1)
    found = tx.execute(last).first()
    return f" by {found.worker}" if found is not None and found.worker and found.step == row.restored_step else ""


def begin_epoch(tx: Transaction, step: int, now: float, ticket_shift: int) -> None:
    """Fence off all earlier users, and move the transaction to the new epoch."""
    epoch = (_row(tx).epoch or 0) + 1
    write_buffer(tx, epoch=epoch, ticket_shift=ticket_shift, restored_step=step, restored_at=now)
    tx.scope = replace(tx.scope, epoch=epoch, ticket_shift=ticket_shift)


class Row(NamedTuple):
    """A buffer's newest checkpoint, and its row in `rb_buffer`; None for missing values."""

    checkpoint: int | None
    epoch: int | None
    ticket_shift: int | None
    restored_step: int | None
    restored_at: float | None


def _row(tx: Transaction) -> Row:
    [row] = tx.fetch(_READ, tx.scope.buffer)
    return Row(*row)


def _of_buffer(column: Column[Any]) -> ColumnElement[Any]:
    return select(column).where(buffer.c.name == bindparam("name")).scalar_subquery().label(column.name)


#: Query of a `Row` for the parameter `name`; always one, even for a buffer without one in `rb_buffer`.
FENCE = select(
    func.max(checkpoint.c.id).label("checkpoint"),
    *(_of_buffer(buffer.c[name]) for name in Row._fields if name != "checkpoint"),
).where(checkpoint.c.buffer == bindparam("name"))
_READ = Prepared(lambda _: FENCE, "name")


def write_buffer(tx: Transaction, **values: Any) -> None:
    """Write columns of the buffer's row in `rb_buffer`."""
    row = tx.dialect.insert(buffer).values(name=tx.scope.buffer, **values)
    tx.execute(row.on_conflict_do_update(index_elements=[buffer.c.name], set_=values))


def ticket_of(tx: Transaction, uid: int) -> int:
    """Return the ticket of a new group."""
    return uid - tx.scope.ticket_shift


def ticket_column(tx: Transaction, uid: int) -> int | None:
    """Return the value of a new group's ticket column."""
    return ticket_of(tx, uid) if tx.scope.ticket_shift else None


def next_ticket(tx: Transaction) -> int:
    """Return the ticket of the next new group."""
    return ticket_of(tx, last_uid(tx) + 1)


def shift_to(tx: Transaction, ticket: int) -> int:
    """Return the shift with which the next new group gets this ticket."""
    return last_uid(tx) + 1 - ticket


def set_next_ticket(tx: Transaction, ticket: int) -> None:
    """Give the next new group this ticket, and later ones the following tickets."""
    shift, epoch = shift_to(tx, ticket), _row(tx).epoch  # None if it has no row in `rb_buffer` yet
    if shift or epoch is not None:
        write_buffer(tx, epoch=epoch or 0, ticket_shift=shift)
