"""What there is to do in the background, found with one statement that reads a row or two of some indexes."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, bindparam, or_, select

from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import Number, checkpoint, garbage
from replaybuf.storage.sql.statements.checkpoints import numbers_with_groups
from replaybuf.storage.sql.statements.leases import overdue, store_clock
from replaybuf.storage.sql.statements.making import silent


@dataclass(frozen=True, slots=True)
class Chores:
    """Whether leases of the buffer have expired, payloads can be swept, and dropped checkpoints have groups."""

    overdue: bool = False
    due: bool = False
    dropped: bool = False


def find_chores(tx: Transaction, removed_before: float, now: float) -> Chores:
    """Return what there is to do: payloads can be swept whose groups were removed before a time."""
    clock = None if tx.dialect.is_remote else store_clock(tx)  # a server's own is part of the statement
    [found] = tx.fetch(_CHORES, clock, tx.scope.buffer, removed_before, now)
    return Chores(*map(bool, found))


def _chores(dialect: Dialect) -> Select[bool, bool, bool]:
    clock = dialect.clock_value(bindparam("clock", type_=Number))
    late = overdue(clock).limit(1).scalar_subquery()
    before = garbage.c.removed_at <= bindparam("before", type_=Number)
    due = select(garbage.c.uid).where(before).order_by(garbage.c.removed_at).limit(1).scalar_subquery()
    numbers = numbers_with_groups()
    dropped = numbers.where(numbers.selected_columns[0].not_in(select(checkpoint.c.id))).limit(1).scalar_subquery()
    wall: ColumnElement[float] = bindparam("now", type_=Number)
    given_up = select(checkpoint.c.id).where(silent(wall)).limit(1).scalar_subquery()
    return select(late.is_not(None), due.is_not(None), or_(dropped.is_not(None), given_up.is_not(None)))


_CHORES = Prepared(_chores, "clock", "buffer", "before", "now")
