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
from typing import NamedTuple

from replaybuf.errors import FencedError
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.schema.tables import IDENTITY
from replaybuf.storage.sql.statements.buffer_facts import last_uid


def join(tx: Transaction, row: Row | None = None) -> None:
    """Update the scope of a transaction to the buffer's current epoch, read here or by `FENCE`."""
    row = row or _fence_row(tx)
    tx.newest = row.checkpoint or 0
    tx.scope = replace(tx.scope, epoch=row.epoch or 0, ticket_shift=row.ticket_shift or 0)


def joined(tx: Transaction) -> Scope:
    """Return the scope of a transaction, updated to the buffer's current epoch, with the database's id."""
    join(tx)
    number = tx.value("SELECT value FROM rb_info WHERE name = :name", name=IDENTITY)
    return replace(tx.scope, database=number)


def check_fence(tx: Transaction) -> None:
    """Update the scope of a transaction. Raises FencedError if the buffer was restored since it was joined.

    The first statement of every transaction that writes for a buffer.
    """
    compare(tx, _fence_row(tx))


def compare(tx: Transaction, row: Row) -> None:
    """Check the fence against a row read by `FENCE`."""
    if (row.epoch or 0) != tx.scope.epoch:
        raise _fenced_error(tx, row)
    tx.newest, shift = row.checkpoint or 0, row.ticket_shift or 0
    if shift != tx.scope.ticket_shift:
        tx.scope = replace(tx.scope, ticket_shift=shift)


def _fenced_error(tx: Transaction, row: Row) -> FencedError:
    phrase = "restored"
    if row.restored_step is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row.restored_at))
        phrase = f"restored to the checkpoint of step {row.restored_step} at {at}"
    return FencedError(
        f"the buffer {tx.scope.buffer!r} was {phrase}, after this process had opened it: what it does belongs to the "
        "run before that, and nothing was changed. End this process if another one goes on from there, as a trainer "
        "does that was started anew; one that should join the restored run, such as a worker, builds a new buffer"
    )


def begin_epoch(tx: Transaction, step: int, now: float, ticket_shift: int) -> None:
    """Fence off all earlier users, and move the transaction to the new epoch."""
    epoch = (_fence_row(tx).epoch or 0) + 1
    write_buffer(tx, epoch=epoch, ticket_shift=ticket_shift, restored_step=step, restored_at=now)
    tx.scope = replace(tx.scope, epoch=epoch, ticket_shift=ticket_shift)


class Row(NamedTuple):
    """A buffer's newest checkpoint, and its row in `rb_buffer`; None for missing values."""

    checkpoint: int | None
    epoch: int | None
    ticket_shift: int | None
    restored_step: int | None
    restored_at: float | None


def _fence_row(tx: Transaction) -> Row:
    [row] = tx.tuples(FENCE, buffer=tx.scope.buffer)
    return Row(*row)


#: Query of a `Row`: always one, even for a buffer without one in `rb_buffer`.
FENCE = """SELECT (SELECT max(id) FROM rb_checkpoint WHERE buffer = :buffer) AS checkpoint,
    max(epoch) AS epoch, max(ticket_shift) AS ticket_shift, max(restored_step) AS restored_step,
    max(restored_at) AS restored_at
FROM rb_buffer WHERE name = :buffer"""


def write_buffer(
    tx: Transaction, epoch: int, ticket_shift: int, restored_step: int | None = None, restored_at: float | None = None
) -> None:
    """Write the buffer's row in `rb_buffer`; the last restore stays if None is given."""
    values = {"epoch": epoch, "shift": ticket_shift, "step": restored_step, "at": restored_at}
    tx.change(_WRITE_BUFFER, buffer=tx.scope.buffer, **values)


_WRITE_BUFFER = """INSERT INTO rb_buffer AS old (name, epoch, ticket_shift, restored_step, restored_at)
VALUES (:buffer, :epoch, :shift, :step, :at) ON CONFLICT (name) DO UPDATE SET
    epoch = excluded.epoch, ticket_shift = excluded.ticket_shift,
    restored_step = coalesce(excluded.restored_step, old.restored_step),
    restored_at = coalesce(excluded.restored_at, old.restored_at)"""


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
    shift, epoch = shift_to(tx, ticket), _fence_row(tx).epoch  # None if it has no row in `rb_buffer` yet
    if shift or epoch is not None:
        write_buffer(tx, epoch=epoch or 0, ticket_shift=shift)
