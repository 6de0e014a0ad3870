"""Tallies: sums that every transaction adds to without waiting for another.

Each PostgreSQL connection adds to its own rows (its shard), so that concurrent transactions never conflict; readers sum
them up. SQLite has one writer at a time, and one shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, func, literal, select, true

from replaybuf.rollouts.status import Status
from replaybuf.rules.level import Level
from replaybuf.rules.tallies import LaneName, Tally, levels
from replaybuf.rules.transitions import Transition
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import lane, tally
from replaybuf.storage.sql.statements.fence import FENCE, Row, compare
from replaybuf.storage.sql.statements.lanes import Lane

#: The amounts that a transaction adds, by lane and name.
Counts = Counter[tuple[int, Tally]]
#: The shard into which abandoned shards are merged.
_MERGED = literal(0)


def add_step(counts: Counts, homes: Mapping[LaneName, Lane], task_name: str, step: Transition, groups: int = 1) -> None:
    """Count a step that this number of a task's groups take."""
    for (status, name), n in step.counts.items():
        counts[(homes[(task_name, status)].id, name)] += n * groups


def add_counts(tx: Transaction, counts: Mapping[tuple[int, Tally], int]) -> None:
    """Add to the tallies."""
    tx.run_many(_ADD, [(lane_id, name.value, n) for (lane_id, name), n in counts.items() if n])


def _adding(dialect: Dialect, shard: ColumnElement[int]) -> Any:
    amounts: dict[Any, Any] = {tally.c[name]: bindparam(f"new_{name}") for name in ("lane", "name", "amount")}
    own = dialect.insert(tally).values({**amounts, tally.c.shard: shard})
    return own.on_conflict_do_update(
        index_elements=[tally.c.lane, tally.c.name, tally.c.shard],
        set_={"amount": tally.c.amount + own.excluded.amount},
    )


_NEW = ("new_lane", "new_name", "new_amount")
_ADD = Prepared(lambda dialect: _adding(dialect, dialect.shard), *_NEW)
_ADD_MERGED = Prepared(lambda dialect: _adding(dialect, _MERGED), *_NEW)


def read_tallies(tx: Transaction, tasks: Iterable[str] | None = None) -> dict[tuple[str, Status, Tally], int]:
    """Return the tallies by task and status."""
    if tasks is None:
        rows = tx.fetch(_ALL, tx.scope.buffer)
    else:
        rows = tx.fetch(_OF_TASKS, tx.scope.buffer, tx.dialect.listed(sorted(tasks)))
    return {(task, Status(status), Tally(name)): int(n) for task, status, name, n in rows}


def read_fenced_tallies(tx: Transaction) -> dict[tuple[str, Status, Tally], int]:
    """Return all tallies, read in the statement that checks the fence. Raises FencedError."""
    rows = tx.fetch(_ALL_FENCED, tx.scope.buffer, tx.scope.buffer)
    width = len(Row._fields)
    compare(tx, Row(*rows[0][:width]))
    found = (row[width:] for row in rows)  # without any tally, one row of NULLs
    return {(task, Status(status), Tally(name)): int(n) for task, status, name, n in found if task is not None}


_SUMS = (
    select(lane.c.task_name, lane.c.status, tally.c.name, func.sum(tally.c.amount).label("amount"))
    .select_from(lane.join(tally, tally.c.lane == lane.c.id))
    .where(lane.c.buffer == bindparam("buffer"))
    .group_by(lane.c.task_name, lane.c.status, tally.c.name)
)
_ALL = Prepared(lambda _: _SUMS, "buffer")
_FENCE, _ALL_SUMS = FENCE.subquery("fence"), _SUMS.subquery("sums")
_ALL_FENCED = Prepared(
    lambda _: select(_FENCE, _ALL_SUMS).select_from(_FENCE.outerjoin(_ALL_SUMS, true())), "name", "buffer"
)
_OF_TASKS = Prepared(lambda dialect: _SUMS.where(dialect.one_of(lane.c.task_name, "tasks")), "buffer", "tasks")


def read_lane_tallies(tx: Transaction, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tallies as rows of a lane's id, a name and an amount."""
    query = (
        select(tally.c.lane, tally.c.name, func.sum(tally.c.amount).label("amount"))
        .where(tally.c.lane.in_(lanes))
        .group_by(tally.c.lane, tally.c.name)
        .order_by(tally.c.lane, tally.c.name)
    )
    return [{**row, "amount": int(row["amount"])} for row in tx.execute(query).mappings()]


def read_levels(tx: Transaction, tasks: Iterable[str]) -> dict[str, Level]:
    """Return the levels of these tasks."""
    tasks = list(tasks)
    return levels(read_tallies(tx, tasks), tasks)


def read_sizes(tx: Transaction, lanes: Iterable[Lane]) -> dict[int, int]:
    """Return the number of groups in each lane."""
    query = (
        select(tally.c.lane, func.sum(tally.c.amount))
        .where(tally.c.lane.in_([one.id for one in lanes]), tally.c.name == str(Tally.SIZE))
        .group_by(tally.c.lane)
    )
    return {lane_id: int(n) for lane_id, n in tx.execute(query)}


def lock_tasks(tx: Transaction, tasks: Iterable[str]) -> None:
    """Keep out other puts and draws of these tasks, where they have limits, until the end of the transaction."""
    names = (f"replaybuf {tx.scope.buffer} {task}" for task in tasks)
    tx.dialect.lock_names(tx.connection, NamedLock.TASK, names)


def merge_shards(tx: Transaction) -> None:
    """Merge the shards of connections that may be gone."""
    if not tx.dialect.try_lock(tx.connection, Lock.SHARDS):
        return
    others = select(tally).where(tally.c.shard != 0).limit(10_000)
    rows = tx.execute(tx.dialect.for_update(others, skip_locked=True)).all()
    counts: Counts = Counter()
    for row in rows:
        counts[(row.lane, Tally(row.name))] += row.amount
        chosen = (tally.c.lane == row.lane) & (tally.c.name == row.name) & (tally.c.shard == row.shard)
        tx.execute(delete(tally).where(chosen))
    tx.run_many(_ADD_MERGED, [(lane_id, name.value, n) for (lane_id, name), n in counts.items()])
