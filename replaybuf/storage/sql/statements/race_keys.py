"""The races of random policies in SQL: the keys of groups, and the clocks of lanes (`replaybuf.rules.race`).

A lane whose clock is NULL runs no race, and keys there mean nothing. Once it has a clock, every group in it has a key:
each put into the lane reads the lane's row first, and gives the group a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, case, func, or_, select, update

from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.race import IDLE, KEYS, PRIORITIZED, Clock, draw_keys, weight_of
from replaybuf.rules.tallies import LaneName
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.lanes import CLOCKS, Lane, find_lanes

#: A group in a race: its uid, its ticket, its priority.
Member = tuple[int, int, float]

_CHUNK = 10_000


class RaceNotRunError(Exception):
    """A draw from a race to be begun first, while no other transaction writes; then the draw is repeated."""

    def __init__(self, names: Iterable[LaneName], order: Order) -> None:
        super().__init__()
        self.names, self.order = list(names), order


def check_races(lanes: Iterable[Lane], order: Order) -> None:
    """Raise RaceNotRunError when the order needs a race that isn't run in all of the lanes."""
    wanted = {term.field for term in order} & set(KEYS)
    if wanted and (missing := [one.name for one in lanes if wanted - one.clocks.keys()]):
        raise RaceNotRunError(missing, order)


def begin_races(tx: Transaction, names: Iterable[LaneName], order: Order) -> None:
    """Begin the races of an order, with a key for every group. Nobody else may write meanwhile."""
    wanted = [key for key in KEYS if key in {term.field for term in order}]
    for one in find_lanes(tx, names).values():
        for key in wanted:
            if key not in one.clocks:
                one.clocks[key] = Clock()
                tx.execute(update(lane).where(lane.c.id == one.id).values(_clock_values(key, Clock())))
                _set_keys(tx, one, key, tx.fetch(_OF_LANE, one.id))


def enter_races(tx: Transaction, home: Lane, uids: Sequence[int]) -> None:
    """Give groups that came into a lane, or whose priority changed, keys in the lane's races."""
    if home.clocks and uids:
        members = tx.fetch(_OF_UIDS, tx.dialect.listed(uids))
        for key in home.clocks:
            _set_keys(tx, home, key, members)


_MEMBERS = select(group.c.uid, func.coalesce(group.c.ticket, group.c.uid), group.c.priority)
_OF_LANE = Prepared(lambda _: _MEMBERS.where(group.c.lane == bindparam("lane")), "lane")
_OF_UIDS = Prepared(lambda dialect: _MEMBERS.where(dialect.one_of(group.c.uid, "uids")), "uids")


def new_keys(rules: Rules, home: Lane, members: Sequence[Member]) -> dict[int, dict[str, float]]:
    """Return the keys of groups that come into the lane, by uid."""
    keys: dict[int, dict[str, float]] = {uid: {} for uid, _, _ in members}
    for name, clock in home.clocks.items():
        entries = [(ticket, weight_of(name, priority)) for _, ticket, priority in members]
        for (uid, _, _), key in zip(members, draw_keys(rules.seed_of(name), clock, entries), strict=True):
            keys[uid][name] = key
    return keys


def advance(tx: Transaction, home: Lane, race: str, keys: Sequence[float], priorities: Sequence[float]) -> None:
    """Advance the clock of the lane's race, in which groups with these keys came first. A worn-out race ends."""
    if not keys:
        return
    clock = home.clocks[race]
    clock.advance(keys)
    if clock.is_worn(weight_of(race, priority) for priority in priorities):
        del home.clocks[race]
        tx.fetch(_END[race], home.id)
    else:
        _go_on(tx, home, race)


def skip_arrived(tx: Transaction, home: Lane, race: str) -> None:
    """Give new keys to groups that have arrived in the lane's race by now and weren't drawn."""
    clock, key = home.clocks[race], group.c[race]
    arrived = or_(key <= clock.time, and_(key >= IDLE, key <= IDLE * (1.0 + clock.idle_time)))
    chosen = select(group.c.uid).where(group.c.lane == home.id, key.is_not(None), arrived)
    uids = tx.execute(tx.dialect.for_update(chosen, skip_locked=True)).scalars()
    enter_races(tx, home, list(uids))


def pass_time(
    tx: Transaction, lanes: Sequence[Lane], race: str, waits: Sequence[float], priorities: Sequence[float]
) -> None:
    """Let the time pass in all these lanes' races, in which groups came first after these waits."""
    elapsed = max((wait for wait in waits if wait < IDLE), default=0.0)
    idle = max((wait / IDLE - 1.0 for wait in waits if wait >= IDLE), default=0.0)
    for home in sorted(lanes, key=lambda home: home.id):
        clock = home.clocks[race]
        clock.time += elapsed
        clock.idle_time += idle
        worn = clock.is_worn(weight_of(race, priority) for priority in priorities)
        if worn:
            tx.fetch(_END[race], home.id)
        else:
            _go_on(tx, home, race)


def _clock_values(race: str, clock: Clock) -> dict[Any, float]:
    values = {CLOCKS[race]: clock.time}
    if race == PRIORITIZED:
        values[lane.c.idle_clock] = clock.idle_time
    return values


def _go_on(tx: Transaction, home: Lane, race: str) -> None:
    """Write the lane's clock, unless another draw is further, or has ended the race, which leaves NULL."""
    clock = home.clocks[race]
    times = (clock.time, clock.idle_time) if race == PRIORITIZED else (clock.time,)
    tx.fetch(_LATER[race], *times, home.id)


def _later(race: str) -> Prepared:
    time, idle_time = (bindparam(name, type_=lane.c.idle_clock.type) for name in ("time", "idle_time"))
    values: dict[Any, Any] = {CLOCKS[race]: case((CLOCKS[race] < time, time), else_=CLOCKS[race])}
    if race == PRIORITIZED:
        idle = func.coalesce(lane.c.idle_clock, 0.0)
        values[lane.c.idle_clock] = case((idle < idle_time, idle_time), else_=idle)
    names = ("time", "idle_time") if race == PRIORITIZED else ("time",)
    return Prepared(lambda _: update(lane).where(lane.c.id == bindparam("of_lane")).values(values), *names, "of_lane")


def _end(race: str) -> Prepared:
    ended = update(lane).where(lane.c.id == bindparam("of_lane")).values({CLOCKS[race]: None})
    return Prepared(lambda _: ended, "of_lane")


_LATER = {race: _later(race) for race in KEYS}
_END = {race: _end(race) for race in KEYS}


def _set_keys(tx: Transaction, home: Lane, race: str, members: Sequence[Sequence[Any]]) -> None:
    seed, clock = tx.scope.rules.seed_of(race), home.clocks[race]
    for start in range(0, len(members), _CHUNK):
        chunk = members[start : start + _CHUNK]
        uids = [uid for uid, _, _ in chunk]
        keys = draw_keys(seed, clock, [(ticket, weight_of(race, priority)) for _, ticket, priority in chunk])
        tx.dialect.set_keys(tx, race, uids, keys)
