"""Lanes: a task's groups of one status in one buffer, with the train step of their last refresh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import KEYS, PRIORITIZED, UNIFORM, Clock
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.sql.engine.transaction import Transaction

#: The column with the virtual time of each race.
CLOCKS = {UNIFORM: "uniform_clock", PRIORITIZED: "prioritized_clock"}


#: The virtual time of a race being prepared: new groups have sampling keys, older ones may still lack them.
PREPARING = -1.0


@dataclass(slots=True)
class Lane:
    """A lane, with the virtual times of its races. Races in `preparing` can't be drawn from yet."""

    id: int
    task_name: str
    status: Status
    step: int | None
    clocks: dict[str, Clock]
    preparing: Sequence[str] = ()

    @property
    def name(self) -> LaneName:
        return self.task_name, self.status

    @classmethod
    def of(cls, row: Any) -> Lane:
        return cls.with_clocks(
            row.id, row.task_name, row.status, row.step, row.uniform_clock, row.prioritized_clock, row.idle_clock
        )

    @classmethod
    def with_clocks(
        cls,
        lane_id: int,
        task_name: str,
        status: str,
        step: int | None,
        uniform: float | None,
        prioritized: float | None,
        idle: float | None,
    ) -> Lane:
        clocks = {}
        if uniform is not None:
            clocks[UNIFORM] = Clock(uniform)
        if prioritized is not None:
            clocks[PRIORITIZED] = Clock(prioritized, idle or 0.0)
        preparing = [race for race, clock in clocks.items() if clock.time == PREPARING]
        clocks |= dict.fromkeys(preparing, Clock())
        return cls(lane_id, task_name, Status(status), step, clocks, preparing)


#: A store's cache of lanes, which may be out of date.
KnownLanes = dict[LaneName, Lane]


def all_lanes(tx: Transaction) -> list[LaneRow]:
    """Return the rows of all lanes of the buffer, including those of leased groups."""
    rows = map(LaneRow._make, tx.tuples(_ALL, buffer=tx.scope.buffer))
    return [row._replace(leased=bool(row.leased)) for row in rows]


class LaneRow(NamedTuple):
    """A row of `rb_lane`."""

    id: int
    buffer: str
    task_name: str
    status: str
    leased: bool
    step: int | None
    uniform_clock: float | None
    prioritized_clock: float | None
    idle_clock: float | None


_ALL = f"SELECT {', '.join(LaneRow._fields)} FROM rb_lane WHERE buffer = :buffer ORDER BY id"  # noqa: S608


def find_lanes(tx: Transaction, names: Iterable[LaneName], *, leased: bool = False) -> dict[LaneName, Lane]:
    """Return the lanes of these (task, status) pairs that exist."""
    wanted = set(names)
    tasks = sorted({task_name for task_name, _ in wanted})
    found = (Lane.with_clocks(*row) for row in tx.tuples(_OF_TASKS, buffer=tx.scope.buffer, leased=leased, tasks=tasks))
    return {one.name: one for one in found if one.name in wanted}


#: The arguments of `Lane.with_clocks`, in order.
COLUMNS = "id, task_name, status, step, uniform_clock, prioritized_clock, idle_clock"
_OF_TASKS = f"""SELECT {COLUMNS} FROM rb_lane
WHERE buffer = :buffer AND leased = :leased AND task_name {{in:tasks}}"""  # noqa: S608


def lanes_by_id(tx: Transaction, ids: Iterable[int]) -> dict[int, Lane]:
    """Return those of these lanes that are the buffer's, without lanes of leased groups."""
    rows = tx.tuples(
        f"SELECT {COLUMNS} FROM rb_lane WHERE buffer = :buffer AND id {{in:ids}}",  # noqa: S608
        buffer=tx.scope.buffer,
        ids=sorted(ids),
    )
    return {row[0]: Lane.with_clocks(*row) for row in rows}


def need_lanes(tx: Transaction, names: Iterable[LaneName], *, leased: bool = False) -> dict[LaneName, Lane]:
    """Return the lanes of these (task, status) pairs, creating missing ones."""
    names = set(names)
    if not names:
        return {}
    found = find_lanes(tx, names, leased=leased)
    missing = sorted(names - found.keys())
    if not missing:
        return found
    for task, status in missing:
        clocks = new_clocks(tx.scope.rules, status, leased=leased)
        tx.change(_CREATE, buffer=tx.scope.buffer, task=task, status=str(status), leased=leased, **clocks)
    return find_lanes(tx, names, leased=leased)


_CREATE = """INSERT INTO rb_lane (buffer, task_name, status, leased, uniform_clock, prioritized_clock)
VALUES (:buffer, :task, :status, :leased, :uniform_clock, :prioritized_clock) ON CONFLICT DO NOTHING"""


def new_clocks(rules: Rules, status: Status, *, leased: bool) -> dict[str, float | None]:
    """Return the virtual times of an empty lane: 0 for the races of this buffer's policies, None for others."""
    races = () if leased or status == Status.ARCHIVED else rules.races
    return {CLOCKS[key]: 0.0 if key in races else None for key in KEYS}


def need_lane(tx: Transaction, name: LaneName, *, leased: bool = False) -> Lane:
    """Return one lane, created if it doesn't exist."""
    return need_lanes(tx, [name], leased=leased)[name]


def start_steps(tx: Transaction, steps: Mapping[int, int]) -> None:
    """Set the first train step of lanes that were never refreshed.

    No staleness changes: groups in a lane without a step have their own.
    """
    tx.each("UPDATE rb_lane SET step = :step WHERE id = :id AND step IS NULL", [(n, one) for one, n in steps.items()])
