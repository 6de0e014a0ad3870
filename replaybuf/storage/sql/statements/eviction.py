"""Eviction: groups beyond the capacity of a task leave in the remover's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, false, func, select

from replaybuf.rollouts.rollout import ASIDE
from replaybuf.rules.policies import in_order
from replaybuf.rules.race import IDLE, KEYS
from replaybuf.rules.tallies import Tally
from replaybuf.rules.transitions import Place, removed
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import lane, tally
from replaybuf.storage.sql.statements.counts import Counts, add_step
from replaybuf.storage.sql.statements.lanes import COLUMNS, Lane
from replaybuf.storage.sql.statements.leaving import Leaving, note
from replaybuf.storage.sql.statements.ordering import Ordered, Source
from replaybuf.storage.sql.statements.race_keys import check_races, pass_time
from replaybuf.storage.sql.statements.steps import remove

#: A group that may leave, and its lane.
_Candidate = tuple[Lane, Ordered]


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
        chosen = _first(tx, here, excess) if excess > 0 else []
        gone += [row.uid for _, row in chosen]
        homes = {one.name: one for one in here}
        for status, n in Counter(home.status for home, _ in chosen).items():
            add_step(counts, homes, task, removed(Place(status), Tally.EVICTED), n)
    note(tx, gone, leaving)
    remove(tx, gone)


def _lanes_with_sizes(tx: Transaction, tasks: Iterable[str]) -> tuple[list[Lane], dict[int, int]]:
    """Return the lanes of these tasks that the capacity bounds, and the number of groups in each."""
    rows = tx.fetch(_SIZES, tx.scope.buffer, tx.dialect.listed(sorted(tasks)))
    return [Lane.with_clocks(*row[:-1]) for row in rows], {row[0]: int(row[-1]) for row in rows}


_SIZES = Prepared(
    lambda dialect: (
        select(*(lane.c[name] for name in COLUMNS), func.coalesce(func.sum(tally.c.amount), 0))
        .outerjoin(tally, and_(tally.c.lane == lane.c.id, tally.c.name == str(Tally.SIZE)))
        .where(
            lane.c.buffer == bindparam("buffer"),
            lane.c.leased == false(),
            *(lane.c.status != str(status) for status in sorted(ASIDE)),
            dialect.one_of(lane.c.task_name, "tasks"),
        )
        .group_by(lane.c.id)
    ),
    "buffer",
    "tasks",
)


def _first(tx: Transaction, lanes: Sequence[Lane], count: int) -> list[_Candidate]:
    """Return the first groups of several lanes together, in the remover's order."""
    remover = tx.scope.rules.remover
    check_races(lanes, remover.order)
    places = {term.field: place for place, term in enumerate(remover.order)}

    def value(candidate: _Candidate, field: str) -> Any:
        home, row = candidate
        return _comparable(home, field, row.values[places[field]])

    candidates = [(home, row) for home in lanes for row in Source(home).first(tx, count, remover.order)]
    chosen = in_order(candidates, remover.order, value)[:count] if len(lanes) > 1 else candidates
    if remover.race is not None:
        waits = [value(one, remover.race) for one in chosen]
        pass_time(tx, lanes, remover.race, waits, [row.priority for _, row in chosen])
    return chosen


def _comparable(home: Lane, field: str, value: Any) -> Any:
    """Return the value that groups of several lanes are ordered by; in a race, the time until they arrive."""
    if field not in KEYS:
        return value
    clock = home.clocks[field]
    return value - (clock.time if value < IDLE else clock.idle_time * IDLE)
