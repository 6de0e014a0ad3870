"""Lanes: a task's groups of one status in one buffer, with the train step that they were last refreshed to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, false, select, true, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.race import KEYS, PRIORITIZED, UNIFORM, Clock
from replaybuf.rules.tallies import LaneName
from replaybuf.storage.sql.schema.tables import lane

#: The column with the clock of each race.
CLOCKS = {UNIFORM: lane.c.uniform_clock, PRIORITIZED: lane.c.prioritized_clock}


@dataclass(frozen=True, slots=True)
class Scope:
    """One buffer in a database, and its rules. Without a name: all buffers, for those who only look.

    `epoch` counts the restores of the buffer up to when it was opened; uids are `ticket_shift` ahead of tickets;
    `checkpoint` is the number of the checkpoint that was made last.
    """

    buffer: str | None = "default"
    rules: Rules = field(default_factory=Rules)
    epoch: int = 0
    ticket_shift: int = 0
    checkpoint: int = 0

    @property
    def lanes(self) -> ColumnElement[bool]:
        """The lanes of what is in the buffer: not of what is leased, except for those who only look."""
        return true() if self.buffer is None else and_(lane.c.buffer == self.buffer, lane.c.leased == false())


@dataclass(slots=True)
class Lane:
    """A lane, with the clocks of the races that are run in it."""

    id: int
    task_name: str
    status: Status
    step: int | None
    clocks: dict[str, Clock]

    @property
    def name(self) -> LaneName:
        return self.task_name, self.status

    @classmethod
    def of(cls, row: Any) -> Lane:
        clocks = {}
        if row.uniform_clock is not None:
            clocks[UNIFORM] = Clock(row.uniform_clock)
        if row.prioritized_clock is not None:
            clocks[PRIORITIZED] = Clock(row.prioritized_clock, row.idle_clock or 0.0)
        return cls(row.id, row.task_name, Status(row.status), row.step, clocks)


def all_lanes(connection: Connection, scope: Scope) -> list[Any]:
    """The rows of all lanes of the buffer, those of leased groups too."""
    return list(connection.execute(select(lane).where(lane.c.buffer == scope.buffer)))


def find_lanes(
    connection: Connection, scope: Scope, names: Iterable[LaneName], *, leased: bool = False
) -> dict[LaneName, Lane]:
    """The lanes of these (task, status) pairs that exist."""
    wanted = sorted({(task_name, str(status)) for task_name, status in names})
    query = _of_buffer(scope, leased).where(tuple_(lane.c.task_name, lane.c.status).in_(wanted))
    return {found.name: found for found in map(Lane.of, connection.execute(query))}


def _of_buffer(scope: Scope, leased: bool) -> Select[Any]:
    return select(lane).where(lane.c.buffer == scope.buffer, lane.c.leased == leased)


def need_lanes(
    connection: Connection, scope: Scope, names: Iterable[LaneName], *, leased: bool = False
) -> dict[LaneName, Lane]:
    """The lanes of these (task, status) pairs, made where they don't exist."""
    names = set(names)
    found = find_lanes(connection, scope, names, leased=leased)
    missing = sorted(names - found.keys())
    if not missing:
        return found
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    values: list[dict[str, Any]] = [
        {
            "buffer": scope.buffer,
            "task_name": task_name,
            "status": str(status),
            "leased": leased,
            **new_clocks(scope, status, leased=leased),
        }
        for task_name, status in missing
    ]
    connection.execute(dialect.insert(lane).on_conflict_do_nothing(), values)
    return find_lanes(connection, scope, names, leased=leased)


def new_clocks(scope: Scope, status: Status, *, leased: bool) -> dict[str, float | None]:
    """The clocks of a lane that is still empty: the races that this buffer's policies draw from begin there."""
    races = () if leased or status == Status.ARCHIVED else scope.rules.races
    return {CLOCKS[key].name: 0.0 if key in races else None for key in KEYS}


def need_lane(connection: Connection, scope: Scope, name: LaneName, *, leased: bool = False) -> Lane:
    """One lane, made if it doesn't exist."""
    return need_lanes(connection, scope, [name], leased=leased)[name]


def start_steps(connection: Connection, steps: Mapping[int, int]) -> None:
    """Give lanes that were never refreshed their first train step.

    In a lane without a step no group's staleness is derived from it, so setting it changes none.
    """
    for lane_id, train_step in steps.items():
        connection.execute(update(lane).where(lane.c.id == lane_id, lane.c.step.is_(None)).values(step=train_step))
