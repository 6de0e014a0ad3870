"""Leases: drawn groups wait in lanes apart, with a token and a time, until they are acknowledged or come back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import Counts, add_counts
from replaybuf.storage.sql.statements.lanes import Lane, find_lanes, need_lane
from replaybuf.storage.sql.statements.leaving import FREE, by_lane, finish, pinned, sampled
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Leased, check_epoch, lost_to_others


def store_clock(tx: Transaction) -> float:
    """The time by which leases end, in seconds since the epoch: that of the database, where it has one."""
    return tx.dialect.clock(tx.connection)


def begin_lease(tx: Transaction, seconds: float) -> tuple[int, float]:
    """The token of a new lease, and when it ends."""
    [token] = tx.dialect.reserve_uids(tx.connection, 1)
    return token, store_clock(tx) + seconds


def hold(tx: Transaction, rows: Sequence[GroupRow], token: int, until: float, **values: Any) -> None:
    """Lease these groups, found in their lanes, and set these columns of them."""
    counts: Counts = Counter()
    for members in by_lane(rows).values():
        home = members[0].home
        apart = need_lane(tx, home.name, leased=True)
        for row in members:
            counts[(home.id, sampled(row.times_sampled))] += 1
        counts[(home.id, Tally.SIZE)] -= len(members)
        counts[(home.id, Tally.LEASED)] += len(members)
        held = pinned(home) | {
            "lane": apart.id,
            "times_sampled": group.c.times_sampled + 1,
            "deliveries": group.c.deliveries + 1,
            "lease": token,
            "leased_until": until,
            **values,
        }
        tx.execute(update(group).where(uid_in(tx, [row.uid for row in members])).values(held))
    add_counts(tx, counts)


def rows_of(tx: Transaction, uids: Sequence[int]) -> list[GroupRow]:
    """Groups of the buffer with their lanes, as they are held."""
    rows = _rows(tx, uid_in(tx, uids))
    lanes = find_lanes(tx, {(row.task_name, row.status) for row in rows})
    for row in rows:
        row.found_in = lanes[(row.task_name, row.status)]
    return rows


def acknowledge(tx: Transaction, lease: Leased, uids: Sequence[int], now: float) -> None:
    """Groups of a lease have been consumed."""
    check_epoch(lease, tx.scope.epoch)
    for home, rows in _held(tx, lease, uids):
        finish(tx, home, rows, now)


def extend(tx: Transaction, lease: Leased, uids: Sequence[int], seconds: float) -> float:
    """Let the lease of these groups end later."""
    check_epoch(lease, tx.scope.epoch)
    held = [row.uid for _, rows in _held(tx, lease, uids) for row in rows]
    until = store_clock(tx) + seconds
    if held:
        tx.execute(update(group).where(uid_in(tx, held)).values(leased_until=until))
    return until


def give_back(tx: Transaction, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str) -> int:
    """Give those of these groups back that the lease still holds; how many."""
    mine = _rows(tx, group.c.lease == lease.token, uid_in(tx, uids))
    return _return(tx, mine, Tally.RETURNED, counts=counts, reason=reason)


def unhold(tx: Transaction, lease: Leased, uids: Sequence[int]) -> None:
    """Undo a lease that nobody received."""
    mine = _rows(tx, group.c.lease == lease.token, uid_in(tx, uids))
    _return(tx, mine, None, counts=False, reason="")


def end_leases(tx: Transaction) -> int:
    """Give back what was leased for a time that is over; how many groups."""
    if not any_overdue(tx):
        return 0
    overdue = group.c.leased_until <= store_clock(tx)
    rows = _rows(tx, overdue, skip_locked=True)  # others end those that they have locked
    reason = "its consumer was silent for too long"
    return _return(tx, rows, Tally.LEASE_EXPIRED, counts=True, reason=reason)


def any_overdue(tx: Transaction) -> bool:
    """Whether anything of the buffer is leased for a time that is over."""
    overdue = (
        select(group.c.uid)
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(group.c.leased_until <= store_clock(tx), lane.c.buffer == tx.scope.buffer)
        .limit(1)
    )
    return tx.execute(overdue).first() is not None


def return_all(tx: Transaction) -> int:
    """Give back whatever is leased: in a copy of the store, whose consumers it doesn't know."""
    rows = _rows(tx, group.c.lease.is_not(None))
    return _return(tx, rows, None, counts=False, reason="")


def _rows(tx: Transaction, *conditions: Any, skip_locked: bool = False) -> list[GroupRow]:
    query = (
        select(group, lane.c.task_name, lane.c.status, lane.c.step)
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(lane.c.buffer == tx.scope.buffer, *conditions)
    )
    query = tx.dialect.for_update(query, of=group, skip_locked=skip_locked)
    return sorted((GroupRow.of(row) for row in tx.execute(query).mappings()), key=lambda row: row.uid)


def _held(tx: Transaction, lease: Leased, uids: Sequence[int]) -> list[tuple[Lane, list[GroupRow]]]:
    """The groups of a lease by home lane, without those that were replaced while nobody else could have them."""
    mine = _rows(tx, group.c.lease == lease.token, uid_in(tx, uids))
    if len(mine) < len(uids) and store_clock(tx) >= lease.until:
        raise lost_to_others(lease, len(uids) - len(mine))
    return _by_home(tx, mine)


def _by_home(tx: Transaction, rows: Sequence[GroupRow]) -> list[tuple[Lane, list[GroupRow]]]:
    return [(need_lane(tx, (members[0].task_name, members[0].status)), members) for members in by_lane(rows).values()]


def _return(tx: Transaction, rows: Sequence[GroupRow], why: Tally | None, *, counts: bool, reason: str) -> int:
    """Leased groups go back to where they were, as if not drawn; those that failed too often become FAILED."""
    limit = tx.scope.rules.limits.max_deliveries
    for home, members in _by_home(tx, rows):
        changes: Counts = Counter({(home.id, Tally.LEASED): -len(members)})
        if why is not None:
            changes[(home.id, why)] += len(members)
        for row in members:
            changes[(home.id, sampled(row.times_sampled - 1))] -= 1
        most = limit if counts and limit else math.inf
        hopeless = [row for row in members if row.columns["deliveries"] >= most]
        again = [row.uid for row in members if row.columns["deliveries"] < most]
        back = FREE | {"times_sampled": group.c.times_sampled - 1}
        if again:
            less = {} if counts else {"deliveries": group.c.deliveries - 1}
            changes[(home.id, Tally.SIZE)] += len(again)
            _move_back(tx, home, again, back | less)
        if hopeless:
            failed = need_lane(tx, (home.task_name, Status.FAILED))
            changes[(home.id, Tally.SET_ASIDE)] += len(hopeless)
            changes[(failed.id, Tally.SIZE)] += len(hopeless)
            for row in hopeless:
                _move_back(tx, failed, [row.uid], back | {"error": _hopeless(row, reason)})
        add_counts(tx, changes)
    return len(rows)


def _move_back(tx: Transaction, home: Lane, uids: Sequence[int], values: Mapping[str, Any]) -> None:
    tx.execute(update(group).where(uid_in(tx, uids)).values({"lane": home.id, **values}))
    enter_races(tx, home, uids)


def _hopeless(row: GroupRow, reason: str) -> str:
    return f"delivered {row.columns['deliveries']} times without acknowledgement; the last time {reason}"
