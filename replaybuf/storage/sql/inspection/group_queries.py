"""Groups that match a query: lists, pages, query plans, and what a delete would remove.

Pages use keyset paging: a page continues after the key of the last group of the page before, so the thousandth page
costs as much as the first. By uid, groups come from an index (for several lanes, from each lane's part, merged). Other
orders scan all matches: an index for each would make every put write more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, true, union_all

from replaybuf.rules.policies import Order, OrderTerm
from replaybuf.rules.query import Node
from replaybuf.rules.query.sql_conditions import compile_sql
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.group_metadata import (
    Listing,
    buffers_of,
    check_buffer,
    extreme_rollouts,
    read_metadata,
)
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.matching import count_groups, find_uids, select_matching
from replaybuf.storage.sql.statements.rows import FIELDS

#: With more lanes than this, one scan replaces the reads by lane; a database has a few lanes for each task.
MOST_LANES = 100
# The number of groups of each lane. (Leased groups count in the lane that they came from.)
_SIZES = "SELECT lane, sum(amount) FROM rb_tally WHERE name IN ('size', 'leased') GROUP BY lane"


@dataclass(frozen=True, slots=True)
class Key:
    """The position of a group in the order: its sort value and its uid."""

    value: Any
    uid: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes to select groups from, each with the step of its last refresh.

    `are_all`: these are all lanes of the database. `condition`: the group is in one of the lanes.
    """

    steps: Mapping[int, int | None]
    are_all: bool
    condition: ColumnElement[bool]

    @property
    def are_few(self) -> bool:
        return len(self.steps) <= MOST_LANES


def chosen_lanes(tx: Transaction, task: str | None, status: str | None) -> Lanes:
    """Return the lanes in the transaction's scope of a task and status (None: of all)."""
    found = select(lane.c.id, lane.c.step).where(tx.scope.lanes)
    if task is not None:
        found = found.where(lane.c.task_name == task)
    if status is not None:
        found = found.where(lane.c.status == status)
    steps = dict(map(tuple, tx.tuples(found)))
    column: ColumnElement[int] = group.c.lane
    sizes = {number: int(size) for number, size in tx.tuples(_SIZES)} if tx.dialect.name == "sqlite" else {}
    if 2 * sum(size for number, size in sizes.items() if number in steps) > sum(sizes.values()):
        column = column + 0  # keeps SQLite from one index look-up per lane, which is slower than a scan
    return Lanes(steps, len(steps) == tx.value("SELECT count(*) FROM rb_lane"), column.in_(steps))


@dataclass(frozen=True, slots=True)
class ReadScope(Scope):
    """The scope of a read: one buffer or all, including leased groups."""

    @property
    def lanes(self) -> ColumnElement[bool]:
        return true() if self.buffer is None else lane.c.buffer == self.buffer


def read_scope(tx: ReadTransaction, buffer: str | None) -> Transaction:
    """Return a transaction that queries one buffer or all. Raises InputError when only other buffers exist."""
    check_buffer(tx, buffer)
    return tx.of(ReadScope(buffer))


def list_groups(
    tx: ReadTransaction, buffer: str | None, query: Node, order: Order, limit: int | None, *, count: bool
) -> Listing:
    """Return the groups that match, in order; with `count` also the number of all matches, regardless of the limit."""
    looking = read_scope(tx, buffer)
    rows = read_metadata(tx, [uid for uid, _ in find_uids(looking, query, order, limit)])
    matching = count_groups(looking, query, None) if count and len(rows) == limit else len(rows)
    return Listing(rows, matching, tx.now(), several=buffer is None and len(buffers_of(tx)) > 1)


def extremes_matching(
    tx: ReadTransaction, buffer: str | None, query: Node, count: int, *, worst: bool
) -> list[tuple[int, int]]:
    """Return the same as `extreme_rollouts`, for the groups that match."""
    uids = [uid for uid, _ in find_uids(read_scope(tx, buffer), query, (), None)]
    return extreme_rollouts(tx, buffer, None, count, worst=worst, among=uids)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A selection and its order: the groups of a buffer, task and status (None: of all) that match the query."""

    query: Node
    order: OrderTerm
    buffer: str | None = None
    task: str | None = None
    status: str | None = None


def page_of_groups(
    tx: ReadTransaction, chosen: Chosen, after: Key | None, size: int
) -> tuple[list[dict[str, Any]], Key | None]:
    """Return the metadata of the `size` groups after a key (None: the first), and the key of the last one.

    That key is None on the last page.
    """
    keys = _keys_of(read_scope(tx, chosen.buffer), chosen, after, size + 1)
    rows = read_metadata(tx, [key.uid for key in keys[:size]])
    return rows, keys[size - 1] if len(keys) > size else None


def _keys_of(tx: Transaction, chosen: Chosen, after: Key | None, limit: int) -> list[Key]:
    """Return the keys of the first `limit` groups that match after a key, in order."""
    lanes = chosen_lanes(tx, chosen.task, chosen.status)
    if not lanes.steps:
        return []
    found = tx.tuples(_statement(tx, chosen, lanes, after, limit))
    return [Key(value, uid) for uid, value in found]


def _statement(tx: Transaction, chosen: Chosen, lanes: Lanes, after: Key | None, limit: int) -> Any:
    """Return the statement for the uids of a page, each with its sort value."""
    value, down = FIELDS[chosen.order.field], chosen.order.descending
    by_uid = value is group.c.uid
    condition = compile_sql(chosen.query, FIELDS, tx.dialect.name)
    matching = (
        select(group.c.uid.label("uid"), value.label("value"))
        .where(condition)
        .order_by(*_keys(value, down))
        .limit(limit)
    )
    if lane in select(value, condition).get_final_froms():
        matching = matching.where(group.c.lane == lane.c.id)
    if after is not None:
        matching = matching.where(_behind(value, after, down))
    if lanes.are_all:
        return matching
    if not by_uid or not lanes.are_few:
        return matching.where(lanes.condition)
    merged = union_all(*(select(matching.where(group.c.lane == one).subquery()) for one in lanes.steps)).subquery()
    return select(merged).order_by(_directed(merged.c.uid, down)).limit(limit)


def _keys(value: ColumnElement[Any], down: bool) -> list[ColumnElement[Any]]:
    """Return the sort columns. Ties are oldest first, also where the highest values come first.

    A scan meets groups in that order, so a full top-N sort discards later ties; the other way round, each of a million
    groups of equal reward would displace a kept one.
    """
    if value is group.c.uid:
        return [_directed(value, down)]
    return [_directed(value, down).nulls_last(), group.c.uid.asc()]


def _directed(key: ColumnElement[Any], down: bool) -> ColumnElement[Any]:
    return key.desc() if down else key.asc()


def _behind(value: ColumnElement[Any], after: Key, down: bool) -> ColumnElement[bool]:
    """Return the condition of coming after a key; groups without a value come last, by uid."""
    if value is group.c.uid:
        return group.c.uid < after.uid if down else group.c.uid > after.uid
    uid = group.c.uid > after.uid
    if after.value is None:
        return and_(value.is_(None), uid)
    beyond = value < after.value if down else value > after.value
    return or_(beyond, and_(value == after.value, uid), value.is_(None))


@dataclass(frozen=True, slots=True)
class Removable:
    """The groups that a delete by query would remove: a row for each task and status, the number of leased matches
    (which stay), and the last uid of all matches."""

    rows: list[dict[str, Any]]
    leased: int
    last: int

    @property
    def groups(self) -> int:
        return sum(row["groups"] for row in self.rows)


def removable(tx: ReadTransaction, name: str, query: Node) -> Removable:
    """Return what a delete of the matching groups of a buffer would remove."""
    columns = lane.c.task_name, lane.c.status, lane.c.leased
    counted = (*columns, func.count().label("groups"), func.max(group.c.uid).label("last"))
    looking = tx.of(ReadScope(name))
    chosen = select_matching(looking, query, *counted)
    found = looking.tuples(chosen.group_by(*columns).order_by(*columns))
    rows = [
        {"task_name": task, "status": status, "groups": groups}
        for task, status, leased, groups, _ in found
        if not leased
    ]
    leased = sum(groups for _, _, leased, groups, _ in found if leased)
    return Removable(rows, leased, max((last for *_, last in found), default=0))
