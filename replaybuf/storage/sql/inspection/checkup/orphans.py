"""Groups, payloads, lanes and garbage that don't belong together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, exists, false, func, insert, or_, select, true, update

from replaybuf.rollouts.status import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.schema.tables import checkpoint_group, garbage, group, lane, payload
from replaybuf.storage.sql.statements.checkpoints import numbers_with_groups
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import add_counts
from replaybuf.storage.sql.statements.lanes import Lane, need_lane
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.steps import FREE, set_aside
from replaybuf.storage.sql.statements.sweep import sweep
from replaybuf.storage.sql.tasks.sweeper import GRACE_SECONDS

#: The task for groups whose own task is unknown, and their error.
LOST = "lost+found"
WHY_LOST = "its task and status were lost"
MISSING = "its payload is missing"

_SWEPT_AT_ONCE = 10_000

_with_lane = group.join(lane, lane.c.id == group.c.lane)


def _uids(tx: Transaction, query: Any) -> list[int]:
    return list(tx.execute(query).scalars())


# Lanes


def laneless(tx: Transaction) -> list[int]:
    """Return the groups without a lane, and so without task and status."""
    return _uids(tx, select(group.c.uid).where(~exists().where(lane.c.id == group.c.lane)).order_by(group.c.uid))


def count_lanes(tx: Transaction) -> int:
    """Return the number of lanes."""
    return int(tx.execute(select(func.count()).select_from(lane)).scalar_one())


def adopt_laneless(tx: Transaction) -> list[int]:
    """Make groups without a lane FAILED groups of the task LOST, and return them."""
    if not (uids := laneless(tx)):
        return []
    home = need_lane(tx, (LOST, Status.FAILED))
    free: dict[str, Any] = {**FREE, "lane": home.id, "error": WHY_LOST}
    tx.execute(update(group).where(uid_in(tx, uids)).values(free))
    stepless = and_(uid_in(tx, uids), group.c.pinned_staleness.is_(None))
    tx.execute(update(group).where(stepless).values(pinned_staleness=0))
    enter_races(tx, home, uids)
    add_counts(tx, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
    return uids


# Leases


#: Groups with a lease in a lane for unleased ones, and the reverse.
_astray: ColumnElement[bool] = or_(
    and_(lane.c.leased == false(), or_(group.c.lease.is_not(None), group.c.leased_until.is_not(None))),
    and_(lane.c.leased == true(), or_(group.c.lease.is_(None), group.c.leased_until.is_(None))),
)


def half_leased(tx: Transaction) -> list[int]:
    """Return the groups that only their lane or only their lease says are leased."""
    return _uids(tx, select(group.c.uid).select_from(_with_lane).where(_astray).order_by(group.c.uid))


def count_leased(tx: Transaction) -> int:
    """Return the number of groups with a lease."""
    return int(tx.execute(select(func.count()).where(group.c.lease.is_not(None))).scalar_one())


def give_back_half_leased(tx: Transaction) -> list[int]:
    """Free groups that are half leased, and return them; a lease without an end ends now."""
    rows = tx.execute(select(group.c.uid, group.c.lease, lane).select_from(_with_lane).where(_astray)).all()
    for row in rows:
        own = tx.of(Scope(row.buffer))
        home = need_lane(own, (row.task_name, Status(row.status)))
        if row.leased and row.lease is not None:
            values: dict[str, Any] = {"leased_until": store_clock(tx)}
        else:
            values = {**FREE, "lane": home.id}
        tx.execute(update(group).where(group.c.uid == row.uid).values(values))
        if row.leased and row.lease is None:
            add_counts(tx, {(home.id, Tally.LEASED): -1, (home.id, Tally.SIZE): 1})
            enter_races(own, home, [row.uid])
    return [row.uid for row in rows]


# Payloads


def bare_groups(tx: Transaction) -> dict[int, str | None]:
    """Return the groups without a payload, each with its error: those with an error were set aside already."""
    bare = ~exists().where(payload.c.uid == group.c.uid)
    rows = tx.execute(select(group.c.uid, group.c.error).where(bare).order_by(group.c.uid))
    return {row.uid: row.error for row in rows}


@dataclass(slots=True)
class Aside:
    """Unreadable groups that were set aside: the archived ones, and the others by task."""

    archived: list[int] = field(default_factory=list)
    failed: list[tuple[str, list[int]]] = field(default_factory=list)


def put_aside(tx: Transaction, reasons: Mapping[int, str]) -> Aside:
    """Make groups with unreadable payloads FAILED, with the reason, and return them.

    Archived ones stay in the archive, with the reason. Leased ones are left to their consumers.
    """
    aside = Aside()
    if not reasons:
        return aside
    found = select(group.c.uid, lane).select_from(_with_lane).where(uid_in(tx, list(reasons)))
    homes: dict[int, tuple[str, Lane, list[int]]] = {}
    for row in tx.execute(found.where(lane.c.leased == false()).order_by(group.c.uid)).all():
        if row.status == Status.ARCHIVED:
            aside.archived.append(row.uid)
            tx.execute(update(group).where(group.c.uid == row.uid).values(error=reasons[row.uid]))
        else:
            homes.setdefault(row.id, (row.buffer, Lane.of(row), []))[2].append(row.uid)
    for buffer, home, uids in homes.values():
        set_aside(tx.of(Scope(buffer)), home, {uid: reasons[uid] for uid in uids})
        aside.failed.append((home.task_name, uids))
    return aside


def put_bare_aside(tx: Transaction) -> Aside:
    """Set groups without a payload aside, and return them."""
    return put_aside(tx, {uid: MISSING for uid, error in bare_groups(tx).items() if error is None})


def _leaked(tx: Transaction) -> Select[tuple[int]]:
    """Return the query for unneeded payloads that the sweep misses. (It gets to those of dropped checkpoints.)"""
    numbers = list(tx.execute(numbers_with_groups()).scalars())
    unknown = (
        ~exists().where(group.c.uid == payload.c.uid),
        ~exists().where(garbage.c.uid == payload.c.uid),
        ~exists().where(checkpoint_group.c.checkpoint.in_(numbers), checkpoint_group.c.uid == payload.c.uid),
    )
    return select(payload.c.uid).where(*unknown)


def count_leaked(tx: Transaction) -> int:
    """Return the number of payloads that nothing needs and no sweep would delete."""
    return int(tx.execute(select(func.count()).select_from(_leaked(tx).subquery())).scalar_one())


def sweep_leaked(tx: Transaction) -> int:
    """Make leaked payloads garbage, and return their number."""
    uids = _uids(tx, _leaked(tx).order_by(payload.c.uid))
    now = time.time()
    if uids:
        tx.execute(insert(garbage), [{"uid": uid, "removed_at": now} for uid in uids])
    return len(uids)


_wanted = exists().where(group.c.uid == garbage.c.uid)


def wanted_garbage(tx: Transaction) -> list[int]:
    """Return the groups that are there although their payloads are garbage."""
    return _uids(tx, select(garbage.c.uid).where(_wanted).order_by(garbage.c.uid))


def mend_garbage(tx: Transaction) -> tuple[int, int]:
    """Unmark the garbage of groups that are there, and sweep what has waited long enough; return both numbers."""
    if wanted := wanted_garbage(tx):
        tx.execute(delete(garbage).where(_wanted))
    return len(wanted), sweep(tx, time.time() - GRACE_SECONDS, _SWEPT_AT_ONCE)
