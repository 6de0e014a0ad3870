"""Taking: ORDER BY and LIMIT select, read, delete.

On SQLite the transaction holds the write lock; on PostgreSQL the selected rows are locked, and rows that another taker
has locked are skipped, so that takers don't wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, String, delete, func, literal, select, update

from replaybuf.codec import Codec
from replaybuf.errors import DecodeError
from replaybuf.policy import Order, OrderTerm, in_order
from replaybuf.query import Node, compile_sql
from replaybuf.rollout import Status
from replaybuf.storage.sql.lanes import Lane, find_lanes, need_lane
from replaybuf.storage.sql.put import discard, pinned
from replaybuf.storage.sql.rows import GroupRow
from replaybuf.storage.sql.select import uid_in
from replaybuf.storage.sql.tables import group, payload


def take_groups(
    connection: Connection,
    codec: Codec,
    task_name: str,
    size: int,
    *,
    status: Status,
    order: Order,
    where: Node | None,
    now: float,
    skip: set[int],
) -> list[GroupRow]:
    """Remove and return the first `size` groups of a lane whose payload is undamaged; damaged ones are set aside.

    `skip` has the uids of those that were set aside, so that a take of FAILED groups doesn't meet them again and again.
    """
    home = find_lanes(connection, [(task_name, status)]).get((task_name, str(status)))
    taken: list[GroupRow] = []
    while home is not None and len(taken) < size:
        source = _Source(home, task_name, status, where, skip if status == Status.FAILED else ())
        uids = source.first(connection, size - len(taken), order)
        if not uids:
            break
        good, damaged = _read(connection, codec, uids, source)
        for row, reason in damaged:
            _set_aside(connection, row, reason)
            skip.add(row.uid)
        connection.execute(delete(group).where(uid_in(connection, [row.uid for row in good])))
        discard(connection, [row.uid for row in good], now)
        taken += good
    return taken


class _Source:
    """The groups of one lane, with its names and step as constants: no join is needed to order and filter them."""

    def __init__(
        self, home: Lane, task_name: str, status: Status, where: Node | None, skip: Collection[int] = ()
    ) -> None:
        self.lane, self.task_name, self.status, self._where = home, task_name, status, where
        self._skip = tuple(skip)

    def first(self, connection: Connection, size: int, order: Order) -> list[int]:
        """The uids of the first `size` groups.

        Groups that follow the lane are ordered by their oldest step, the others by their own staleness, each by an
        index; so an order by staleness is merged from the first of both.
        """
        if not order or order[0].field != "staleness":
            statement = self._select(connection, order, size, self._staleness(), pinned_ones=None)
            return [row[0] for row in connection.execute(statement)]
        rows: list[Any] = []
        for pinned_ones in (False, True):
            value = group.c.pinned_staleness if pinned_ones else (self._step() - group.c.oldest_step - 1)
            rows += connection.execute(self._select(connection, order, size, value, pinned_ones=pinned_ones))
        names = {term.field: place for place, term in enumerate(order, start=1)}
        return [row[0] for row in in_order(rows, order, lambda row, name: row[names[name]])[:size]]

    def _select(
        self,
        connection: Connection,
        order: Order,
        size: int,
        staleness: ColumnElement[Any],
        *,
        pinned_ones: bool | None,
    ) -> Select[Any]:
        fields = self._fields(staleness)
        statement = select(group.c.uid, *(fields[term.field].label(f"order_{i}") for i, term in enumerate(order)))
        if connection.dialect.name == "postgresql":
            statement = statement.where(group.c.lane.between(self.lane.id, self.lane.id))
        else:
            statement = statement.where(group.c.lane == self.lane.id)
        if pinned_ones is not None:
            missing = group.c.pinned_staleness.is_(None)
            statement = statement.where(~missing if pinned_ones else missing)
        if self._where is not None:
            statement = statement.where(compile_sql(self._where, fields, connection.dialect.name))
        if self._skip:
            statement = statement.where(~uid_in(connection, self._skip))
        by_step = pinned_ones is False
        keys = [_sort_key(term, fields, by_step) for term in order]
        if connection.dialect.name == "postgresql":
            # With `lane = n` the planner takes the lane for a constant and may walk the primary key from its beginning,
            # past the groups of other lanes. A range of one lane leaves only indexes that begin with the lane.
            return statement.order_by(group.c.lane, *keys).limit(size).with_for_update(skip_locked=True)
        return statement.order_by(*keys).limit(size)

    def _fields(self, staleness: ColumnElement[Any]) -> dict[str, ColumnElement[Any]]:
        return {
            "uid": group.c.uid,
            "timestamp_id": group.c.uid,
            "task_name": literal(self.task_name, String),
            "status": literal(str(self.status), String),
            "staleness": staleness,
            "priority": group.c.priority,
            "times_sampled": group.c.times_sampled,
            "created_at": group.c.created_at,
            "reward": group.c.reward,
            "tags": group.c.tags,
        }

    def _step(self) -> ColumnElement[Any]:
        return literal(self.lane.step if self.lane.step is not None else 0, group.c.oldest_step.type)

    def _staleness(self) -> ColumnElement[Any]:
        return func.coalesce(group.c.pinned_staleness, self._step() - group.c.oldest_step - 1)


def _sort_key(term: OrderTerm, fields: Mapping[str, ColumnElement[Any]], by_step: bool) -> ColumnElement[Any]:
    column, descending = fields[term.field], term.descending
    if term.field == "staleness" and by_step:
        # The most stale groups are those with the oldest step, and that is what the index holds.
        column, descending = group.c.oldest_step, not descending
    key = column.desc() if descending else column.asc()
    return key.nulls_last() if term.field == "reward" else key


def _read(
    connection: Connection, codec: Codec, uids: Sequence[int], source: _Source
) -> tuple[list[GroupRow], list[tuple[GroupRow, str]]]:
    """The rows of these groups with their payloads, in the order given: the undamaged ones, and the others with why."""
    statement = (
        select(group, payload.c.data).outerjoin(payload, payload.c.uid == group.c.uid).where(uid_in(connection, uids))
    )
    names = {"task_name": source.task_name, "status": str(source.status), "step": source.lane.step}
    rows = {row["uid"]: GroupRow.of({**row, **names}) for row in connection.execute(statement).mappings()}
    good: list[GroupRow] = []
    damaged: list[tuple[GroupRow, str]] = []
    for row in (rows[uid] for uid in uids if uid in rows):
        try:
            if row.payload is None:
                raise DecodeError(f"the payload of group {row.uid} is missing")
            codec.verify(row.payload)
            row.verified = True
            good.append(row)
        except DecodeError as error:
            damaged.append((row, str(error)))
    return good, damaged


def _set_aside(connection: Connection, row: GroupRow, reason: str) -> None:
    failed = need_lane(connection, row.task_name, Status.FAILED)
    changes = pinned(row) | {"lane": failed.id, "error": reason}
    connection.execute(update(group).where(group.c.uid == row.uid).values(changes))
