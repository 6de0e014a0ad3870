"""Queries over the metadata: reading, counting, changing and removing the groups that match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, select, update

from replaybuf.policy import Order
from replaybuf.query import Node, SetNode, compile_sql
from replaybuf.rollout import Status
from replaybuf.storage.base import Changes, Unset
from replaybuf.storage.sql.lanes import need_lane
from replaybuf.storage.sql.put import discard
from replaybuf.storage.sql.rows import GroupRow
from replaybuf.storage.sql.tables import group, lane, payload, staleness

#: The fields of the query language; they need `group` joined to `lane`.
FIELDS: dict[str, ColumnElement[Any]] = {
    "uid": group.c.uid,
    "timestamp_id": group.c.uid,
    "task_name": lane.c.task_name,
    "status": lane.c.status,
    "staleness": staleness,
    "priority": group.c.priority,
    "times_sampled": group.c.times_sampled,
    "created_at": group.c.created_at,
    "reward": group.c.reward,
    "tags": group.c.tags,
}

_CHUNK = 10_000


def uid_in(connection: Connection, uids: Sequence[int]) -> ColumnElement[bool]:
    """`uid IN (...)`, for any number of uids."""
    return compile_sql(SetNode("uid", "$in", tuple(uids)), FIELDS, connection.dialect.name)


def _matching(connection: Connection, query: Node, *columns: ColumnElement[Any]) -> Select[Any]:
    condition = compile_sql(query, FIELDS, connection.dialect.name)
    return select(*columns).select_from(group.join(lane, lane.c.id == group.c.lane)).where(condition)


def find_uids(connection: Connection, query: Node, order: Order, limit: int | None) -> list[tuple[int, int]]:
    """The uids of the groups that match, in order, each with the size of its payload in bytes."""
    keys = []
    for term in order:
        key = FIELDS[term.field].desc() if term.descending else FIELDS[term.field].asc()
        keys.append(key.nulls_last() if term.field == "reward" else key)
    statement = _matching(connection, query, group.c.uid, group.c.bytes).order_by(*keys).limit(limit)
    return [(uid, size) for uid, size in connection.execute(statement)]


def read_groups(connection: Connection, uids: Sequence[int], query: Node | None = None) -> list[GroupRow]:
    """The groups with these uids that are there (and still match), with their payloads, in the order given."""
    statement = (
        select(group, lane.c.task_name, lane.c.status, lane.c.step, payload.c.data)
        .select_from(group.join(lane, lane.c.id == group.c.lane).outerjoin(payload, payload.c.uid == group.c.uid))
        .where(uid_in(connection, uids))
    )
    if query is not None:
        statement = statement.where(compile_sql(query, FIELDS, connection.dialect.name))
    rows = {row["uid"]: GroupRow.of(row) for row in connection.execute(statement).mappings()}
    return [rows[uid] for uid in uids if uid in rows]


def count_groups(connection: Connection, query: Node, at_most: int | None) -> int:
    """How many groups match, counting no further than `at_most`."""
    matching = _matching(connection, query, group.c.uid)
    if at_most is None:
        return int(connection.execute(matching.with_only_columns(func.count())).scalar_one())
    return int(connection.execute(select(func.count()).select_from(matching.limit(at_most).subquery())).scalar_one())


def count_lanes(connection: Connection) -> dict[tuple[str, Status], int]:
    """The number of groups of each task and status that has any."""
    size = select(func.count()).where(group.c.lane == lane.c.id).scalar_subquery()
    rows = connection.execute(select(lane.c.task_name, lane.c.status, size))
    return {(task_name, Status(status)): count for task_name, status, count in rows if count}


def delete_groups(connection: Connection, query: Node, now: float) -> int:
    """Remove the groups that match; how many."""
    removed = 0
    for uids in _locked_uids(connection, query):
        gone = connection.execute(delete(group).where(uid_in(connection, uids)).returning(group.c.uid))
        found = [uid for (uid,) in gone]
        discard(connection, found, now)
        removed += len(found)
    return removed


def update_groups(connection: Connection, query: Node, changes: Changes) -> int:
    """Change the groups that match; how many."""
    values: dict[str, Any] = {}
    if not isinstance(changes.priority, Unset):
        values["priority"] = changes.priority
    if not isinstance(changes.tags, Unset):
        values["tags"] = changes.tags or None
    changed = 0
    for uids in _locked_uids(connection, query):
        chosen = uid_in(connection, uids)
        if values:
            connection.execute(update(group).where(chosen).values(values))
        if not isinstance(changes.status, Unset):
            _move(connection, chosen, changes.status)
        changed += len(uids)
    return changed


def _move(connection: Connection, chosen: ColumnElement[bool], status: Status) -> None:
    """Move groups to the lanes of another status. Their staleness stays: they no longer follow the old lane's step."""
    home = group.join(lane, lane.c.id == group.c.lane)
    tasks = connection.execute(select(lane.c.task_name).distinct().select_from(home).where(chosen)).scalars().all()
    step = select(lane.c.step).where(lane.c.id == group.c.lane).scalar_subquery()
    follows = group.c.pinned_staleness.is_(None)
    for task_name in tasks:
        target = need_lane(connection, task_name, status)
        lanes = select(lane.c.id).where(lane.c.task_name == task_name)
        moving = update(group).where(chosen, group.c.lane.in_(lanes), group.c.lane != target.id)
        connection.execute(
            moving.where(follows).values(
                lane=target.id, pinned_staleness=step - group.c.oldest_step - 1, pinned_step=step
            )
        )
        connection.execute(moving.values(lane=target.id))
        connection.execute(update(group).where(chosen, group.c.lane == target.id).values(error=None))


def _locked_uids(connection: Connection, query: Node) -> Iterator[tuple[int, ...]]:
    statement = _matching(connection, query, group.c.uid)
    if connection.dialect.name == "postgresql":
        statement = statement.with_for_update(of=group)
    uids = connection.execute(statement).scalars().all()
    for start in range(0, len(uids), _CHUNK):
        yield tuple(uids[start : start + _CHUNK])


def count_dropped(connection: Connection, task_name: str) -> int:
    """How many groups of a task were dropped because they expired."""
    total = select(func.coalesce(func.sum(lane.c.dropped), 0)).where(lane.c.task_name == task_name)
    return int(connection.execute(total).scalar_one())
