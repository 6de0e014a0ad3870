"""The archive: taken groups stay for SQL, up to a number or an age."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.rules.transitions import Place, removed
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.counts import read_sizes
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.sql.statements.steps import Step, apply


def any_to_prune(tx: Transaction, now: float) -> bool:
    """Return whether any group is beyond the archive's age or number limit."""
    return any(tx.execute(query.limit(1)).first() for _, query, most in _outdated(tx, now) if most)


def prune(tx: Transaction, now: float, limit: int) -> int:
    """Remove up to `limit` groups per task that are beyond the archive's limits, oldest first; return their number."""
    steps: list[Step] = []
    lanes: list[Lane] = []
    for archive, query, most in _outdated(tx, now):
        query = tx.dialect.for_update(query.limit(min(most, limit)), skip_locked=True)
        found = list(tx.execute(query).scalars()) if most else []
        steps.append((archive.task_name, removed(Place(Status.ARCHIVED), Tally.PRUNED), found))
        lanes.append(archive)
    apply(tx, steps, lanes)
    return sum(len(uids) for _, _, uids in steps)


def _outdated(tx: Transaction, now: float) -> list[tuple[Lane, Select[Any], int]]:
    """Return for each task's archive its lane, the groups that may have to leave, in order, and the most that may."""
    limits = tx.scope.rules.limits
    archives = select(lane).where(tx.scope.lanes, lane.c.status == str(Status.ARCHIVED))
    lanes = [Lane.of(row) for row in tx.execute(archives)]
    sizes = read_sizes(tx, lanes)
    found = []
    for one in lanes:
        most = sizes.get(one.id, 0)
        query = select(group.c.uid).where(group.c.lane == one.id, group.c.archived_at.is_not(None))
        if limits.archive_groups is not None:
            most -= limits.archive_groups
        else:
            query = query.where(group.c.archived_at < now - (limits.archive_seconds or 0))
        found.append((one, query.order_by(group.c.archived_at, group.c.uid), max(0, most)))
    return found
