"""The groups of one lane in the order of a policy: the ORDER BY and LIMIT of takes and evictions.

On PostgreSQL the selected rows are locked, and rows locked by another transaction are skipped, so that takers don't
wait for each other; on SQLite the transaction holds the write lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, String, func, literal, select

from replaybuf.query import Node, compile_sql
from replaybuf.rules.policies import Order, OrderTerm, in_order
from replaybuf.rules.race import KEYS
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.lanes import Lane


class Ordered(NamedTuple):
    """A group, and the values by which it was ordered."""

    uid: int
    priority: float
    values: tuple[Any, ...]


class Source:
    """The groups of one lane, with its names and step as constants, so that ordering and filtering need no join."""

    def __init__(self, home: Lane, where: Node | None = None, skip: Collection[int] = ()) -> None:
        self.lane, self._where, self._skip = home, where, tuple(skip)

    def first(self, tx: Transaction, size: int, order: Order) -> list[Ordered]:
        """Return the first `size` groups.

        Groups that follow the lane are ordered by their oldest step, pinned ones by their own staleness, each by an
        index; an order by staleness merges the first of both.
        """
        if not order or order[0].field != "staleness":
            return self._read(tx, self._select(tx, order, size, self._staleness(), pinned_ones=None))
        rows: list[Ordered] = []
        for pinned_ones in (False, True):
            value = group.c.pinned_staleness if pinned_ones else (self._step() - group.c.oldest_step - 1)
            rows += self._read(tx, self._select(tx, order, size, value, pinned_ones=pinned_ones))
        places = {term.field: place for place, term in enumerate(order)}
        return in_order(rows, order, lambda row, name: row.values[places[name]])[:size]

    def _read(self, tx: Transaction, statement: Select[Any]) -> list[Ordered]:
        return [Ordered(row[0], row[1], tuple(row[2:])) for row in tx.execute(statement)]

    def _select(
        self,
        tx: Transaction,
        order: Order,
        size: int,
        staleness: ColumnElement[Any],
        *,
        pinned_ones: bool | None,
    ) -> Select[Any]:
        fields = self._fields(staleness)
        values = (fields[term.field].label(f"order_{i}") for i, term in enumerate(order))
        statement = select(group.c.uid, group.c.priority, *values)
        if pinned_ones is not None:
            missing = group.c.pinned_staleness.is_(None)
            statement = statement.where(~missing if pinned_ones else missing)
        for term in order:
            if term.field in KEYS:  # true for every group of the lane; it selects the index with this order
                statement = statement.where(fields[term.field].is_not(None))
        if self._where is not None:
            statement = statement.where(compile_sql(self._where, fields, tx.dialect.name))
        if self._skip:
            statement = statement.where(~uid_in(tx, self._skip))
        keys = [_sort_key(term, fields, pinned_ones is False) for term in order]
        newest_first = order[0].descending and order[0].field in ("uid", "timestamp_id")
        return tx.dialect.first_of_lane(statement, self.lane.id, keys, size, backwards=newest_first)

    def _fields(self, staleness: ColumnElement[Any]) -> dict[str, ColumnElement[Any]]:
        return {
            "uid": group.c.uid,
            "timestamp_id": group.c.uid,
            "task_name": literal(self.lane.task_name, String),
            "status": literal(str(self.lane.status), String),
            "staleness": staleness,
            "priority": group.c.priority,
            "times_sampled": group.c.times_sampled,
            "created_at": group.c.created_at,
            "reward": group.c.reward,
            "tags": group.c.tags,
            **{key: group.c[key] for key in KEYS},
        }

    def _step(self) -> ColumnElement[Any]:
        return literal(self.lane.step if self.lane.step is not None else 0, group.c.oldest_step.type)

    def _staleness(self) -> ColumnElement[Any]:
        return func.coalesce(group.c.pinned_staleness, self._step() - group.c.oldest_step - 1)


def _sort_key(term: OrderTerm, fields: Mapping[str, ColumnElement[Any]], by_step: bool) -> ColumnElement[Any]:
    column, descending = fields[term.field], term.descending
    if term.field == "staleness" and by_step:
        # The most stale groups are those with the oldest step, which is what the index has.
        column, descending = group.c.oldest_step, not descending
    key = column.desc() if descending else column.asc()
    return key.nulls_last() if term.field == "reward" else key
