"""Lanes: a task's groups of one status, with the train step that they were last refreshed to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.rollout import Status
from replaybuf.storage.sql.tables import lane

LaneName = tuple[str, str]


@dataclass(slots=True)
class Lane:
    id: int
    step: int | None


def find_lanes(connection: Connection, names: Iterable[LaneName]) -> dict[LaneName, Lane]:
    """The lanes of these (task, status) pairs that exist."""
    wanted = sorted({(task_name, str(status)) for task_name, status in names})
    query = select(lane.c.id, lane.c.task_name, lane.c.status, lane.c.step).where(
        tuple_(lane.c.task_name, lane.c.status).in_(wanted)
    )
    return {(row.task_name, row.status): Lane(row.id, row.step) for row in connection.execute(query)}


def need_lanes(connection: Connection, names: Iterable[LaneName]) -> dict[LaneName, Lane]:
    """The lanes of these (task, status) pairs, made where they don't exist."""
    names = {(task_name, str(status)) for task_name, status in names}
    found = find_lanes(connection, names)
    missing = sorted(names - found.keys())
    if not missing:
        return found
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    values = [{"task_name": task_name, "status": status} for task_name, status in missing]
    connection.execute(dialect.insert(lane).on_conflict_do_nothing(), values)
    return find_lanes(connection, names)


def need_lane(connection: Connection, task_name: str, status: Status) -> Lane:
    """The lane of one task and status, made if it doesn't exist."""
    return need_lanes(connection, [(task_name, str(status))])[(task_name, str(status))]


def start_clock(connection: Connection, lane_id: int, train_step: int) -> None:
    """Give a lane that was never refreshed its first train step."""
    connection.execute(update(lane).where(lane.c.id == lane_id, lane.c.step.is_(None)).values(step=train_step))
    # In a lane without a step no group's staleness is derived from it, so setting it changes none.
