"""Lanes: a task's groups of one status in one buffer, with the train step of their last refresh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select, update

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import KEYS, PRIORITIZED, UNIFORM, Clock
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction
from replaybuf.storage.sql.schema.tables import lane

#: The column with the virtual time of each race.
CLOCKS = {UNIFORM: lane.c.uniform_clock, PRIORITIZED: lane.c.prioritized_clock}


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


def all_lanes(tx: Transaction) -> list[Any]:
    """Return the rows of all lanes of the buffer, including those of leased groups."""
    return list(tx.execute(select(lane).where(lane.c.buffer == tx.scope.buffer).order_by(lane.c.id)))


def find_lanes(tx: Transaction, names: Iterable[LaneName], *, leased: bool = False) -> dict[LaneName, Lane]:
    """Return the lanes of these (task, status) pairs that exist."""
    wanted = set(names)
    tasks = tx.dialect.listed(sorted({task_name for task_name, _ in wanted}))
    found = (Lane.with_clocks(*row) for row in tx.fetch(_OF_TASKS, tx.scope.buffer, leased, tasks))
    return {one.name: one for one in found if one.name in wanted}


#: The arguments of `Lane.with_clocks`, in order.
COLUMNS = ("id", "task_name", "status", "step", "uniform_clock", "prioritized_clock", "idle_clock")
_OF_TASKS = Prepared(
    lambda dialect: select(*(lane.c[name] for name in COLUMNS)).where(
        lane.c.buffer == bindparam("buffer"),
        lane.c.leased == bindparam("leased"),
        dialect.one_of(lane.c.task_name, "tasks"),
    ),
    "buffer",
    "leased",
    "tasks",
)


def need_lanes(tx: Transaction, names: Iterable[LaneName], *, leased: bool = False) -> dict[LaneName, Lane]:
    """Return the lanes of these (task, status) pairs, creating missing ones."""
    names = set(names)
    if not names:
        return {}
    found = find_lanes(tx, names, leased=leased)
    missing = sorted(names - found.keys())
    if not missing:
        return found
    values: list[dict[str, Any]] = [
        {
            "buffer": tx.scope.buffer,
            "task_name": task_name,
            "status": str(status),
            "leased": leased,
            **new_clocks(tx.scope.rules, status, leased=leased),
        }
        for task_name, status in missing
    ]
    tx.execute(tx.dialect.insert(lane).on_conflict_do_nothing(), values)
    return find_lanes(tx, names, leased=leased)


def new_clocks(rules: Rules, status: Status, *, leased: bool) -> dict[str, float | None]:
    """Return the virtual times of an empty lane: 0 for the races of this buffer's policies, None for others."""
    races = () if leased or status == Status.ARCHIVED else rules.races
    return {CLOCKS[key].name: 0.0 if key in races else None for key in KEYS}


def need_lane(tx: Transaction, name: LaneName, *, leased: bool = False) -> Lane:
    """Return one lane, created if it doesn't exist."""
    return need_lanes(tx, [name], leased=leased)[name]


def start_steps(tx: Transaction, steps: Mapping[int, int]) -> None:
    """Set the first train step of lanes that were never refreshed.

    No staleness changes: groups in a lane without a step have their own.
    """
    for lane_id, train_step in steps.items():
        tx.execute(update(lane).where(lane.c.id == lane_id, lane.c.step.is_(None)).values(step=train_step))
