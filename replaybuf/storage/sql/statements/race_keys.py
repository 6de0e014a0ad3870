"""The races of random policies in SQL: the keys of groups, and the clocks of lanes (`replaybuf.rules.race`).

A lane whose clock is NULL runs no race, and keys there mean nothing. Once it has one, every group in it has a key:
whoever puts a group into the lane reads the lane's row first, and gives it one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, and_, bindparam, case, func, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION

from replaybuf.rules.policies import Order
from replaybuf.rules.race import IDLE, KEYS, PRIORITIZED, Clock, draw_keys, weight_of
from replaybuf.rules.tallies import LaneName
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.lanes import CLOCKS, Lane, Scope, find_lanes

#: A group in a race: its uid, its ticket, its priority.
Member = tuple[int, int, float]

_CHUNK = 10_000


class RaceNotRunError(Exception):
    """A draw from a race that has not begun: to be begun while no other transaction writes, and then tried again."""

    def __init__(self, names: Iterable[LaneName], order: Order) -> None:
        super().__init__()
        self.names, self.order = list(names), order


def check_races(lanes: Iterable[Lane], order: Order) -> None:
    """Raise RaceNotRunError when the order asks for a race that is not run in all of the lanes."""
    wanted = {term.field for term in order} & set(KEYS)
    if wanted and (missing := [one.name for one in lanes if wanted - one.clocks.keys()]):
        raise RaceNotRunError(missing, order)


def begin_races(connection: Connection, scope: Scope, names: Iterable[LaneName], order: Order) -> None:
    """Begin the races of an order: a key for every group. Nobody else may write meanwhile."""
    wanted = [key for key in KEYS if key in {term.field for term in order}]
    for one in find_lanes(connection, scope, names).values():
        for key in wanted:
            if key not in one.clocks:
                one.clocks[key] = Clock()
                connection.execute(update(lane).where(lane.c.id == one.id).values(_clock_values(key, Clock())))
                _set_keys(connection, scope, one, key, _members(connection, group.c.lane == one.id))


def enter_races(connection: Connection, scope: Scope, home: Lane, uids: Sequence[int]) -> None:
    """Give groups that came into a lane, or whose priority has changed, keys in the races of the lane."""
    if home.clocks and uids:
        members = _members(connection, uid_in(connection, uids))
        for key in home.clocks:
            _set_keys(connection, scope, home, key, members)


def _members(connection: Connection, condition: ColumnElement[bool]) -> list[Member]:
    query = select(group.c.uid, func.coalesce(group.c.ticket, group.c.uid), group.c.priority).where(condition)
    return [(uid, ticket, priority) for uid, ticket, priority in connection.execute(query)]


def new_keys(scope: Scope, home: Lane, members: Sequence[Member]) -> dict[int, dict[str, float]]:
    """The keys by uid of groups that come into the lane."""
    keys: dict[int, dict[str, float]] = {uid: {} for uid, _, _ in members}
    for name, clock in home.clocks.items():
        entries = [(ticket, weight_of(name, priority)) for _, ticket, priority in members]
        for (uid, _, _), key in zip(members, draw_keys(scope.rules.seed_of(name), clock, entries), strict=True):
            keys[uid][name] = key
    return keys


def advance(connection: Connection, home: Lane, race: str, keys: Sequence[float], priorities: Sequence[float]) -> None:
    """Groups with these keys came first in the lane's race: its time moves on. A race that is worn out ends."""
    if not keys:
        return
    clock = home.clocks[race]
    clock.advance(keys)
    if clock.is_worn(weight_of(race, priority) for priority in priorities):
        del home.clocks[race]
        connection.execute(update(lane).where(lane.c.id == home.id).values({CLOCKS[race]: None}))
        return
    connection.execute(update(lane).where(lane.c.id == home.id).values(_later(race, clock)))


def skip_arrived(connection: Connection, scope: Scope, home: Lane, race: str) -> None:
    """Groups that have arrived in the lane's race by now, and weren't drawn, run again."""
    clock, key = home.clocks[race], group.c[race]
    arrived = or_(key <= clock.time, and_(key >= IDLE, key <= IDLE * (1.0 + clock.idle_time)))
    chosen = select(group.c.uid).where(group.c.lane == home.id, key.is_not(None), arrived)
    if connection.dialect.name == "postgresql":
        chosen = chosen.with_for_update(skip_locked=True)
    enter_races(connection, scope, home, list(connection.execute(chosen).scalars()))


def pass_time(
    connection: Connection, lanes: Sequence[Lane], race: str, waits: Sequence[float], priorities: Sequence[float]
) -> None:
    """Groups came first in the races of several lanes, after these times: it passed in all of them."""
    elapsed = max((wait for wait in waits if wait < IDLE), default=0.0)
    idle = max((wait / IDLE - 1.0 for wait in waits if wait >= IDLE), default=0.0)
    for home in sorted(lanes, key=lambda home: home.id):
        clock = home.clocks[race]
        clock.time += elapsed
        clock.idle_time += idle
        worn = clock.is_worn(weight_of(race, priority) for priority in priorities)
        values = {CLOCKS[race]: None} if worn else _later(race, clock)
        connection.execute(update(lane).where(lane.c.id == home.id).values(values))


def _clock_values(race: str, clock: Clock) -> dict[Any, float]:
    values = {CLOCKS[race]: clock.time}
    if race == PRIORITIZED:
        values[lane.c.idle_clock] = clock.idle_time
    return values


def _later(race: str, clock: Clock) -> dict[Any, Any]:
    """The clock as columns, unless another draw has come further, or has ended the race, which leaves it NULL."""
    later: dict[Any, Any] = {CLOCKS[race]: case((CLOCKS[race] < clock.time, clock.time), else_=CLOCKS[race])}
    if race == PRIORITIZED:
        idle = func.coalesce(lane.c.idle_clock, 0.0)
        later[lane.c.idle_clock] = case((idle < clock.idle_time, clock.idle_time), else_=idle)
    return later


def _set_keys(connection: Connection, scope: Scope, home: Lane, race: str, members: Sequence[Member]) -> None:
    seed, clock = scope.rules.seed_of(race), home.clocks[race]
    for start in range(0, len(members), _CHUNK):
        chunk = members[start : start + _CHUNK]
        uids = [uid for uid, _, _ in chunk]
        keys = draw_keys(seed, clock, [(ticket, weight_of(race, priority)) for _, ticket, priority in chunk])
        if connection.dialect.name == "postgresql":
            connection.execute(_SET_KEYS[race], {"uids": uids, "keys": keys})
        else:
            rows = [{"of_uid": uid, "new_key": key} for uid, key in zip(uids, keys, strict=True)]
            connection.execute(_SET_KEY[race], rows)


_SET_KEY: Mapping[str, Any] = {
    race: update(group).where(group.c.uid == bindparam("of_uid")).values({group.c[race]: bindparam("new_key")})
    for race in KEYS
}

# PostgreSQL takes all of them as two arrays, in one statement.
_drawn = select(
    func.unnest(bindparam("uids", type_=ARRAY(BigInteger))).label("uid"),
    func.unnest(bindparam("keys", type_=ARRAY(DOUBLE_PRECISION))).label("key"),
).subquery("drawn")
_SET_KEYS: Mapping[str, Any] = {
    race: update(group).where(group.c.uid == _drawn.c.uid).values({group.c[race]: _drawn.c.key}) for race in KEYS
}
