"""The archive: groups that were taken stay for SQL, up to a number or an age."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, delete, select

from replaybuf.rollout import Status
from replaybuf.storage.sql.fields import uid_in
from replaybuf.storage.sql.lanes import Lane, Scope
from replaybuf.storage.sql.leaving import discard
from replaybuf.storage.sql.tables import group, lane
from replaybuf.storage.sql.tally import Counts, add_counts, read_sizes
from replaybuf.tally import Tally


def prune(connection: Connection, scope: Scope, now: float, limit: int) -> int:
    """Remove up to `limit` groups of each task that are too many or too old for the archive, oldest first."""
    limits = scope.rules.limits
    archives = select(lane).where(scope.lanes, lane.c.status == str(Status.ARCHIVED))
    lanes = [Lane.of(row) for row in connection.execute(archives)]
    sizes = read_sizes(connection, lanes)
    counts: Counts = Counter()
    gone: list[int] = []
    for one in lanes:
        oldest = select(group.c.uid).where(group.c.lane == one.id, group.c.archived_at.is_not(None))
        most = limit
        if limits.archive_groups is not None:
            most = min(limit, sizes.get(one.id, 0) - limits.archive_groups)
        else:
            oldest = oldest.where(group.c.archived_at < now - (limits.archive_seconds or 0))
        oldest = oldest.order_by(group.c.archived_at, group.c.uid).limit(max(0, most))
        if connection.dialect.name == "postgresql":
            oldest = oldest.with_for_update(skip_locked=True)
        found = list(connection.execute(oldest).scalars()) if most > 0 else []
        counts[(one.id, Tally.SIZE)] -= len(found)
        counts[(one.id, Tally.PRUNED)] += len(found)
        gone += found
    if gone:
        connection.execute(delete(group).where(uid_in(connection, gone)))
        discard(connection, gone, now)
        add_counts(connection, counts)
    return len(gone)
