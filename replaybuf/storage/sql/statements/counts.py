"""Counting: sums that every transaction adds to, without waiting for another.

Each connection of PostgreSQL adds to rows of its own (its shard), so that concurrent transactions never meet; readers
sum them up. SQLite has one writer at a time, and one shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, literal, select, text
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Level
from replaybuf.rules.tallies import Tally, levels
from replaybuf.storage.sql.schema.tables import lane, tally
from replaybuf.storage.sql.statements.lanes import Lane, Scope

#: What a transaction adds: by lane and name.
Counts = Counter[tuple[int, Tally]]


def add_counts(connection: Connection, counts: Mapping[tuple[int, Tally], int]) -> None:
    """Add to what was counted."""
    rows = [{"lane": lane_id, "name": str(name), "amount": n} for (lane_id, name), n in counts.items() if n]
    if rows:
        connection.execute(_ADD[connection.dialect.name], rows)


def _add(insert: Any, shard: ColumnElement[int]) -> Any:
    own = insert(tally).values(shard=shard)
    return own.on_conflict_do_update(
        index_elements=[tally.c.lane, tally.c.name, tally.c.shard],
        set_={"amount": tally.c.amount + own.excluded.amount},
    )


_ADD = {
    "postgresql": _add(postgresql.insert, func.pg_backend_pid()),
    "sqlite": _add(sqlite.insert, literal(0)),
}
_ADD_MERGED = _add(postgresql.insert, literal(0))


def read_tallies(
    connection: Connection, scope: Scope, tasks: Iterable[str] | None = None
) -> dict[tuple[str, Status, Tally], int]:
    """What was counted, by task and status."""
    query = (
        select(lane.c.task_name, lane.c.status, tally.c.name, func.sum(tally.c.amount))
        .select_from(lane.join(tally, tally.c.lane == lane.c.id))
        .where(lane.c.buffer == scope.buffer)
        .group_by(lane.c.task_name, lane.c.status, tally.c.name)
    )
    if tasks is not None:
        query = query.where(lane.c.task_name.in_(sorted(tasks)))
    return {(task, Status(status), Tally(name)): int(n) for task, status, name, n in connection.execute(query)}


def read_lane_tallies(connection: Connection, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """What was counted, as rows of a lane's id, a name and an amount."""
    query = (
        select(tally.c.lane, tally.c.name, func.sum(tally.c.amount).label("amount"))
        .where(tally.c.lane.in_(lanes))
        .group_by(tally.c.lane, tally.c.name)
    )
    return [{**row, "amount": int(row["amount"])} for row in connection.execute(query).mappings()]


def read_levels(connection: Connection, scope: Scope, tasks: Iterable[str]) -> dict[str, Level]:
    """The numbers of these tasks that their limits look at."""
    tasks = list(tasks)
    return levels(read_tallies(connection, scope, tasks), tasks)


def read_sizes(connection: Connection, lanes: Iterable[Lane]) -> dict[int, int]:
    """How many groups each lane has."""
    query = (
        select(tally.c.lane, func.sum(tally.c.amount))
        .where(tally.c.lane.in_([one.id for one in lanes]), tally.c.name == str(Tally.SIZE))
        .group_by(tally.c.lane)
    )
    return {lane_id: int(n) for lane_id, n in connection.execute(query)}


def lock_tasks(connection: Connection, scope: Scope, tasks: Iterable[str]) -> None:
    """Keep out others who put into or draw from these tasks within limits, until the end of the transaction."""
    if connection.dialect.name == "postgresql":
        for task in sorted(tasks):
            key = f"replaybuf {scope.buffer} {task}"
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 1))"), {"key": key})


def merge_shards(connection: Connection) -> None:
    """Add up the shards of connections that may be gone (PostgreSQL)."""
    alone = text("SELECT pg_try_advisory_xact_lock(:key)")
    if connection.dialect.name != "postgresql" or not connection.execute(alone, {"key": 0x5EB07}).scalar():
        return
    others = select(tally).where(tally.c.shard != 0).with_for_update(skip_locked=True).limit(10_000)
    rows = connection.execute(others).all()
    counts: Counts = Counter()
    for row in rows:
        counts[(row.lane, Tally(row.name))] += row.amount
        chosen = (tally.c.lane == row.lane) & (tally.c.name == row.name) & (tally.c.shard == row.shard)
        connection.execute(delete(tally).where(chosen))
    values = [{"lane": lane_id, "name": str(name), "amount": n} for (lane_id, name), n in counts.items()]
    if values:
        connection.execute(_ADD_MERGED, values)
