"""The order of draws in SQL: the races of random policies (`replaybuf.rules.policies`), and the first groups of a lane.

Once a lane runs a race, every group in it has a key: each put into the lane reads the lane's row first, and draws the
group's key. The first random draw gives keys to groups of lanes that run none yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from replaybuf.errors import ConfigError, StorageError
from replaybuf.rules.policies import IDLE, KEYS, SLOWEST, UNIT, Order, OrderTerm
from replaybuf.rules.query import Node
from replaybuf.rules.query.sql_conditions import condition_text
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import STEP_ORDER
from replaybuf.storage.sql.statements.lanes import Lane, lanes_where, race_of, set_race
from replaybuf.storage.sql.statements.past import keep
from replaybuf.storage.sql.statements.rows import FIELDS, STORED, GroupRow, sort_key

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

    def read(self, tx: Transaction, size: int, order: Order) -> list[GroupRow]:
        """Return the first `size` groups as rows, with their payloads."""
        return self._distinct_rows(self._read(tx, _Query(order, whole=True), size))

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
        groups = self._size(tx)
        if self._where is None or groups <= _SAMPLE:
            return False
        query = "SELECT uid FROM rb_group WHERE lane = :lane ORDER BY uid LIMIT 1 OFFSET :before"
        [[last_uid]] = tx.tuples(query, lane=self.lane.id, before=_SAMPLE - 1) or [[0]]
        statement, values = _select_matching(tx.dialect, self._where, "count(*)")
        matching = tx.value(f"{statement} AND g.uid <= :last", **self._values(tx, size), **values, last=last_uid)
        passed_over = size * (_SAMPLE - matching) / max(matching, 0.5)
        return bool(passed_over * _KEY_COST > groups)

    def _size(self, tx: Transaction) -> int:
        return int(tx.value(_SIZE, lane=self.lane.id) or 0)

    def count(self, tx: Transaction) -> int:
        """Return the number of groups."""
        return self._size(tx) if self._where is None else int(self._read_figures(tx, "count(*)")[0])

    def weigh(self, tx: Transaction) -> tuple[int, float, int]:
        """Return the number of groups, the sum of their priorities, in units, and how many have none.

        The lane runs a race: every group has a key, whose index includes the priority.
        """
        members, total, idle = self._read_figures(tx, _FIGURES, " AND random_key IS NOT NULL")
        return members, total, idle

    def _read_figures(self, tx: Transaction, columns: str, condition: str = "") -> Sequence[Any]:
        statement, values = _select_matching(tx.dialect, self._where, columns)
        [figures] = tx.tuples(statement + condition, **self._values(tx, 0), **values, least=SLOWEST, unit=UNIT)
        return figures

    def read_afresh(self, tx: Transaction, size: int) -> list[GroupRow]:
        """Return `size` groups drawn at random from all that match, whatever their keys, which they and others keep."""
        home, race = self.lane, self.lane.race
        assert race is not None
        statement, values = _select_matching(tx.dialect, self._where, "g.uid, coalesce(g.ticket, g.uid), g.priority")
        matching, skip = tx.tuples(statement, **self._values(tx, size), **values), set(self._skipped_uids)
        members = [row for row in matching if row[0] not in skip]
        race.tick()
        keys = race.draw_keys((ticket, priority) for _, ticket, priority in members)
        race.tick()  # the drawn ones may come back, with other keys
        go_on(tx, home, ())
        remaining = [uid for _, uid in sorted((key, row[0]) for key, row in zip(keys, members, strict=True))]
        rows: list[GroupRow] = []
        while remaining and len(rows) < size:  # others may have locked some
            chunk, remaining = remaining[: size - len(rows)], remaining[size - len(rows) :]
            locked = {row[0]: row for row in tx.tuples(_BY_UID, lane=home.id, uids=chunk)}
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
        statement, values = _statement(tx.dialect, query, self._where)
        return tx.tuples(statement, **self._values(tx, size), **values)

    def _values(self, tx: Transaction, size: int) -> dict[str, Any]:
        return {
            "lane": self.lane.id,
            "size": size,
            "step": self.lane.step or 0,
            "task_name": self.lane.task_name,
            "status": str(self.lane.status),
            "skip": self._skipped_uids,
            "buffer": tx.scope.buffer,
            "known_step": self.lane.step,
        }


_SIZE = "SELECT sum(amount) FROM rb_tally WHERE lane = :lane AND name = 'size'"
_FIGURES = """count(*), sum(
    CASE WHEN priority = 0 THEN 0.0 WHEN priority < :least THEN :least ELSE priority END / :unit
), count(CASE WHEN priority = 0 THEN 1 END)"""


class _Query(NamedTuple):
    """A statement's shape: the order, whether uids are skipped, and whether it reads groups or only sort fields."""

    order: Order
    skipping: bool = False
    whole: bool = False
    checked: bool = False


#: A statement, and the values of a user's query in it.
_Bound = tuple[str, dict[str, Any]]


@lru_cache(maxsize=128)
def _statement(dialect: Dialect, query: _Query, where: Node | None) -> _Bound:
    """Return the statement for the groups that match, with the parameters of `Source`."""
    order = query.order
    condition, values = _condition(dialect, where)
    # The condition on keys is true for every group of the lane; it selects the index with this order.
    condition += "".join(f" AND {_FIELDS[term.field]} IS NOT NULL" for term in order if term.field in KEYS)
    condition += " AND NOT g.uid {in:skip}" if query.skipping else ""
    columns = ["g.uid", "g.priority", *map(_order_value, order)]
    if query.whole:
        columns = [STORED, _PAYLOAD]
    columns += _CHECKS if query.checked else ()
    keys = [*map(_sort_key, order)]
    lanes = "g.lane = :lane"
    if dialect.is_remote:
        # With `lane = n` PostgreSQL's planner treats the lane as a constant and may walk the primary key from its
        # beginning, past the groups of other lanes. With a range of one lane only indexes that begin with the lane
        # qualify. Without the direction of the first key the order would be no scan of an index.
        lanes = "g.lane BETWEEN :lane AND :lane"
        newest_first = order[0].descending and order[0].field in ("uid", "timestamp_id")
        keys = ["g.lane DESC" if newest_first else "g.lane", *keys]
    statement = f"""SELECT {", ".join(columns)} FROM rb_group g WHERE {lanes}{condition}
ORDER BY {", ".join(keys)} LIMIT :size {{skip}}"""  # noqa: S608
    return statement, values


# Checks before the rows are used: the epoch, the newest checkpoint, and whether the lane is as cached. After a failover
# the server may lack the lane, and have given its id to another; by the clock of a race, groups that stay get their
# keys.
_CHECKS = (
    "(SELECT coalesce(max(epoch), 0) FROM rb_buffer WHERE name = :buffer)",
    "(SELECT coalesce(max(id), 0) FROM rb_checkpoint WHERE buffer = :buffer)",
    """EXISTS (SELECT 1 FROM rb_lane WHERE id = :lane AND buffer = :buffer AND task_name = :task_name
    AND status = :status AND step IS NOT DISTINCT FROM :known_step AND race IS NULL)""",
)
# A scalar subquery reads payloads of returned rows only; a join might read more, by the planner's row estimate.
_PAYLOAD = "(SELECT data FROM rb_payload WHERE rb_payload.uid = g.uid)"
#: The columns of those groups by uid that are in a lane, with the payload.
_BY_UID = f"SELECT {STORED}, {_PAYLOAD} FROM rb_group g WHERE g.uid {{in:uids}} AND g.lane = :lane {{skip}}"  # noqa: S608


@lru_cache(maxsize=128)
def _select_matching(dialect: Dialect, where: Node | None, columns: str) -> _Bound:
    """Return the statement for these columns of the members of a lane that match."""
    condition, values = _condition(dialect, where)
    return f"SELECT {columns} FROM rb_group g WHERE g.lane = :lane{condition}", values  # noqa: S608


def _condition(dialect: Dialect, where: Node | None) -> _Bound:
    """Return the condition that follows another one, and its values."""
    if where is None:
        return "", {}
    condition, values = condition_text(where, _FIELDS, dialect.compiler)
    return f" AND {condition}", values


#: The columns of the query language's fields; those of the lane are parameters.
_FIELDS = FIELDS | {
    "task_name": "CAST(:task_name AS text)",
    "status": "CAST(:status AS text)",
    "staleness": "coalesce(g.pinned_staleness, CAST(:step AS bigint) - g.oldest_step - 1)",
    **dict.fromkeys(KEYS, "g.random_key"),
}


def _order_value(term: OrderTerm) -> str:
    """Return the value that groups of several lanes are ordered by."""
    return f"-{STEP_ORDER}" if term.field == "staleness" else _FIELDS[term.field]


def _sort_key(term: OrderTerm) -> str:
    if term.field == "staleness":  # the most stale groups have the oldest step
        return sort_key(term.field, STEP_ORDER, descending=not term.descending)
    return sort_key(term.field, _FIELDS[term.field], descending=term.descending)
