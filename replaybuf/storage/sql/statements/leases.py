"""Leases: drawn groups wait in separate lanes, with a token and an end, until they are acknowledged or given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, exists, select

from replaybuf.rules import transitions
from replaybuf.storage.presence import EventKind
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.batches import settle
from replaybuf.storage.sql.statements.columns import STORED, uid_in
from replaybuf.storage.sql.statements.events import note_rows
from replaybuf.storage.sql.statements.lanes import find_lanes
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.steps import change, move
from replaybuf.storage.values import Leased, check_database, check_lease, count_passed_on, lost_to_others


def store_clock(tx: Transaction) -> float:
    """Return the time by which leases end, in seconds since the epoch: the database's, or one that passes evenly."""
    return tx.dialect.clock(tx)


def begin_lease(tx: Transaction, seconds: float) -> tuple[int, float]:
    """Return the token of a new lease, and when it ends."""
    [token] = tx.dialect.reserve_uids(tx, 1)
    return token, tx.dialect.start_clock(tx) + seconds


def hold(
    tx: Transaction, rows: Sequence[GroupRow], token: int, until: float, holder: str | None, **values: Any
) -> None:
    """Lease these groups, which are still in their lanes, to a holder, and set these columns of them."""
    move(tx, rows, transitions.leased, lease=token, leased_until=until, holder=holder, **values)


def rows_of(tx: Transaction, uids: Sequence[int]) -> list[GroupRow]:
    """Return these groups of the buffer with the lanes that they are in."""
    rows = _sorted(tx.fetch(_ROWS, tx.scope.buffer, tx.dialect.listed(uids)))
    lanes = find_lanes(tx, {(row.task_name, row.status) for row in rows})
    for row in rows:
        row.found_in = lanes[(row.task_name, row.status)]
    return rows


def acknowledge(tx: Transaction, lease: Leased, uids: Sequence[int]) -> None:
    """Consume groups of a lease."""
    check_lease(lease, tx.scope.epoch, tx.scope.database)
    limits, mine = tx.scope.rules.limits, _held(tx, lease, uids)
    if len(mine) < len(uids):
        _check_not_passed_on(tx, lease, set(uids).difference(row.uid for row in mine))
    move(tx, mine, lambda row: transitions.acknowledged(row, limits), trained_step=lease.train_step)
    settle(tx, lease.token, len(mine))


def extend(tx: Transaction, lease: Leased, uids: Sequence[int], seconds: float) -> float:
    """Extend the lease of these groups; return the time when it ends."""
    check_lease(lease, tx.scope.epoch, tx.scope.database)
    held = [row.uid for row in _held(tx, lease, uids)]
    until = tx.dialect.start_clock(tx) + seconds
    if held:
        change(tx, held, {"leased_until": until})
    return until


def give_back(tx: Transaction, lease: Leased, uids: Sequence[int], reason: str | None) -> Counter[str | None]:
    """Give back those of these groups that the lease still holds, and return their number by holder."""
    check_database(lease, tx.scope.database)
    limits, mine = tx.scope.rules.limits, _of(tx, lease, uids)
    move(tx, mine, lambda row: transitions.given_back(row, limits, reason))
    if reason is not None:
        _note_returned(tx, EventKind.GIVEN_BACK, mine, reason)
    return Counter(row.column("holder") for row in mine)


def unhold(tx: Transaction, lease: Leased, uids: Sequence[int]) -> None:
    """Undo a lease that nobody received."""
    move(tx, _of(tx, lease, uids), transitions.unleased)


def end_leases(tx: Transaction, *, wait: bool = False) -> int:
    """Give back the groups whose leases have expired, and return their number.

    With `wait` those that another transaction is giving back are back, too, when this returns.
    """
    now, limits = store_clock(tx), tx.scope.rules.limits
    uids = [uid for (uid,) in tx.fetch(_OVERDUE, now, tx.scope.buffer)]
    if not uids:
        return 0
    rows = read_rows(tx, uid_in(tx, uids), group.c.leased_until <= now, skip_locked=not wait)
    move(tx, rows, lambda row: transitions.lapsed(row, limits))
    _note_returned(tx, EventKind.LEASE_LAPSED, rows)
    return len(rows)


def _note_returned(tx: Transaction, kind: EventKind, rows: Sequence[GroupRow], reason: str | None = None) -> None:
    """Note that these deliveries have failed, and which groups were set aside for it."""
    limits = tx.scope.rules.limits
    note_rows(tx, kind, rows, reason)
    note_rows(tx, EventKind.SET_ASIDE, [row for row in rows if transitions.is_last(row, limits)], reason)


def any_overdue(tx: Transaction) -> bool:
    """Return whether any lease of the buffer has expired."""
    return bool(tx.fetch(_ANY_OVERDUE, store_clock(tx), tx.scope.buffer))


def overdue(now: ColumnElement[float]) -> Select[int]:
    """Return the query of the groups of a `:buffer` whose lease has expired, the longest ago first.

    The lane is looked up for each group: joined with it, SQLite reads all groups of the buffer, lane by lane. Without
    the order, PostgreSQL reads all groups of a table that hasn't been analysed yet.
    """
    late = group.c.leased_until <= now
    ours = exists().where(lane.c.id == group.c.lane, lane.c.buffer == bindparam("buffer"))
    return select(group.c.uid).where(late, ours).order_by(group.c.leased_until)


_overdue = overdue(bindparam("now", type_=group.c.leased_until.type))
_OVERDUE = Prepared(lambda _: _overdue, "now", "buffer")
_ANY_OVERDUE = Prepared(lambda _: _overdue.limit(1), "now", "buffer")


def return_all(tx: Transaction) -> int:
    """Give back all leased groups and return their number: a copy of a store doesn't know their consumers."""
    rows = read_rows(tx, group.c.lease.is_not(None))
    move(tx, rows, transitions.unleased)
    return len(rows)


def read_rows(tx: Transaction, *conditions: Any, skip_locked: bool = False) -> list[GroupRow]:
    """Return the groups of the buffer that meet the conditions, including leased ones, locked."""
    query = _rows().where(lane.c.buffer == tx.scope.buffer, *conditions)
    query = tx.dialect.for_update(query, of=group, skip_locked=skip_locked)
    return _sorted(tx.execute(query))


def _sorted(rows: Iterable[Sequence[Any]]) -> list[GroupRow]:
    return sorted(map(GroupRow.of, rows), key=lambda row: row.uid)


def _rows() -> Select[Any]:
    joined = group.join(lane, lane.c.id == group.c.lane)
    return select(*STORED, lane.c.task_name, lane.c.status, lane.c.step).select_from(joined)


def _chosen(dialect: Dialect, *conditions: Any) -> Any:
    query = _rows().where(lane.c.buffer == bindparam("buffer"), dialect.one_of(group.c.uid, "uids"), *conditions)
    return dialect.for_update(query, of=group)


_ROWS = Prepared(_chosen, "buffer", "uids")
_LEASED = Prepared(lambda dialect: _chosen(dialect, group.c.lease == bindparam("lease")), "buffer", "uids", "lease")


def _of(tx: Transaction, lease: Leased, uids: Sequence[int]) -> list[GroupRow]:
    """Return those of these groups that a lease still holds."""
    return _sorted(tx.fetch(_LEASED, tx.scope.buffer, tx.dialect.listed(uids), lease.token))


def _held(tx: Transaction, lease: Leased, uids: Sequence[int]) -> list[GroupRow]:
    """Return the groups of a lease, without those that were replaced while the lease held them.

    Raises LeaseLostError when the lease had expired for some of them.
    """
    mine = _of(tx, lease, uids)
    if len(mine) < len(uids) and store_clock(tx) >= lease.until:
        raise lost_to_others(lease, len(uids) - len(mine))
    return mine


def _check_not_passed_on(tx: Transaction, lease: Leased, uids: Iterable[int]) -> None:
    """Raise LeaseLostError if any of these groups, which the lease doesn't hold, is with others unacknowledged."""
    there = select(group.c.uid, group.c.times_sampled, group.c.lease.is_not(None)).where(uid_in(tx, uids))
    passed_on = count_passed_on(lease, ((uid, sampled, leased) for uid, sampled, leased in tx.execute(there)))
    if passed_on:
        raise lost_to_others(lease, passed_on)
