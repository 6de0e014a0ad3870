"""The order of draws in SQL: the races of random policies (`replaybuf.rules.policies`), and the first groups of a lane.

Once a lane runs a race, every group in it has a key: each put into the lane reads the lane's row first, and draws the
group's key. The first random draw gives keys to groups of lanes that run none yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Select, String, and_, bindparam, func, null, select

from replaybuf.errors import ConfigError, StorageError
from replaybuf.rules.policies import IDLE, KEYS, Order, OrderTerm
from replaybuf.rules.query import Node
from replaybuf.rules.query.sql_conditions import compile_sql
from replaybuf.storage.sql.engine.dialect import Dialect, Form, of_core
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import buffer, checkpoint, group, lane, payload, step_order
from replaybuf.storage.sql.statements.lanes import Lane, lanes_where, race_of, set_race
from replaybuf.storage.sql.statements.past import keep
from replaybuf.storage.sql.statements.rows import FIELDS, NULLABLE, STORED, GroupRow

_CHUNK = 10_000
#: Groups of a lane by which the share that matches is estimated, and the cost of a new key, in reads of a group.
_SAMPLE, _KEY_COST = 500, 50


class RaceNotRunError(Exception):
    """A draw needs lanes to run a race that they don't run; `begin_races` lets them, and the draw is repeated."""


def check_races(tx: Transaction, lanes: Iterable[Lane], order: Order) -> None:
    """Raise RaceNotRunError if the order is random and one of the lanes runs no race.

    Raises ConfigError if one runs another race than this process's policies.
    """
    if tx.scope.rules.random is None or all(term.field not in KEYS for term in order):
        return
    key, seed = tx.scope.rules.random
    for race in [home.race for home in lanes]:
        if race is None:
            raise RaceNotRunError
        if race.key != key or seed not in (None, race.seed):
            own = f"{key} with {'any seed' if seed is None else f'the seed {seed}'}"
            raise ConfigError(
                f"the buffer {tx.scope.buffer!r} has a random order by {race.key} with the seed {race.seed}, from its "
                f"first process with a random policy; this process has one by {own}: give all processes that draw or "
                "evict at random the same policy and seed, or use another buffer"
            )


def begin_races(tx: Transaction) -> None:
    """Let all lanes of the buffer run a race, and give their groups keys. Must exclude other writers."""
    race = race_of(tx)
    if race is None:
        return
    for home in lanes_where(tx, "NOT leased AND race IS NULL"):
        set_race(tx, home, replace(race))
        last: int | None = 0
        while last is not None:
            members = tx.tuples(
                f"{_MEMBERS} WHERE lane = :lane AND uid > :last ORDER BY uid LIMIT :size",
                lane=home.id,
                last=last,
                size=_CHUNK,
            )
            keep(tx, [uid for uid, *_ in members])
            _set_keys(tx, home, members)
            last = members[-1][0] if members else None


def enter_race(tx: Transaction, home: Lane, uids: Sequence[int]) -> None:
    """Give groups that entered a lane, or whose priority changed, keys in the lane's race."""
    if home.race is not None and uids:
        _set_keys(tx, home, tx.tuples(f"{_MEMBERS} WHERE uid {{in:uids}}", uids=list(uids)))


_MEMBERS = "SELECT uid, coalesce(ticket, uid), priority FROM rb_group"


def _set_keys(tx: Transaction, home: Lane, members: Sequence[Sequence[Any]]) -> None:
    assert home.race is not None
    keys = home.race.draw_keys((ticket, priority) for _, ticket, priority in members)
    tx.set_columns(("random_key",), sorted((uid, key) for (uid, *_), key in zip(members, keys, strict=True)))


def advance(tx: Transaction, home: Lane, rows: Iterable[GroupRow]) -> None:
    """Advance the lane's race past these drawn groups."""
    assert home.race is not None
    if arrived := [row for row in rows if not row.is_afresh]:
        home.race.advance(row.column("random_key") for row in arrived)
        go_on(tx, home, [row.priority for row in arrived])


def skip_arrived(tx: Transaction, home: Lane) -> None:
    """Give new keys to groups whose keys the lane's race has passed, and which weren't drawn."""
    if home.race is None:
        return
    uids = tx.values(_ARRIVED, lane=home.id, time=home.race.time, idle=IDLE, until=IDLE * (1.0 + home.race.idle_time))
    keep(tx, uids)
    enter_race(tx, home, uids)


_ARRIVED = """SELECT uid FROM rb_group WHERE lane = :lane AND random_key IS NOT NULL
AND (random_key <= :time OR random_key BETWEEN :idle AND :until) {skip}"""


def go_on(tx: Transaction, home: Lane, priorities: Iterable[float]) -> None:
    """Write the lane's clock after a draw of groups with these priorities; a worn-out race ends.

    A concurrent draw may have advanced it further, or have ended the race.
    """
    assert home.race is not None
    if home.race.is_worn(priorities):
        set_race(tx, home, None)
    else:
        tx.change(_ADVANCE_RACE, time=home.race.time, idle=home.race.idle_time, id=home.id)


_ADVANCE_RACE = """UPDATE rb_lane SET clock = CASE WHEN clock < :time THEN :time ELSE clock END,
    idle_clock = CASE WHEN idle_clock < :idle THEN :idle ELSE idle_clock END WHERE id = :id"""


class Ordered(NamedTuple):
    """A group, and the values of its sort fields."""

    uid: int
    priority: float
    values: tuple[Any, ...]


class Source:
    """The groups of one lane, with the lane's names and step as constants, so that queries need no join."""

    def __init__(self, home: Lane, where: Node | None = None, skip: Collection[int] = ()) -> None:
        self.lane, self._where, self._skipped_uids = home, where, tuple(skip)

    def first(self, tx: Transaction, size: int, order: Order) -> list[Ordered]:
        """Return the first `size` groups."""
        rows = self._read(tx, _Query(order), size)
        return [Ordered(row[0], row[1], tuple(row[2:])) for row in rows]

    def read(self, tx: Transaction, size: int, order: Order, *, payloads: bool = True) -> list[GroupRow]:
        """Return the first `size` groups as rows, with their payloads unless these are read later."""
        return self._distinct_rows(self._read(tx, _Query(order, whole=True, bare=not payloads), size))

    def _distinct_rows(self, rows: Sequence[Sequence[Any]]) -> list[GroupRow]:
        """Return these rows. Raises StorageError if a group is among them twice, as a damaged index may have it."""
        if len({row[0] for row in rows}) < len(rows):
            raise StorageError(
                f"task {self.lane.task_name!r:.200}: in order, its {self.lane.status} groups have some of them twice: "
                "an index of the database is damaged, and nothing was taken; replaybuf doctor says how far, "
                "docs/outages.md how to save it",
                reason="not a database",
            )
        return GroupRow.drawn(rows, self.lane)

    def is_sparse(self, tx: Transaction, size: int) -> bool:
        """Return whether a random draw from this lane would pass over too many groups that don't match.

        The share that matches is estimated from the lane's first groups.
        """
        groups = tx.value("SELECT sum(amount) FROM rb_tally WHERE lane = :lane AND name = 'size'", lane=self.lane.id)
        if self._where is None or (groups or 0) <= _SAMPLE:
            return False
        query = "SELECT uid FROM rb_group WHERE lane = :lane ORDER BY uid LIMIT 1 OFFSET :before"
        [[last_uid]] = tx.tuples(query, lane=self.lane.id, before=_SAMPLE - 1) or [[0]]
        statement = _select_matching(tx.dialect, self._where, counted=True)
        [[matching]] = tx.tuples(statement, **self._values(tx, size), last=last_uid)
        passed_over = size * (_SAMPLE - matching) / max(matching, 0.5)
        return bool(passed_over * _KEY_COST > groups)

    def read_afresh(self, tx: Transaction, size: int, *, payloads: bool = True) -> list[GroupRow]:
        """Return `size` groups drawn at random from all that match, whatever their keys, which they and others keep."""
        home, race = self.lane, self.lane.race
        assert race is not None
        values, skip = self._values(tx, size), set(self._skipped_uids)
        members = [row for row in tx.tuples(_select_matching(tx.dialect, self._where), **values) if row[0] not in skip]
        race.tick()
        keys = race.draw_keys((ticket, priority) for _, ticket, priority in members)
        race.tick()  # the drawn ones may come back, with other keys
        go_on(tx, home, ())
        remaining = [uid for _, uid in sorted((key, row[0]) for key, row in zip(keys, members, strict=True))]
        rows: list[GroupRow] = []
        while remaining and len(rows) < size:  # others may have locked some
            chunk, remaining = remaining[: size - len(rows)], remaining[size - len(rows) :]
            uids = tx.dialect.listed(chunk)
            locked = {row[0]: row for row in tx.tuples(_select_by_uid(tx.dialect, payloads), lane=home.id, uids=uids)}
            rows += GroupRow.drawn([locked[uid] for uid in chunk if uid in locked], home)
        for row in rows:
            row.is_afresh = True
        return rows

    def read_checked(self, tx: Transaction, size: int, order: Order) -> list[GroupRow] | None:
        """Return the first groups as `read` does, in one statement; None if the lane or the buffer's epoch changed.

        Notes the newest checkpoint.
        """
        rows = self._read(tx, _Query(order, whole=True, checked=True), size)
        for row in rows[:1]:
            *_, epoch, newest, unchanged = row
            if epoch != tx.scope.epoch or not unchanged:
                return None
            tx.newest = newest
        return self._distinct_rows(rows)

    def _read(self, tx: Transaction, query: _Query, size: int) -> Sequence[Sequence[Any]]:
        if self._skipped_uids:
            query = query._replace(skipping=True)
        return tx.tuples(_statement(tx.dialect, query, self._where), **self._values(tx, size))

    def _values(self, tx: Transaction, size: int) -> dict[str, Any]:
        return {
            "lane": self.lane.id,
            "size": size,
            "step": self.lane.step or 0,
            "task_name": self.lane.task_name,
            "status": str(self.lane.status),
            "skip": tx.dialect.listed(self._skipped_uids) if self._skipped_uids else None,
            "buffer": tx.scope.buffer,
            "known_step": self.lane.step,
        }


class _Query(NamedTuple):
    """A statement's shape: the order, whether uids are skipped, and whether it reads whole groups, perhaps without the
    payload (`bare`), or only sort fields."""

    order: Order
    skipping: bool = False
    whole: bool = False
    checked: bool = False
    bare: bool = False


@lru_cache(maxsize=128)
def _statement(dialect: Dialect, query: _Query, where: Node | None) -> Form:
    """Return the statement for the groups that match, with the parameters of `Source`."""
    return of_core(_select(dialect, query, where), dialect)


def _select(dialect: Dialect, query: _Query, where: Node | None) -> Select[Any]:
    order, fields = query.order, _FIELDS
    values = (_order_value(term).label(f"order_{i}") for i, term in enumerate(order))
    statement = _select_stored(not query.bare) if query.whole else select(group.c.uid, group.c.priority, *values)
    if query.checked:
        statement = statement.add_columns(*_CHECKS)
    if where is not None:
        statement = statement.where(compile_sql(where, fields, dialect.name))
    for term in order:
        if term.field in KEYS:  # true for every group of the lane; it selects the index with this order
            statement = statement.where(fields[term.field].is_not(None))
    if query.skipping:
        statement = statement.where(~dialect.one_of(group.c.uid, "skip"))
    keys = [_sort_key(term) for term in order]
    if not dialect.is_remote:
        return statement.where(group.c.lane == _LANE).order_by(*keys).limit(_SIZE)
    # With `lane = n` PostgreSQL's planner treats the lane as a constant and may walk the primary key from its
    # beginning, past the groups of other lanes. With a range of one lane only indexes that begin with the lane qualify.
    newest_first = order[0].descending and order[0].field in ("uid", "timestamp_id")
    lanes = group.c.lane.desc() if newest_first else group.c.lane  # else the order would be no scan of an index
    statement = statement.where(group.c.lane.between(_LANE, _LANE)).order_by(lanes, *keys).limit(_SIZE)
    return statement.with_for_update(skip_locked=True)


# Checks before the rows are used: the epoch, the newest checkpoint, and whether the lane is as cached.
_LANE, _SIZE = bindparam("lane", type_=group.c.lane.type), bindparam("size", type_=BigInteger())
_TASK, _STATUS = bindparam("task_name", type_=String()), bindparam("status", type_=String())
_BUFFER = bindparam("buffer", type_=buffer.c.name.type)
# After a failover the server may lack the lane, and have given its id to another.
_known_lane = and_(
    lane.c.id == _LANE,
    lane.c.buffer == _BUFFER,
    lane.c.task_name == _TASK,
    lane.c.status == _STATUS,
    lane.c.step.is_not_distinct_from(bindparam("known_step", type_=lane.c.step.type)),
    lane.c.race.is_(None),  # by whose clock groups that stay get their keys
)
_CHECKS = (
    select(func.coalesce(func.max(buffer.c.epoch), 0)).where(buffer.c.name == _BUFFER).scalar_subquery(),
    select(func.coalesce(func.max(checkpoint.c.id), 0)).where(checkpoint.c.buffer == _BUFFER).scalar_subquery(),
    select(lane.c.id).where(_known_lane).exists(),
)


# A scalar subquery reads payloads of returned rows only; a join might read more, by the planner's row estimate.
_PAYLOAD = select(payload.c.data).where(payload.c.uid == group.c.uid).scalar_subquery()


def _select_stored(payloads: bool) -> Select[Any]:
    return select(*STORED, _PAYLOAD if payloads else null())


@lru_cache
def _select_by_uid(dialect: Dialect, payloads: bool) -> Form:
    """Return the SELECT of all columns of those groups by uid that are in a lane, FOR UPDATE SKIP LOCKED."""
    statement = _select_stored(payloads).where(dialect.one_of(group.c.uid, "uids"), group.c.lane == _LANE)
    # (SQLAlchemy leaves FOR UPDATE out for SQLite.)
    return of_core(statement.with_for_update(of=group, skip_locked=True), dialect)


@lru_cache(maxsize=128)
def _select_matching(dialect: Dialect, where: Node | None, *, counted: bool = False) -> Form:
    """Return the statement for the members of a lane that match, or for their number up to a uid."""
    columns = (group.c.uid, func.coalesce(group.c.ticket, group.c.uid), group.c.priority)
    statement = select(*((func.count(),) if counted else columns)).select_from(group).where(group.c.lane == _LANE)
    if where is not None:
        statement = statement.where(compile_sql(where, _FIELDS, dialect.name))
    if counted:
        statement = statement.where(group.c.uid <= bindparam("last", type_=group.c.uid.type))
    return of_core(statement, dialect)


#: The columns of the query language's fields; those of the lane are parameters.
_FIELDS: dict[str, ColumnElement[Any]] = {
    **FIELDS,
    "task_name": _TASK,
    "status": _STATUS,
    "staleness": func.coalesce(
        group.c.pinned_staleness, bindparam("step", type_=group.c.oldest_step.type) - group.c.oldest_step - 1
    ),
    **dict.fromkeys(KEYS, group.c.random_key),
}


def _order_value(term: OrderTerm) -> ColumnElement[Any]:
    """Return the value that groups of several lanes are ordered by."""
    return -step_order if term.field == "staleness" else _FIELDS[term.field]


def _sort_key(term: OrderTerm) -> ColumnElement[Any]:
    column, descending = _FIELDS[term.field], term.descending
    if term.field == "staleness":  # the most stale groups have the oldest step
        column, descending = step_order, not descending
    key = column.desc() if descending else column.asc()
    return key.nulls_last() if NULLABLE.get(term.field) else key
