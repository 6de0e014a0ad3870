"""Whether what is counted is what is there: tallies, uids, leases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, select, union_all

from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, groups, number_of, repairable, some, warning
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Limits, Rules
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.schema.tables import checkpoint_group, counter, garbage, group, lane, payload, tally
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.leases import end_leases, store_clock
from replaybuf.storage.sql.statements.uids import last_uid, raise_uid

COUNTS, _TOTALS, _UIDS, _LEASES, _DELIVERIES = "counts", "totals", "uids", "leases", "deliveries"

# What becomes of a group that was put.
_ENDS = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)

#: (lane, SIZE or LEASED): what was counted, and what is there.
_Sizes = dict[tuple[int, Tally], tuple[int, int]]
_laneless = ~exists().where(lane.c.id == tally.c.lane)


def _sizes(connection: Connection) -> tuple[_Sizes, dict[int, str]]:
    """What was counted and what is there, by lane (leased groups count in the lane they came from), and their names."""
    lanes = {row.id: row for row in connection.execute(select(lane))}
    by_name = {(row.buffer, row.task_name, row.status): row.id for row in lanes.values() if not row.leased}
    there: Counter[tuple[int, Tally]] = Counter()
    for lane_id, count in connection.execute(select(group.c.lane, func.count()).group_by(group.c.lane)):
        if (row := lanes.get(lane_id)) is not None:
            name = (row.buffer, row.task_name, row.status)
            home = by_name.get(name, lane_id) if row.leased else lane_id
            there[(home, Tally.LEASED if row.leased else Tally.SIZE)] += count
    counted: Counter[tuple[int, Tally]] = Counter()
    levels = select(tally.c.lane, tally.c.name, func.sum(tally.c.amount)).group_by(tally.c.lane, tally.c.name)
    for lane_id, name_, amount in connection.execute(levels.where(tally.c.name.in_(["size", "leased"]))):
        if lane_id in lanes:
            counted[(lane_id, Tally(name_))] = int(amount)
    names = {row.id: f"{row.task_name} {row.status}" for row in lanes.values()}
    return {key: (counted[key], there[key]) for key in counted.keys() | there.keys()}, names


def look_at_counts(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether as many groups are there as were counted."""
    sizes, names = _sizes(connection)
    wrong = [
        f"{names[lane_id]}: {counted:,} {name} counted, {there:,} there"
        for (lane_id, name), (counted, there) in sorted(sizes.items())
        if counted != there
    ]
    if wrong:
        return [repairable(COUNTS, "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if wrong[5:] else ""))]
    if lost := connection.execute(select(func.count()).select_from(tally).where(_laneless)).scalar_one():
        return [repairable(COUNTS, f"{lost:,} counts of lanes that are gone", level=Level.WARNING)]
    total = sum(there for _, there in sizes.values())
    return [fine(COUNTS, f"{groups(total)}, as counted")]


def repair_counts(connection: Connection, look: Look) -> Sequence[str]:
    """Count anew."""
    lost = connection.execute(delete(tally).where(_laneless)).rowcount
    sizes, names = _sizes(connection)
    wrong = {key: there - counted for key, (counted, there) in sizes.items() if counted != there}
    add_counts(connection, wrong)
    done = [f"removed {lost:,} counts of lanes that are gone"] if lost else []
    for (lane_id, name), difference in sorted(wrong.items()):
        done.append(f"counted {name} of {names[lane_id]} anew: {difference:+,}")
    return done


def look_at_totals(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether what was put is what became of it."""
    query = (
        select(lane.c.buffer, lane.c.task_name, tally.c.name, func.sum(tally.c.amount))
        .select_from(lane.join(tally, tally.c.lane == lane.c.id))
        .where(lane.c.status != str(Status.ARCHIVED))
        .group_by(lane.c.buffer, lane.c.task_name, tally.c.name)
    )
    totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for buffer, task_name, name, amount in connection.execute(query):
        totals[(buffer, task_name)][name] += int(amount)
    wrong = [
        f"{task_name}: {of[str(Tally.PUT)]:,} put, {ended:,} accounted for"
        for (_, task_name), of in sorted(totals.items())
        if (ended := sum(of[str(name)] for name in _ENDS)) != of[str(Tally.PUT)]
    ]
    if wrong:
        # An update that moves groups into the archive or out of it does this, too.
        return [warning(_TOTALS, some(wrong), "nothing, where buffer.update() archived groups; else tell who wrote it")]
    return [fine(_TOTALS, f"what was put is what became of it ({number_of(len(totals), 'task')})")]


# Uids


def look_at_uids(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether the next uid is a new one."""
    used = _highest_uid(connection)
    last = _last_uid(connection)
    if last is None:
        return [repairable(_UIDS, "the counter of uids is gone")]
    if last < used:
        return [repairable(_UIDS, f"uid {used:,} is in use, and the counter is at {last:,}: puts would fail")]
    return [fine(_UIDS, f"the last one given is {last:,}")]


def repair_uids(connection: Connection, look: Look) -> Sequence[str]:
    """Give no uid again that is in use."""
    used = _highest_uid(connection)
    last = _last_uid(connection)
    if last is None:
        connection.execute(insert(counter).values(name="uid", value=0))
    elif last >= used:
        return []
    raise_uid(connection, used)
    return [f"raised the counter of uids from {last or 0:,} to {used:,}"]


def _last_uid(connection: Connection) -> int | None:
    if connection.dialect.name == "postgresql":
        return last_uid(connection)
    found = connection.execute(select(counter.c.value).where(counter.c.name == "uid")).scalar()
    return None if found is None else int(found)


_UID_COLUMNS = (group.c.uid, group.c.lease, payload.c.uid, garbage.c.uid, checkpoint_group.c.uid)


def _highest_uid(connection: Connection) -> int:
    uids: Any = [func.max(column) for column in _UID_COLUMNS]
    highest = union_all(*(select(uid.label("uid")) for uid in uids)).subquery()
    return int(connection.execute(select(func.coalesce(func.max(highest.c.uid), 0))).scalar_one())


# Leases

#: Open buffers end leases twice a second.
OVERDUE_SECONDS = 5.0
#: Groups that were leased so often in vain are about to be set aside (`max_deliveries` is 5 unless a config says so).
MANY_DELIVERIES = 4


def look_at_leases(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether leases that are over have ended."""
    now = store_clock(connection)
    held = select(func.count(), func.min(group.c.leased_until), func.max(group.c.leased_until))
    count, first, last = connection.execute(held.where(group.c.leased_until.is_not(None))).one()
    if count and first < now - OVERDUE_SECONDS:
        over = select(func.count()).where(group.c.leased_until < now - OVERDUE_SECONDS)
        late = connection.execute(over).scalar_one()
        text = f"{groups(late)} whose lease was over up to {now - first:,.0f} s ago: nobody has the buffer open"
        return [repairable(_LEASES, text, level=Level.WARNING)]
    if count and last < now:
        return [fine(_LEASES, f"{groups(count)} leased, whose lease was over just now")]
    return [fine(_LEASES, f"{groups(count)} leased, the longest for another {last - now:,.0f} s" if count else "none")]


def repair_leases(connection: Connection, look: Look) -> Sequence[str]:
    """End the leases whose time is over."""
    done = []
    # How often is too often only the run's config knows.
    rules = Rules(limits=Limits(max_deliveries=0))
    for buffer in sorted(connection.execute(select(lane.c.buffer).distinct()).scalars()):
        if count := end_leases(connection, Scope(buffer, rules)):
            done.append(f"gave back {groups(count)} of the buffer {buffer} whose lease was over")
    return done


def look_at_deliveries(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether groups fail again and again."""
    often = select(group.c.uid).where(group.c.deliveries >= MANY_DELIVERIES).order_by(group.c.uid)
    failed = group.join(lane, lane.c.id == group.c.lane)
    uids = list(connection.execute(often.select_from(failed).where(lane.c.status != str(Status.FAILED))).scalars())
    if uids:
        text = f"{groups(len(uids))} leased {MANY_DELIVERIES} times or more in vain: {some(uids)}"
        return [warning(_DELIVERIES, text, "look at them (replaybuf show URL UID) and at their consumers' logs")]
    return [fine(_DELIVERIES, f"no group was leased {MANY_DELIVERIES} times in vain")]


CHECKS = (
    Check(COUNTS, look_at_counts, repair_counts),
    Check(_TOTALS, look_at_totals),
    Check(_UIDS, look_at_uids, repair_uids),
    Check(_LEASES, look_at_leases, repair_leases),
    Check(_DELIVERIES, look_at_deliveries),
)
