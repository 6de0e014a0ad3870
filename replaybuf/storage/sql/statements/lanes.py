"""Lanes: a task's groups of one status in one buffer, with the train step of their last refresh and their race.

All lanes of a buffer run the same race (`rules.policies`), that of the first process with a random policy; lanes of
leased groups run none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replaybuf.rules.policies import Race
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.values.rollouts.rollout import Status


@dataclass(slots=True)
class Lane:
    """A lane. While it runs no race, sampling keys of its groups are ignored; otherwise each group has one."""

    id: int
    task_name: str
    status: Status
    step: int | None
    race: Race | None

    @property
    def name(self) -> LaneName:
        return self.task_name, self.status

    @classmethod
    def read(
        cls, lane_id: int, task: str, status: str, step: int | None, key: str | None, seed: str, *clocks: float
    ) -> Lane:
        """Return the lane with these values of COLUMNS."""
        return cls(lane_id, task, Status(status), step, None if key is None else Race(key, int(seed), *clocks))


#: The arguments of `Lane.read`, in order.
COLUMNS = "id, task_name, status, step, race, seed, clock, idle_clock"

#: A store's cache of lanes, which may be out of date.
KnownLanes = dict[LaneName, Lane]


def all_lanes(tx: Transaction) -> list[dict[str, Any]]:
    """Return the rows of all lanes of the buffer, including those of leased groups."""
    rows = tx.rows("SELECT * FROM rb_lane WHERE buffer = :buffer ORDER BY id", buffer=tx.scope.buffer)
    return [row | {"leased": bool(row["leased"])} for row in rows]


def lanes_where(tx: Transaction, condition: str, **values: Any) -> list[Lane]:
    """Return the buffer's lanes that meet a condition, by id."""
    rows = tx.tuples(f"{_BUFFER_LANES} AND {condition} ORDER BY id", buffer=tx.scope.buffer, **values)
    return [Lane.read(*row) for row in rows]


_BUFFER_LANES = f"SELECT {COLUMNS} FROM rb_lane WHERE buffer = :buffer"  # noqa: S608


def find_lanes(tx: Transaction, names: Iterable[LaneName], *, leased: bool = False) -> dict[LaneName, Lane]:
    """Return the lanes of these (task, status) pairs that exist."""
    requested = set(names)
    tasks = sorted({task_name for task_name, _ in requested})
    lanes = (Lane.read(*row) for row in tx.tuples(_TASK_LANES, buffer=tx.scope.buffer, leased=leased, tasks=tasks))
    return {home.name: home for home in lanes if home.name in requested}


_TASK_LANES = f"{_BUFFER_LANES} AND leased = :leased AND task_name {{in_texts:tasks}}"


def raceless(known: KnownLanes, names: Iterable[LaneName]) -> KnownLanes:
    """Return the cached lanes of these names that run no race: groups of the others need sampling keys."""
    return {name: known[name] for name in names if name in known and known[name].race is None}


def cache_lanes(tx: Transaction, known: KnownLanes, names: Iterable[LaneName]) -> None:
    """Read lanes into the cache, but those that are known to run a race."""
    if changed := [name for name in names if name not in known or known[name].race is None]:
        known |= find_lanes(tx, changed)


def need_lanes(
    tx: Transaction, names: Iterable[LaneName], known: Mapping[LaneName, Lane] | None = None, *, leased: bool = False
) -> dict[LaneName, Lane]:
    """Return the lanes of these (task, status) pairs, creating missing ones; `known` has those that exist, if given."""
    names = set(names)
    if not names:
        return {}
    if known is None:
        known = find_lanes(tx, names, leased=leased)
    existing = {name: known[name] for name in names if name in known}
    missing = sorted(names - existing.keys())
    if not missing:
        return existing
    race = race_of(tx)
    for task, status in missing:
        values = race_columns(None if leased else race)
        tx.change(_CREATE, buffer=tx.scope.buffer, task=task, status=str(status), leased=leased, **values)
    return find_lanes(tx, names, leased=leased)


_CREATE = """INSERT INTO rb_lane (buffer, task_name, status, leased, race, seed, clock, idle_clock)
VALUES (:buffer, :task, :status, :leased, :race, :seed, :clock, :idle_clock) ON CONFLICT DO NOTHING"""


def start_steps(tx: Transaction, steps: Mapping[int, int]) -> None:
    """Set the first train step of lanes that were never refreshed.

    No staleness changes: groups in a lane without a step have their own.
    """
    tx.each("UPDATE rb_lane SET step = :step WHERE id = :id AND step IS NULL", [(n, lane) for lane, n in steps.items()])


# Races


def race_of(tx: Transaction) -> Race | None:
    """Return the race of a new lane: the buffer's, else that of this process's policies."""
    for key, seed in tx.tuples(_READ_RACE, buffer=tx.scope.buffer):
        return Race(key, int(seed))
    if tx.scope.rules.random is None:
        return None
    key, seed = tx.scope.rules.random
    return Race(key, secrets.randbits(63) if seed is None else seed)


_READ_RACE = "SELECT race, seed FROM rb_lane WHERE buffer = :buffer AND race IS NOT NULL LIMIT 1"


def race_columns(race: Race | None) -> dict[str, Any]:
    """Return the columns of a lane that runs this race."""
    if race is None:
        return dict.fromkeys(("race", "seed", "clock", "idle_clock"))
    return {"race": race.key, "seed": str(race.seed), "clock": race.time, "idle_clock": race.idle_time}


def set_race(tx: Transaction, home: Lane, race: Race | None) -> None:
    """Let a lane run a race, or none."""
    home.race = race
    tx.change(_SET_RACE, id=home.id, **race_columns(race))


_SET_RACE = "UPDATE rb_lane SET race = :race, seed = :seed, clock = :clock, idle_clock = :idle_clock WHERE id = :id"
