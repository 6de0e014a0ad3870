"""Whether groups, payloads, lanes and garbage belong together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    delete,
    exists,
    false,
    func,
    insert,
    or_,
    select,
    true,
    update,
)

from replaybuf.doctor.finding import Check, Finding, Level, Look, fine, groups, number_of, repairable, some, warning
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.schema.tables import checkpoint_group, garbage, group, lane, payload
from replaybuf.storage.sql.statements.checkpoints import with_groups
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.lanes import Lane, Scope, need_lane
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.leaving import FREE, set_aside
from replaybuf.storage.sql.statements.race_keys import enter_races

_LANES, _LEASED, _PAYLOADS, _LEAKED, _GARBAGE = "lanes", "leased groups", "payloads", "leaked payloads", "garbage"

#: The task of groups of which nobody knows any more where they belong.
LOST = "lost+found"

_with_lane = group.join(lane, lane.c.id == group.c.lane)


def _uids(connection: Connection, query: Any) -> list[int]:
    return list(connection.execute(query).scalars())


# Lanes


_laneless = select(group.c.uid).where(~exists().where(lane.c.id == group.c.lane)).order_by(group.c.uid)


def look_at_lanes(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether every group is of a task and status."""
    if uids := _uids(connection, _laneless):
        return [repairable(_LANES, f"{groups(len(uids))} of no task and status: {some(uids)}")]
    count = connection.execute(select(func.count()).select_from(lane)).scalar_one()
    return [fine(_LANES, f"every group is in one of {number_of(count, 'lane')} (a task's groups of one status)")]


def repair_lanes(connection: Connection, look: Look) -> Sequence[str]:
    """Set groups without a lane aside, as FAILED groups of a task of their own."""
    if not (uids := _uids(connection, _laneless)):
        return []
    home = need_lane(connection, Scope(), (LOST, Status.FAILED))
    free: dict[str, Any] = FREE | {"lane": home.id, "error": "its task and status were lost"}
    connection.execute(update(group).where(uid_in(connection, uids)).values(free))
    stepless = and_(uid_in(connection, uids), group.c.pinned_staleness.is_(None))
    connection.execute(update(group).where(stepless).values(pinned_staleness=0))
    enter_races(connection, Scope(), home, uids)
    add_counts(connection, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
    return [f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"]


# Leases


#: Groups with a lease in a lane of those without, and the reverse.
_astray: ColumnElement[bool] = or_(
    and_(lane.c.leased == false(), or_(group.c.lease.is_not(None), group.c.leased_until.is_not(None))),
    and_(lane.c.leased == true(), or_(group.c.lease.is_(None), group.c.leased_until.is_(None))),
)


def look_at_leased(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether leased groups are where leased groups belong, and no others are."""
    if uids := _uids(connection, select(group.c.uid).select_from(_with_lane).where(_astray).order_by(group.c.uid)):
        return [repairable(_LEASED, f"{groups(len(uids))} half leased: {some(uids)}")]
    leased = connection.execute(select(func.count()).where(group.c.lease.is_not(None))).scalar_one()
    return [fine(_LEASED, f"{groups(leased)} leased, all in the lanes for them")]


def repair_leased(connection: Connection, look: Look) -> Sequence[str]:
    """Groups that are half leased are free; what has a lease but no end of it ends now."""
    astray = select(group.c.uid, group.c.lease, lane).select_from(_with_lane).where(_astray)
    rows = connection.execute(astray).all()
    for row in rows:
        home = need_lane(connection, Scope(row.buffer), (row.task_name, Status(row.status)))
        if row.leased and row.lease is not None:
            values: dict[str, Any] = {"leased_until": store_clock(connection)}
        else:
            values = FREE | {"lane": home.id}
        connection.execute(update(group).where(group.c.uid == row.uid).values(values))
        if row.leased and row.lease is None:
            add_counts(connection, {(home.id, Tally.LEASED): -1, (home.id, Tally.SIZE): 1})
            enter_races(connection, Scope(row.buffer), home, [row.uid])
    return [f"gave back {groups(len(rows))} that were half leased: {some([row.uid for row in rows])}"] if rows else []


# Payloads

_bare = ~exists().where(payload.c.uid == group.c.uid)
_wanted_garbage = select(garbage.c.uid).where(exists().where(group.c.uid == garbage.c.uid)).order_by(garbage.c.uid)


def look_at_payloads(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether every group has its payload."""
    bare = connection.execute(select(group.c.uid, group.c.error).where(_bare).order_by(group.c.uid)).all()
    if new := [row.uid for row in bare if row.error is None]:
        look.damaged |= dict.fromkeys(new, "its payload is missing")
        return [repairable(_PAYLOADS, f"{groups(len(new))} without a payload: {some(new)}")]
    if bare:
        text = f"{groups(len(bare))} without a payload, set aside already: {some([row.uid for row in bare])}"
        return [warning(_PAYLOADS, text, 'buffer.delete({"uid": ...}) when nobody needs to know of them')]
    return [fine(_PAYLOADS, "every group has its payload")]


def repair_payloads(connection: Connection, look: Look) -> Sequence[str]:
    """Set groups aside that have no payload."""
    query = select(group.c.uid).where(_bare, group.c.error.is_(None))
    return put_aside(connection, dict.fromkeys(_uids(connection, query), "its payload is missing"))


def put_aside(connection: Connection, reasons: dict[int, str]) -> list[str]:
    """Groups whose payload can't be read become FAILED, with the reason.

    Archived ones stay in the archive, with the reason. Leased ones are their consumer's.
    """
    found = select(group.c.uid, lane).select_from(_with_lane).where(uid_in(connection, list(reasons)))
    homes: dict[int, tuple[str, Lane, list[int]]] = {}
    archived = []
    for row in connection.execute(found.where(lane.c.leased == false()).order_by(group.c.uid)) if reasons else ():
        if row.status == Status.ARCHIVED:
            archived.append(row.uid)
            connection.execute(update(group).where(group.c.uid == row.uid).values(error=reasons[row.uid]))
        else:
            homes.setdefault(row.id, (row.buffer, Lane.of(row), []))[2].append(row.uid)
    done = [f"said so in the error of {groups(len(archived))} of the archive: {some(archived)}"] if archived else []
    for buffer, home, uids in homes.values():
        set_aside(connection, Scope(buffer), home, {uid: reasons[uid] for uid in uids})
        done.append(f"set {groups(len(uids))} of the task {home.task_name} aside as failed: {some(uids)}")
    return done


def _leaked(connection: Connection) -> Select[tuple[int]]:
    """Payloads of no group and no checkpoint, which the sweep doesn't know of. (It gets to dropped checkpoints.)"""
    numbers = with_groups(connection)
    unknown = (
        ~exists().where(group.c.uid == payload.c.uid),
        ~exists().where(garbage.c.uid == payload.c.uid),
        ~exists().where(checkpoint_group.c.checkpoint.in_(numbers), checkpoint_group.c.uid == payload.c.uid),
    )
    return select(payload.c.uid).where(*unknown).order_by(payload.c.uid)


def look_at_leaked(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether every payload is that of a group, or waits to be swept."""
    if uids := _uids(connection, _leaked(connection)):
        return [repairable(_LEAKED, f"{len(uids):,} payloads of groups that are gone, which nobody would delete")]
    return [fine(_LEAKED, "none")]


def repair_leaked(connection: Connection, look: Look) -> Sequence[str]:
    """Leave payloads that nobody needs to the sweep."""
    if not (uids := _uids(connection, _leaked(connection))):
        return []
    now = time.time()
    connection.execute(insert(garbage), [{"uid": uid, "removed_at": now} for uid in uids])
    return [f"left {len(uids):,} leaked payloads to the sweep"]


def look_at_garbage(connection: Connection, look: Look) -> Sequence[Finding]:
    """How much waits to be swept, and whether that is what it should be."""
    found = []
    if uids := _uids(connection, _wanted_garbage):
        text = f"{groups(len(uids))} that are there are to be swept, too: {some(uids)}"
        found.append(repairable(_GARBAGE, text, level=Level.WARNING))
    count, oldest = connection.execute(select(func.count(), func.min(garbage.c.removed_at))).one()
    age = time.time() - oldest if count else 0.0
    text = f"{count:,} payloads wait to be swept" + (f", the oldest for {age:,.0f} s" if count else "")
    if count >= BACKLOG and age >= BACKLOG_SECONDS:
        # Whoever has the buffer open sweeps.
        found.append(
            repairable(_GARBAGE, f"{text}: nobody has the buffer open, or it falls behind", level=Level.WARNING)
        )
    return found or [fine(_GARBAGE, text)]


#: When payloads that wait to be swept are too many, for too long.
BACKLOG = 1000
BACKLOG_SECONDS = 60.0
_SWEPT_AT_ONCE = 10_000


def repair_garbage(connection: Connection, look: Look) -> Sequence[str]:
    """Take what is there off the list, and sweep what has waited long enough."""
    from replaybuf.storage.sql.statements.sweep import sweep
    from replaybuf.storage.sql.tasks.sweeper import GRACE_SECONDS

    wanted = _uids(connection, _wanted_garbage)
    if wanted:
        connection.execute(delete(garbage).where(exists().where(group.c.uid == garbage.c.uid)))
    swept = sweep(connection, time.time() - GRACE_SECONDS, _SWEPT_AT_ONCE)
    done = [f"took {groups(len(wanted))} off the list of what is to be swept"] if wanted else []
    return [*done, f"swept {swept:,} payloads"] if swept else done


CHECKS = (
    Check(_LANES, look_at_lanes, repair_lanes),
    Check(_LEASED, look_at_leased, repair_leased),
    Check(_PAYLOADS, look_at_payloads, repair_payloads),
    Check(_LEAKED, look_at_leaked, repair_leaked),
    Check(_GARBAGE, look_at_garbage, repair_garbage),
)
