"""Eviction: what is beyond the capacity of a task leaves, in the order of the remover."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete

from replaybuf.policy import in_order
from replaybuf.race import IDLE, KEYS
from replaybuf.rollout import Status
from replaybuf.storage.sql.fields import uid_in
from replaybuf.storage.sql.lanes import Lane, Scope, lanes_of_tasks
from replaybuf.storage.sql.leaving import discard
from replaybuf.storage.sql.races import check_races, pass_time
from replaybuf.storage.sql.source import Source
from replaybuf.storage.sql.tables import group
from replaybuf.storage.sql.tally import Counts, add_counts, read_sizes
from replaybuf.tally import Tally


@dataclass(slots=True)
class _Candidate:
    uid: int
    home: Lane
    values: dict[str, Any]
    priority: float


def evict(connection: Connection, scope: Scope, tasks: Iterable[str], now: float) -> None:
    """Remove what is beyond the capacity of these tasks."""
    limits = scope.rules.limits
    if limits.capacity is None or limits.on_full != "evict":
        return
    lanes = [one for one in lanes_of_tasks(connection, scope, tasks) if one.status != Status.ARCHIVED]
    sizes = read_sizes(connection, lanes)
    counts: Counts = Counter()
    gone: list[int] = []
    for task in sorted({one.task_name for one in lanes}):
        here = [one for one in lanes if one.task_name == task and sizes.get(one.id, 0) > 0]
        excess = sum(sizes[one.id] for one in here) - limits.capacity
        for candidate in _first(connection, scope, here, excess) if excess > 0 else ():
            gone.append(candidate.uid)
            counts[(candidate.home.id, Tally.EVICTED)] += 1
            counts[(candidate.home.id, Tally.SIZE)] -= 1
    if gone:
        connection.execute(delete(group).where(uid_in(connection, gone)))
        discard(connection, gone, now)
        add_counts(connection, counts)


def _first(connection: Connection, scope: Scope, lanes: Sequence[Lane], count: int) -> list[_Candidate]:
    """The first groups in the remover's order, of several lanes together."""
    remover = scope.rules.remover
    check_races(lanes, remover.order)
    candidates: list[_Candidate] = []
    for home in lanes:
        for row in Source(home).first(connection, count, remover.order):
            names = [term.field for term in remover.order]
            candidates.append(_Candidate(row.uid, home, dict(zip(names, row.values, strict=True)), row.priority))
    chosen = in_order(candidates, remover.order, _value)[:count] if len(lanes) > 1 else candidates[:count]
    if remover.race is not None:
        waits = [_value(one, remover.race) for one in chosen]
        pass_time(connection, lanes, remover.race, waits, [one.priority for one in chosen])
    return chosen


def _value(candidate: _Candidate, field: str) -> Any:
    """What candidates of several lanes are ordered by; of a race, the time until they arrive."""
    value = candidate.values[field]
    if field not in KEYS:
        return value
    clock = candidate.home.clocks[field]
    return value - (clock.time if value < IDLE else clock.idle_time * IDLE)
