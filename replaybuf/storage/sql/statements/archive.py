"""Groups that take no room, archived, filtered and failed ones: they stay for SQL, up to a number or an age."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.rules.transitions import Place, removed
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.counts import read_sizes
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.sql.statements.steps import Step, apply


def any_to_prune(tx: Transaction, now: float) -> bool:
    """Return whether any group is beyond the age or number limit of its status."""
    return any(tx.execute(query.limit(1)).first() for _, query, most in _outdated(tx, now) if most)


def prune(tx: Transaction, now: float, limit: int) -> int:
    """Remove up to `limit` groups per task and status that are beyond its limits, oldest first; return their number."""
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
    """Return for each bounded lane the groups that may have to leave, in order, and the most that may."""
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
        else:  # an older version kept no time for them
            since = since.nulls_first()
        found.append((one, query.order_by(since, group.c.uid), max(0, most)))
    return found
