"""Tickets: the numbers by which random draws know groups (`rules.race`).

A ticket is the group's uid, less what restores have skipped (`Scope.ticket_shift`). Uids are never given twice; but the
groups put after a restore have the tickets, and so the chances, that they would have had without it. The column is NULL
where the ticket is the uid.
"""

from __future__ import annotations

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.fence import epoch_of, write_buffer


def ticket_of(tx: Transaction, uid: int) -> int:
    """Return the ticket of a group that is put now."""
    return uid - tx.scope.ticket_shift


def ticket_column(tx: Transaction, uid: int) -> int | None:
    """Return the ticket of a group that is put now, as its column has it."""
    return ticket_of(tx, uid) if tx.scope.ticket_shift else None


def next_ticket(tx: Transaction) -> int:
    """Return the ticket of the next group that is put."""
    return ticket_of(tx, tx.dialect.last_uid(tx.connection) + 1)


def shift_to(tx: Transaction, ticket: int) -> int:
    """Return the shift with which the next group gets this ticket."""
    return tx.dialect.last_uid(tx.connection) + 1 - ticket


def set_next_ticket(tx: Transaction, ticket: int) -> None:
    """Let the next group have this ticket, and those after it the ones that follow."""
    shift, epoch = shift_to(tx, ticket), epoch_of(tx)
    if shift or epoch is not None:
        write_buffer(tx, epoch=epoch or 0, ticket_shift=shift)
