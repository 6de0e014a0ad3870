"""The archive: groups that were taken stay for SQL, up to a number or an age."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import Connection, Select, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.counts import Counts, add_counts, read_sizes
from replaybuf.storage.sql.statements.lanes import Lane, Scope
from replaybuf.storage.sql.statements.leaving import remove


def any_to_prune(connection: Connection, scope: Scope, now: float) -> bool:
    """Whether any group is too old or too much for the archive."""
    return any(
        connection.execute(query.limit(1)).first() for _, query, most in _outdated(connection, scope, now) if most
    )


def prune(connection: Connection, scope: Scope, now: float, limit: int) -> int:
    """Remove up to `limit` groups of each task that are too old or too much for the archive, oldest first."""
    counts: Counts = Counter()
    gone: list[int] = []
    for archive, query, most in _outdated(connection, scope, now):
        if connection.dialect.name == "postgresql":
            query = query.with_for_update(skip_locked=True)
        found = list(connection.execute(query.limit(min(most, limit))).scalars()) if most else []
        counts[(archive.id, Tally.SIZE)] -= len(found)
        counts[(archive.id, Tally.PRUNED)] += len(found)
        gone += found
    if gone:
        remove(connection, gone, now)
        add_counts(connection, counts)
    return len(gone)


def _outdated(connection: Connection, scope: Scope, now: float) -> list[tuple[Lane, Select[Any], int]]:
    """For each archive of a task: the groups that may have to leave, in order, and how many at most."""
    limits = scope.rules.limits
    archives = select(lane).where(scope.lanes, lane.c.status == str(Status.ARCHIVED))
    lanes = [Lane.of(row) for row in connection.execute(archives)]
    sizes = read_sizes(connection, lanes)
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
