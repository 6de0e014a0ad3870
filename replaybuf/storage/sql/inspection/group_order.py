"""The lanes that a page of groups is of, and the order by staleness, which is read from indexes.

Draws by staleness have indexes of each lane: of the groups whose staleness is counted from their oldest step, and of
those that have it pinned (`schema.tables`). The first groups of each are as many as a page needs; they are merged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, and_, cast, literal, null, or_, select, union_all

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane

#: More lanes than this are read in one go; a database has a few for each task.
MOST_LANES = 100
_LARGEST = 2**63 - 1
# The groups of each lane. (Leased ones count in the lane that they came from.)
_SIZES = "SELECT lane, sum(amount) FROM rb_tally WHERE name IN ('size', 'leased') GROUP BY lane"


@dataclass(frozen=True, slots=True)
class Key:
    """The place of a group in the order: the value that it is ordered by, and its uid."""

    value: Any
    uid: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes that groups are chosen from, each with the step of its last refresh.

    `are_all` that there are; `condition` is that of being in one of them.
    """

    steps: Mapping[int, int | None]
    are_all: bool
    condition: ColumnElement[bool]

    @property
    def are_few(self) -> bool:
        return len(self.steps) <= MOST_LANES


def chosen_lanes(tx: Transaction, task: str | None, status: str | None) -> Lanes:
    """Return the lanes of the scope of a transaction, of a task and status (None: of all)."""
    found = select(lane.c.id, lane.c.step).where(tx.scope.lanes)
    if task is not None:
        found = found.where(lane.c.task_name == task)
    if status is not None:
        found = found.where(lane.c.status == status)
    steps = dict(map(tuple, tx.execute(found)))
    column: ColumnElement[int] = group.c.lane
    if tx.dialect.name == "sqlite" and _are_most(tx, steps):
        column = column + 0  # SQLite would look each of them up in an index, which takes longer than reading all
    return Lanes(steps, len(steps) == tx.value("SELECT count(*) FROM rb_lane"), column.in_(steps))


def _are_most(tx: Transaction, lanes: Mapping[int, int | None]) -> bool:
    """Return whether most groups of the database are in these lanes."""
    sizes = {number: int(size) for number, size in tx.tuples(_SIZES)}
    return 2 * sum(size for number, size in sizes.items() if number in lanes) > sum(sizes.values())


def by_staleness(tx: Transaction, lanes: Lanes, after: Key | None, limit: int, *, down: bool) -> list[Key]:
    """Return the first `limit` groups of some lanes behind a key, by staleness; those without one come last, by uid.

    Among equals the oldest come first where the most stale do, and otherwise the newest, as in the index.
    """
    parts = [part.limit(limit) for one, step in lanes.steps.items() for part in _parts(one, step, after, down)]
    found = tx.execute(union_all(*(select(part.subquery()) for part in parts)))
    return sorted((Key(value, uid) for uid, value in found), key=lambda key: _place(key, down))[:limit]


def _place(key: Key, down: bool) -> tuple[bool, int, int]:
    if key.value is None:
        return True, 0, key.uid
    return (False, -key.value, key.uid) if down else (False, key.value, -key.uid)


def _parts(number: int, step: int | None, after: Key | None, down: bool) -> list[Select[Any]]:
    """Return the groups of a lane behind a key: those with a pinned staleness, with a counted one, and without any."""
    pinned, oldest = group.c.pinned_staleness, group.c.oldest_step
    in_lane = group.c.lane == number
    counted = and_(in_lane, pinned.is_(None))
    parts = []
    if after is None or after.value is not None:
        value = None if after is None else after.value
        parts.append(
            _part(and_(in_lane, pinned.is_not(None)), pinned, pinned, value, after, down=down, newest=not down)
        )
        if step is not None:
            first = literal(step - 1, BigInteger)
            place = None if value is None else max(-_LARGEST, min(step - 1 - value, _LARGEST))
            dated = and_(counted, oldest.is_not(None))
            parts.append(_part(dated, first - oldest, oldest, place, after, down=not down, newest=not down))
        after = None
    undated = counted if step is None else and_(counted, oldest.is_(None))
    column = oldest if step is not None else group.c.uid
    parts.append(_part(undated, cast(null(), BigInteger), column, None, after, down=False, newest=False))
    return parts


def _part(
    where: ColumnElement[bool],
    value: ColumnElement[Any],
    column: ColumnElement[Any],
    place: int | None,
    after: Key | None,
    *,
    down: bool,
    newest: bool,
) -> Select[Any]:
    """Return groups by a column, from a place in it on behind the uid of a key, and those with equal ones by uid."""
    uid = group.c.uid
    found = select(uid.label("uid"), value.label("value")).where(where)
    if after is not None:
        further = uid < after.uid if newest else uid > after.uid
        if place is not None:
            at_least, beyond = (column <= place, column < place) if down else (column >= place, column > place)
            further = and_(at_least, or_(beyond, further))
        found = found.where(further)
    return found.order_by(column.desc() if down else column, uid.desc() if newest else uid)
