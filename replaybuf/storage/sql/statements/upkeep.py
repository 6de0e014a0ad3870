"""Background work: retention of archived, filtered and failed groups, and the sweep of unneeded payloads."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, bindparam, delete, or_, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.transitions import Place, Tally, removed
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.outage import PREFIX
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import (
    Number,
    checkpoint,
    checkpoint_group,
    counter,
    garbage,
    group,
    info,
    lane,
    payload,
)
from replaybuf.storage.sql.statements.checkpoints import may_sweep, numbers_with_groups, silent
from replaybuf.storage.sql.statements.counts import Step, apply, read_sizes
from replaybuf.storage.sql.statements.files import count_gone
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.sql.statements.leases import overdue


def any_to_prune(tx: Transaction, now: float) -> bool:
    """Return whether any group is beyond the age or number limit of its status."""
    return any(tx.execute(query.limit(1)).first() for _, query, most in _outdated(tx, now) if most)


def prune(tx: Transaction, now: float, limit: int) -> int:
    """Remove up to `limit` groups per task and status beyond its limits, oldest first; return their number."""
    steps: list[Step] = []
    lanes: list[Lane] = []
    for home, query, most in _outdated(tx, now):
        query = tx.dialect.for_update(query.limit(min(most, limit)), skip_locked=True)
        found = list(tx.execute(query).scalars()) if most else []
        steps.append((home.task_name, removed(Place(home.status), Tally.PRUNED), found))
        lanes.append(home)
    apply(tx, steps, lanes)
    return sum(len(uids) for _, _, uids in steps)


def _outdated(tx: Transaction, now: float) -> list[tuple[Lane, Select[Any], int]]:
    """Return for each bounded lane the candidates for removal, in order, and their number at most."""
    limits = tx.scope.rules.limits
    bounded = select(lane).where(tx.scope.lanes, lane.c.status.in_(limits.bounded_aside))
    lanes = [Lane.of(row) for row in tx.execute(bounded)]
    sizes = read_sizes(tx, lanes)
    found = []
    for one in lanes:
        most, (groups, seconds) = sizes.get(one.id, 0), limits.bound_aside(one.status)
        query = select(group.c.uid).where(group.c.lane == one.id)
        since: ColumnElement[Any] = group.c.archived_at
        if groups is not None:
            most -= groups
        else:
            query = query.where(since < now - (seconds or 0))
        if one.status == Status.ARCHIVED:
            query = query.where(since.is_not(None))
        else:  # an older version didn't store their time
            since = since.nulls_first()
        found.append((one, query.order_by(since, group.c.uid), max(0, most)))
    return found


#: Longer than any outcome is queried.
_KEPT_SECONDS = 7 * 86_400


def sweep(tx: Transaction, removed_before: float, limit: int) -> int:
    """Delete the garbage among the oldest `limit` groups removed before a time; return the number examined."""
    if not may_sweep(tx):
        return 0
    uids = [uid for (uid,) in tx.fetch(_DUE, removed_before, limit)]
    if uids:
        listed = tx.dialect.listed(uids)
        needed = {uid for (uid,) in (*tx.fetch(_STORED, listed), *tx.fetch(_IN_CHECKPOINTS, listed))}
        gone = tx.fetch(_DELETE, tx.dialect.listed(uid for uid in uids if uid not in needed))
        count_gone(tx, (file for (file,) in gone))
        tx.fetch(_FORGET, listed)
    return len(uids)


def _due(dialect: Dialect) -> Any:
    due = garbage.c.removed_at <= bindparam("before", type_=garbage.c.removed_at.type)
    query = select(garbage.c.uid).where(due).order_by(garbage.c.removed_at)
    return dialect.for_update(query.limit(bindparam("limit", type_=Integer())), skip_locked=True)


def _kept(dialect: Dialect) -> Any:
    # Groups of a checkpoint become garbage again when it is dropped.
    made = checkpoint_group.c.checkpoint.in_(select(checkpoint.c.id))
    return select(checkpoint_group.c.uid).where(made, dialect.one_of(checkpoint_group.c.uid, "uids"))


_DUE = Prepared(_due, "before", "limit")
_STORED = Prepared(lambda dialect: select(group.c.uid).where(dialect.one_of(group.c.uid, "uids")), "uids")
_IN_CHECKPOINTS = Prepared(_kept, "uids")
_DELETE = Prepared(
    lambda dialect: delete(payload).where(dialect.one_of(payload.c.uid, "uids")).returning(payload.c.file), "uids"
)
_FORGET = Prepared(lambda dialect: delete(garbage).where(dialect.one_of(garbage.c.uid, "uids")), "uids")


def forget_old(tx: Transaction) -> None:
    """Delete old commit stamps, and old answers of server functions."""
    old = int((time.time() - _KEPT_SECONDS) * 1_000_000)
    tx.execute(delete(counter).where(counter.c.name.startswith(PREFIX), counter.c.value < old))
    # Versions without server functions delete only the commit stamps.
    tx.execute(delete(info).where(info.c.name.startswith(PREFIX), info.c.name.not_in(select(counter.c.name))))


def wall_clock(tx: Transaction) -> float:
    """Return the time for `removed_at`: a server's, because hosts' clocks differ."""
    return tx.dialect.clock(tx) if tx.dialect.is_remote else time.time()


@dataclass(frozen=True, slots=True)
class Chores:
    """Whether leases of the buffer are overdue, payloads can be swept, and dropped checkpoints have groups.

    `now` is the time of `wall_clock` at the query, `next` the seconds from then on until another lease of any buffer
    ends or payloads can be swept, `connections` the server's number of connections to the database.
    """

    overdue: bool = False
    due: bool = False
    dropped: bool = False
    now: float = 0.0
    next: float = math.inf
    connections: int = 1


def find_chores(tx: Transaction, grace: float, now: float) -> Chores:
    """Return the due work: payloads can be swept `grace` seconds after the removal of their groups."""
    # On a server, its own clock is part of the query.
    clock, wall = (None, None) if tx.dialect.is_remote else (tx.dialect.clock(tx), now)
    [found] = tx.fetch(_CHORES, clock, tx.scope.buffer, wall, now)
    late, lease_ends, removed_at, dropped, clock, told, connections = found
    sweep_at = math.inf if removed_at is None else removed_at + grace
    later = min(math.inf if lease_ends is None else lease_ends - clock, sweep_at - told)
    return Chores(bool(late), sweep_at <= told, bool(dropped), float(told), later, int(connections))


def _chores(dialect: Dialect) -> Select[Any]:
    clock = dialect.clock_value(bindparam("clock", type_=Number))
    removed = dialect.clock_value(bindparam("wall", type_=Number))
    late = overdue(clock).limit(1).scalar_subquery()
    ends = group.c.leased_until
    lease_ends = select(ends).where(ends > clock).order_by(ends).limit(1).scalar_subquery()
    removed_at = select(garbage.c.removed_at).order_by(garbage.c.removed_at).limit(1).scalar_subquery()
    numbers = numbers_with_groups()
    dropped = numbers.where(numbers.selected_columns[0].not_in(select(checkpoint.c.id))).limit(1).scalar_subquery()
    now: ColumnElement[float] = bindparam("now", type_=Number)
    given_up = select(checkpoint.c.id).where(silent(now)).limit(1).scalar_subquery()
    return select(
        late.is_not(None),
        lease_ends,
        removed_at,
        or_(dropped.is_not(None), given_up.is_not(None)),
        clock,
        removed,
        dialect.connections,
    )


_CHORES = Prepared(_chores, "clock", "buffer", "wall", "now")
