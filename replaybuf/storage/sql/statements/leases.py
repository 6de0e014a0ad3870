"""Leases: drawn groups wait in lanes apart, with a token and a time, until they are acknowledged or come back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select, update

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import Counts, add_counts
from replaybuf.storage.sql.statements.lanes import Lane, Scope, find_lanes, need_lane
from replaybuf.storage.sql.statements.leaving import FREE, by_lane, finish, pinned, sampled
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.uids import reserve_uids
from replaybuf.storage.values import Leased, check_epoch, lost_to_others


def store_clock(connection: Connection) -> float:
    """The time by which leases end, in seconds since the epoch: PostgreSQL's own, that all hosts share."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
    return time.time()


def begin_lease(connection: Connection, seconds: float) -> tuple[int, float]:
    """The token of a new lease, and when it ends."""
    [token] = reserve_uids(connection, 1)
    return token, store_clock(connection) + seconds


def hold(
    connection: Connection, scope: Scope, rows: Sequence[GroupRow], token: int, until: float, **values: Any
) -> None:
    """Lease these groups, found in their lanes, and set these columns of them."""
    counts: Counts = Counter()
    for members in by_lane(rows).values():
        home = members[0].home
        apart = need_lane(connection, scope, home.name, leased=True)
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
        connection.execute(update(group).where(uid_in(connection, [row.uid for row in members])).values(held))
    add_counts(connection, counts)


def rows_of(connection: Connection, scope: Scope, uids: Sequence[int]) -> list[GroupRow]:
    """Groups of the buffer with their lanes, as they are held."""
    rows = _rows(connection, scope, uid_in(connection, uids))
    lanes = find_lanes(connection, scope, {(row.task_name, row.status) for row in rows})
    for row in rows:
        row.found_in = lanes[(row.task_name, row.status)]
    return rows


def acknowledge(connection: Connection, scope: Scope, lease: Leased, uids: Sequence[int], now: float) -> None:
    """Groups of a lease have been consumed."""
    check_epoch(lease, scope.epoch)
    for home, rows in _held(connection, scope, lease, uids):
        finish(connection, scope, home, rows, now)


def extend(connection: Connection, scope: Scope, lease: Leased, uids: Sequence[int], seconds: float) -> float:
    """Let the lease of these groups end later."""
    check_epoch(lease, scope.epoch)
    held = [row.uid for _, rows in _held(connection, scope, lease, uids) for row in rows]
    until = store_clock(connection) + seconds
    if held:
        connection.execute(update(group).where(uid_in(connection, held)).values(leased_until=until))
    return until


def give_back(
    connection: Connection, scope: Scope, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str
) -> int:
    """Give those of these groups back that the lease still holds; how many."""
    mine = _rows(connection, scope, group.c.lease == lease.token, uid_in(connection, uids))
    return _return(connection, scope, mine, Tally.RETURNED, counts=counts, reason=reason)


def unhold(connection: Connection, scope: Scope, lease: Leased, uids: Sequence[int]) -> None:
    """Undo a lease that nobody received."""
    mine = _rows(connection, scope, group.c.lease == lease.token, uid_in(connection, uids))
    _return(connection, scope, mine, None, counts=False, reason="")


def end_leases(connection: Connection, scope: Scope) -> int:
    """Give back what was leased for a time that is over; how many groups."""
    if not any_overdue(connection, scope):
        return 0
    overdue = group.c.leased_until <= store_clock(connection)
    rows = _rows(connection, scope, overdue, skip_locked=True)  # others end those that they have locked
    reason = "its consumer was silent for too long"
    return _return(connection, scope, rows, Tally.LEASE_EXPIRED, counts=True, reason=reason)


def any_overdue(connection: Connection, scope: Scope) -> bool:
    """Whether anything of the buffer is leased for a time that is over."""
    overdue = (
        select(group.c.uid)
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(group.c.leased_until <= store_clock(connection), lane.c.buffer == scope.buffer)
        .limit(1)
    )
    return connection.execute(overdue).first() is not None


def return_all(connection: Connection, scope: Scope) -> int:
    """Give back whatever is leased: in a copy of the store, whose consumers it doesn't know."""
    rows = _rows(connection, scope, group.c.lease.is_not(None))
    return _return(connection, scope, rows, None, counts=False, reason="")


def _rows(connection: Connection, scope: Scope, *conditions: Any, skip_locked: bool = False) -> list[GroupRow]:
    query = (
        select(group, lane.c.task_name, lane.c.status, lane.c.step)
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(lane.c.buffer == scope.buffer, *conditions)
    )
    if connection.dialect.name == "postgresql":
        query = query.with_for_update(of=group, skip_locked=skip_locked)
    return sorted((GroupRow.of(row) for row in connection.execute(query).mappings()), key=lambda row: row.uid)


def _held(
    connection: Connection, scope: Scope, lease: Leased, uids: Sequence[int]
) -> list[tuple[Lane, list[GroupRow]]]:
    """The groups of a lease by home lane, without those that were replaced while nobody else could have them."""
    mine = _rows(connection, scope, group.c.lease == lease.token, uid_in(connection, uids))
    if len(mine) < len(uids) and store_clock(connection) >= lease.until:
        raise lost_to_others(lease, len(uids) - len(mine))
    return _by_home(connection, scope, mine)


def _by_home(connection: Connection, scope: Scope, rows: Sequence[GroupRow]) -> list[tuple[Lane, list[GroupRow]]]:
    return [
        (need_lane(connection, scope, (members[0].task_name, members[0].status)), members)
        for members in by_lane(rows).values()
    ]


def _return(
    connection: Connection, scope: Scope, rows: Sequence[GroupRow], why: Tally | None, *, counts: bool, reason: str
) -> int:
    """Leased groups go back to where they were, as if not drawn; those that failed too often become FAILED."""
    limit = scope.rules.limits.max_deliveries
    for home, members in _by_home(connection, scope, rows):
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
            _move_back(connection, scope, home, again, back | less)
        if hopeless:
            failed = need_lane(connection, scope, (home.task_name, Status.FAILED))
            changes[(home.id, Tally.SET_ASIDE)] += len(hopeless)
            changes[(failed.id, Tally.SIZE)] += len(hopeless)
            for row in hopeless:
                _move_back(connection, scope, failed, [row.uid], back | {"error": _hopeless(row, reason)})
        add_counts(connection, changes)
    return len(rows)


def _move_back(
    connection: Connection, scope: Scope, home: Lane, uids: Sequence[int], values: Mapping[str, Any]
) -> None:
    connection.execute(update(group).where(uid_in(connection, uids)).values({"lane": home.id, **values}))
    enter_races(connection, scope, home, uids)


def _hopeless(row: GroupRow, reason: str) -> str:
    return f"delivered {row.columns['deliveries']} times without acknowledgement; the last time {reason}"
