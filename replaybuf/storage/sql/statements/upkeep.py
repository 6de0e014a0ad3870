"""Background work: what is due; retention of archived, filtered and failed groups."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Select, bindparam, delete, literal_column, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.transitions import Place, Tally, removed
from replaybuf.storage.sql.engine.commit_stamp import PREFIX
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import Number, counter, group, lane, past
from replaybuf.storage.sql.statements.buffer_facts import DROPPED
from replaybuf.storage.sql.statements.counts import Step, apply, read_sizes
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


def forget_old(tx: Transaction) -> None:
    """Delete old commit stamps."""
    old = int((time.time() - _KEPT_SECONDS) * 1_000_000)
    tx.execute(delete(counter).where(counter.c.name.startswith(PREFIX), counter.c.value < old))


def wall_clock(tx: Transaction) -> float:
    """Return the time for `removed_at`: a server's, because hosts' clocks differ."""
    return tx.dialect.clock(tx) if tx.dialect.is_remote else time.time()


@dataclass(frozen=True, slots=True)
class Chores:
    """Whether leases of the buffer are overdue, payloads can be swept, and dropped checkpoints have versions.

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
    [found] = tx.fetch(_CHORES, clock, tx.scope.buffer, wall)
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
    gone = select(past.c.removed_at).where(past.c.until.is_(None), past.c.removed_at >= 0)
    removed_at = gone.order_by(past.c.removed_at).limit(1).scalar_subquery()
    dropped: ColumnElement[bool] = literal_column(f"EXISTS ({DROPPED})", Boolean)
    return select(late.is_not(None), lease_ends, removed_at, dropped, clock, removed, dialect.connections)


_CHORES = Prepared(_chores, "clock", "buffer", "wall")
