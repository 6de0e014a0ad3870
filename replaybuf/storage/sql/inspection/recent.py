"""What the page of a buffer's figures shows, read without looking at more rows than it shows: tallies, the groups put
last, the last draws, history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select, union_all

from replaybuf.rollouts.status import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.groups import Looking, buffers_of, looking_at
from replaybuf.storage.sql.schema.records import batch, history
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import FIELDS
from replaybuf.storage.sql.statements.counts import read_tallies

#: The groups put last whose rewards and staleness are looked at, and the last draws that are plotted.
NEWEST_GROUPS = 2000
NEWEST_BATCHES = 200
_MOST_LANES = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """The number of the groups looked at, their rewards, and their numbers by staleness."""

    groups: int
    rewards: list[float]
    staleness: dict[int, int]


def tallies_of(tx: Transaction, buffer: str | None) -> dict[str, dict[tuple[str, Status, Tally], int]]:
    """Return the tallies of one buffer or of all, by buffer. Raises InputError when only other buffers exist."""
    looking_at(tx, buffer)
    names = buffers_of(tx) if buffer is None else [buffer]
    return {name: read_tallies(tx.of(Scope(name))) for name in names}


def newest_groups(tx: Transaction, buffer: str | None, task: str | None) -> Sample:
    """Return the rewards and staleness of the completed groups that were put last, as many of each task."""
    lanes = select(lane.c.id).where(lane.c.status == Status.COMPLETED, Looking(buffer).lanes)
    if task is not None:
        lanes = lanes.where(lane.c.task_name == task)
    homes = list(tx.execute(lanes.limit(_MOST_LANES)).scalars())
    if not homes:
        return Sample(0, [], {})
    of_lane = (
        select(group.c.reward, FIELDS["staleness"].label("staleness"))
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .order_by(group.c.uid.desc())
        .limit(-(-NEWEST_GROUPS // len(homes)))
    )
    rows = tx.execute(union_all(*(select(of_lane.where(group.c.lane == one).subquery()) for one in homes))).all()
    rewards = [float(reward) for reward, _ in rows if reward is not None]
    staleness = Counter(int(stale) for _, stale in rows if stale is not None)
    return Sample(len(rows), rewards, dict(sorted(staleness.items())))


def newest_batches(tx: Transaction, buffer: str | None) -> list[dict[str, Any]]:
    """Return the time, step, size, rewards and staleness of the last draws, in the order in which they were made."""
    b = batch.c
    query = select(b.taken_at, b.step, b.groups, b.reward, b.min_reward, b.max_reward, b.staleness, b.max_staleness)
    if buffer is not None:
        query = query.where(b.buffer == buffer)
    rows = tx.execute(query.order_by(b.id.desc()).limit(NEWEST_BATCHES)).mappings().all()
    return [{**row, "taken_at": datetime.fromtimestamp(row["taken_at"], UTC)} for row in reversed(rows)]


def history_of(tx: Transaction, buffer: str | None, since: float) -> list[tuple[str, datetime, Mapping[str, Any]]]:
    """Return the figures of each minute since a time (seconds since the epoch): buffer, time and `tasks`, in order."""
    query = select(history).where(history.c.since >= since).order_by(history.c.since)
    if buffer is not None:
        query = query.where(history.c.buffer == buffer)
    return [
        (row.buffer, datetime.fromtimestamp(row.since, UTC), row.data.get("tasks", {})) for row in tx.execute(query)
    ]
