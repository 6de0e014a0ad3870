"""Groups page by page, without counting or sorting those of other pages where an index has their order.

A page is asked for by the key of the last group of the one before (keyset paging), so that the thousandth costs what
the first does. In the order of uids, each lane is read from its own index as far as the page needs, and the lanes are
merged; other orders sort all groups that match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, union_all

from replaybuf.query import Node
from replaybuf.query.sql import compile_sql
from replaybuf.rules.policies import OrderTerm
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.groups import looking_at
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.metadata import read_metadata
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import FIELDS

#: More lanes than this are read in one go; a database has a few for each task.
_MOST_LANES = 100


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which groups, in which order: of a buffer, task and status (None: of all), that match the query."""

    query: Node
    order: OrderTerm
    buffer: str | None = None
    task: str | None = None
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """The place of a group in the order: the value that it is ordered by, and its uid."""

    value: Any
    uid: int


@dataclass(slots=True)
class Page:
    """The metadata of the groups of a page, and the key of its last group if there are more behind it."""

    rows: list[dict[str, Any]]
    last: Key | None


def page_of_groups(tx: Transaction, chosen: Chosen, after: Key | None, size: int) -> Page:
    """Return the page of `size` groups behind a key, or the first."""
    tx = looking_at(tx, chosen.buffer)
    lanes = _lanes(tx, chosen)
    if not lanes:
        return Page([], None)
    keys = [(uid, value) for uid, value in tx.execute(_statement(tx, chosen, lanes, after, size + 1))]
    rows = read_metadata(Look.over(tx), [uid for uid, _ in keys[:size]])
    last = Key(keys[size - 1][1], keys[size - 1][0]) if len(keys) > size else None
    return Page(rows, last)


def _lanes(tx: Transaction, chosen: Chosen) -> list[int]:
    found = select(lane.c.id).where(tx.scope.lanes)
    if chosen.task is not None:
        found = found.where(lane.c.task_name == chosen.task)
    if chosen.status is not None:
        found = found.where(lane.c.status == chosen.status)
    return list(tx.execute(found).scalars())


def _statement(tx: Transaction, chosen: Chosen, lanes: list[int], after: Key | None, limit: int) -> Any:
    """Return the statement for the uids of a page, each with the value that it is ordered by."""
    value, down = FIELDS[chosen.order.field], chosen.order.descending
    by_uid = value is group.c.uid
    matching = (
        select(group.c.uid.label("uid"), value.label("value"))
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(compile_sql(chosen.query, FIELDS, tx.dialect.name))
        .order_by(*([] if by_uid else [_directed(value, down).nulls_last()]), _directed(group.c.uid, down))
        .limit(limit)
    )
    if after is not None:
        matching = matching.where(_behind(value, after, down))
    if not by_uid or len(lanes) > _MOST_LANES:
        return matching.where(group.c.lane.in_(lanes))
    merged = union_all(*(select(matching.where(group.c.lane == one).subquery()) for one in lanes)).subquery()
    return select(merged).order_by(_directed(merged.c.uid, down)).limit(limit)


def _directed(key: ColumnElement[Any], down: bool) -> ColumnElement[Any]:
    return key.desc() if down else key.asc()


def _behind(value: ColumnElement[Any], after: Key, down: bool) -> ColumnElement[bool]:
    """Return the condition of being behind a key; groups without a value come last, by uid."""
    uid = group.c.uid < after.uid if down else group.c.uid > after.uid
    if value is group.c.uid:
        return uid
    if after.value is None:
        return and_(value.is_(None), uid)
    beyond = value < after.value if down else value > after.value
    return or_(beyond, and_(value == after.value, uid), value.is_(None))
