"""Tallies, uids and leases, compared with the groups that are there."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, exists, func, insert, select, union_all
from sqlalchemy.exc import NoResultFound

from replaybuf.rollouts.status import Status
from replaybuf.rules.limits import Limits, Rules
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.groups import buffers_of
from replaybuf.storage.sql.schema.records import batch
from replaybuf.storage.sql.schema.tables import checkpoint_group, counter, garbage, group, lane, payload, tally
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.leases import end_leases, store_clock
from replaybuf.storage.sql.statements.uids import raise_uid

_laneless = ~exists().where(lane.c.id == tally.c.lane)


@dataclass(frozen=True, slots=True)
class Size:
    """The number of groups (SIZE or LEASED) of a lane by its tally, and the number that are there."""

    lane: int
    name: Tally
    label: str
    counted: int
    there: int


def read_sizes(tx: Transaction) -> list[Size]:
    """Return the counted and actual sizes by lane. Leased groups count in the lane that they came from."""
    lanes = {row.id: row for row in tx.execute(select(lane))}
    by_name = {(row.buffer, row.task_name, row.status): row.id for row in lanes.values() if not row.leased}
    there: Counter[tuple[int, Tally]] = Counter()
    for lane_id, count in tx.execute(select(group.c.lane, func.count()).group_by(group.c.lane)):
        if (row := lanes.get(lane_id)) is not None:
            name = (row.buffer, row.task_name, row.status)
            home = by_name.get(name, lane_id) if row.leased else lane_id
            there[(home, Tally.LEASED if row.leased else Tally.SIZE)] += count
    counted: Counter[tuple[int, Tally]] = Counter()
    levels = select(tally.c.lane, tally.c.name, func.sum(tally.c.amount)).group_by(tally.c.lane, tally.c.name)
    for lane_id, name_, amount in tx.execute(levels.where(tally.c.name.in_(["size", "leased"]))):
        if lane_id in lanes:
            counted[(lane_id, Tally(name_))] = int(amount)
    return [
        Size(lane_id, name, f"{lanes[lane_id].task_name} {lanes[lane_id].status}", counted[key], there[key])
        for key in sorted(counted.keys() | there.keys())
        for lane_id, name in [key]
    ]


def count_laneless(tx: Transaction) -> int:
    """Return the number of tallies of lanes that are gone."""
    return int(tx.execute(select(func.count()).select_from(tally).where(_laneless)).scalar_one())


def count_anew(tx: Transaction) -> tuple[int, list[Size]]:
    """Count anew; return the number of removed tallies of lanes that are gone, and the sizes that were wrong."""
    removed = tx.execute(delete(tally).where(_laneless)).rowcount
    wrong = [size for size in read_sizes(tx) if size.counted != size.there]
    add_counts(tx, {(size.lane, size.name): size.there - size.counted for size in wrong})
    return removed, wrong


def read_totals(tx: Transaction) -> dict[tuple[str, str], Counter[str]]:
    """Return the tallies of each buffer and task since the beginning, by name, without the archive."""
    query = (
        select(lane.c.buffer, lane.c.task_name, tally.c.name, func.sum(tally.c.amount))
        .select_from(lane.join(tally, tally.c.lane == lane.c.id))
        .where(lane.c.status != str(Status.ARCHIVED))
        .group_by(lane.c.buffer, lane.c.task_name, tally.c.name)
    )
    totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for buffer, task_name, name, amount in tx.execute(query):
        totals[(buffer, task_name)][name] += int(amount)
    return totals


# Uids


@dataclass(frozen=True, slots=True)
class Uids:
    """The highest uid in use, and the last one given (None when the counter is gone)."""

    used: int
    last: int | None


_UID_COLUMNS = (
    *(group.c.uid, group.c.lease, payload.c.uid, garbage.c.uid, checkpoint_group.c.uid),
    *(batch.c.last_uid, batch.c.lease),
)


def read_uids(tx: Transaction) -> Uids:
    """Return the highest uid in use and the last one given."""
    uids: Any = [func.max(column) for column in _UID_COLUMNS]
    highest = union_all(*(select(uid.label("uid")) for uid in uids)).subquery()
    used = int(tx.execute(select(func.coalesce(func.max(highest.c.uid), 0))).scalar_one())
    try:
        return Uids(used, tx.dialect.last_uid(tx.connection))
    except NoResultFound:
        return Uids(used, None)


def mend_uids(tx: Transaction) -> Uids | None:
    """Make sure that no uid in use is given again; return what was wrong, or None."""
    found = read_uids(tx)
    if found.last is None:
        tx.execute(insert(counter).values(name="uid", value=0))
    elif found.last >= found.used:
        return None
    raise_uid(tx, found.used)
    return found


# Leases


@dataclass(frozen=True, slots=True)
class Leases:
    """The number of leased groups, the seconds until the first and the last lease end, and the number overdue."""

    count: int
    first: float
    last: float
    overdue: int


def read_leases(tx: Transaction, grace: float) -> Leases:
    """Return the leases; those that should have ended more than `grace` seconds ago are overdue."""
    now, until = store_clock(tx), group.c.leased_until
    overdue = func.count().filter(until < now - grace)
    held = select(func.count(), func.min(until), func.max(until), overdue).where(until.is_not(None))
    count, first, last, late = tx.execute(held).one()
    return Leases(count, first - now, last - now, late) if count else Leases(0, 0.0, 0.0, 0)


def end_overdue(tx: Transaction) -> dict[str, int]:
    """End expired leases; return the number of groups by buffer."""
    rules = Rules(limits=Limits(max_deliveries=0))  # only the run's config knows the limit
    ended = {buffer: end_leases(tx.of(Scope(buffer, rules))) for buffer in buffers_of(tx)}
    return {buffer: count for buffer, count in ended.items() if count}


def delivered_often(tx: Transaction, times: int) -> list[int]:
    """Return the groups that were leased this often and not set aside."""
    often = select(group.c.uid).where(group.c.deliveries >= times).order_by(group.c.uid)
    joined = group.join(lane, lane.c.id == group.c.lane)
    return list(tx.execute(often.select_from(joined).where(lane.c.status != str(Status.FAILED))).scalars())
