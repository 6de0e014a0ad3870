"""Eviction: groups beyond the capacity of a task leave in the remover's order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, select

from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rules.policies import in_order
from replaybuf.rules.race import IDLE, KEYS
from replaybuf.rules.tallies import Tally
from replaybuf.rules.transitions import Place, removed
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import lane, tally
from replaybuf.storage.sql.statements.counts import Counts, add_step
from replaybuf.storage.sql.statements.lanes import Lane
from replaybuf.storage.sql.statements.leaving import Leaving, note
from replaybuf.storage.sql.statements.ordering import Source
from replaybuf.storage.sql.statements.race_keys import check_races, pass_time
from replaybuf.storage.sql.statements.steps import remove


@dataclass(slots=True)
class _Candidate:
    uid: int
    home: Lane
    values: dict[str, Any]
    priority: float


def evict(tx: Transaction, tasks: Iterable[str], counts: Counts, leaving: Leaving = None) -> None:
    """Remove the groups beyond the capacity of these tasks; `counts` is what this transaction has yet to count."""
    limits = tx.scope.rules.limits
    if limits.capacity is None or limits.on_full != "evict":
        return
    lanes, sizes = _lanes_with_sizes(tx, tasks)
    gone: list[int] = []
    for task in sorted({one.task_name for one in lanes}):
        size = {one.id: sizes[one.id] + counts[(one.id, Tally.SIZE)] for one in lanes if one.task_name == task}
        here = [one for one in lanes if size.get(one.id, 0) > 0]
        excess = sum(size.values()) - limits.capacity
        for candidate in _first(tx, here, excess) if excess > 0 else ():
            gone.append(candidate.uid)
            step = removed(Place(candidate.home.status), Tally.EVICTED)
            add_step(counts, {candidate.home.name: candidate.home}, task, step)
    note(tx, gone, leaving)
    remove(tx, gone)


def _lanes_with_sizes(tx: Transaction, tasks: Iterable[str]) -> tuple[list[Lane], dict[int, int]]:
    """Return the lanes of these tasks that the capacity bounds, and the number of groups in each."""
    size = func.coalesce(func.sum(tally.c.amount), 0).label("size")
    query = (
        select(lane, size)
        .outerjoin(tally, and_(tally.c.lane == lane.c.id, tally.c.name == str(Tally.SIZE)))
        .where(tx.scope.lanes, lane.c.task_name.in_(sorted(tasks)), lane.c.status.not_in(ASIDE))
        .group_by(lane.c.id)
    )
    rows = tx.execute(query).all()
    return [Lane.of(row) for row in rows], {row.id: int(row.size) for row in rows}


def _first(tx: Transaction, lanes: Sequence[Lane], count: int) -> list[_Candidate]:
    """Return the first groups of several lanes together, in the remover's order."""
    remover = tx.scope.rules.remover
    check_races(lanes, remover.order)
    candidates: list[_Candidate] = []
    for home in lanes:
        for row in Source(home).first(tx, count, remover.order):
            names = [term.field for term in remover.order]
            candidates.append(_Candidate(row.uid, home, dict(zip(names, row.values, strict=True)), row.priority))
    chosen = in_order(candidates, remover.order, _value)[:count] if len(lanes) > 1 else candidates[:count]
    if remover.race is not None:
        waits = [_value(one, remover.race) for one in chosen]
        pass_time(tx, lanes, remover.race, waits, [one.priority for one in chosen])
    return chosen


def _value(candidate: _Candidate, field: str) -> Any:
    """Return the value that candidates of several lanes are ordered by; in a race, the time until they arrive."""
    value = candidate.values[field]
    if field not in KEYS:
        return value
    clock = candidate.home.clocks[field]
    return value - (clock.time if value < IDLE else clock.idle_time * IDLE)
