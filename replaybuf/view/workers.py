"""Workers compared: the groups of each in the last train steps, and those of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import Part, Table, all_along, by_worker
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.view.columns import BY_WORKER, Column, columns
from replaybuf.view.drawn import Drawn, StepRow, last_steps, tables_of


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The groups of one worker in a train step of `of` groups, compared with those of others."""

    step: int
    restores: int
    undone: bool
    last_at: datetime
    of: int
    groups: int
    reward: float | None
    others: float | None
    below: float | None
    staleness: float | None
    stands_out: bool


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The groups of a worker in the last train steps together: `lead` is how far it is above the others.

    It `stands_out` if it is below them all along.
    """

    name: str | None
    groups: int
    reward: float | None
    others: float | None
    staleness: float | None
    lead: float
    stands_out: bool
    steps: list[WorkerStep]


def _worker_steps(drawn: Drawn) -> list[tuple[str | None, WorkerStep]]:
    """Return the groups of each worker in each step, compared with those of others in the step."""
    tables = tables_of(drawn)
    found = []
    for key, table in tables.items():
        row = StepRow.of(key, drawn[key])
        for part in by_worker([table], of_run=True):
            values = (getattr(part, name) for name in WorkerStep.__slots__[5:])
            found.append((part.name, WorkerStep(key.step, key.restores, key.undone, row.last_at, row.groups, *values)))
    return found


def read_shares(tx: ReadTransaction, buffer: str, limit: int | None) -> tuple[list[WorkerShare], ByTask]:
    """Return what each worker made of the last `limit` steps, the lowest first, and of each task.

    Steps that a restore undid are left out.
    """
    drawn = {key: batches for key, batches in last_steps(tx, buffer, limit).items() if not key.undone}
    tables, steps = [*tables_of(drawn).values()], dict[str | None, list[WorkerStep]]()
    for name, one in _worker_steps(drawn):
        steps.setdefault(name, []).append(one)
    worse = all_along(tables)
    lower = {part.name for _, part in worse}
    shares = [
        WorkerShare(
            *(part.name, part.groups, part.reward, part.others, part.staleness, -(part.below or 0.0)),
            stands_out=part.name in lower,
            steps=steps[part.name],
        )
        for part in by_worker(tables)
    ]
    return sorted(shares, key=lambda one: (one.lead, one.name or "")), rewards_by_task(tables, worse)


@dataclass(frozen=True, slots=True)
class ByTask:
    """How far each worker's groups of each task are above those of others, over the last steps.

    A row has the worker's `name`, for each task that number (None: nothing to compare), and for `TASK is worse`
    whether it is below the others all along.
    """

    tasks: list[str]
    rows: list[dict[str, Any]]


def rewards_by_task(tables: Sequence[Table], found_worse: Sequence[tuple[str | None, Part]]) -> ByTask:
    """Return what each worker made of each task in these steps, compared with what others did."""
    tasks = sorted({task for table in tables for task, _ in table})
    worse = {(part.name, task) for task, part in found_worse}
    found: dict[str | None, dict[str, Any]] = {}
    for task in tasks:
        of_task = [{key: groups for key, groups in table.items() if key[0] == task} for table in tables]
        for part in by_worker(of_task):
            row = found.setdefault(part.name, {"name": part.name} | dict.fromkeys(tasks))
            row[task] = None if part.below is None else -part.below
    for row in found.values():
        row |= {f"{task} is worse": bool({(row["name"], task), (row["name"], None)} & worse) for task in tasks}
    return ByTask(tasks, sorted(found.values(), key=lambda row: row["name"] or ""))


def by_task_columns(found: ByTask) -> list[Column]:
    """Return the columns of `ByTask.rows`."""
    tasks = (Column(task, task, "change", bad=f"{task} is worse") for task in found.tasks)
    return [Column("name", "worker", "name"), *tasks]


#: The columns of `WorkerShare`.
SHARES = [
    *BY_WORKER[:1],
    *columns("groups", "reward", "others"),
    Column(
        "lead", "beside others", "change", title="mean reward beside that of groups that others made of the same tasks"
    ),
    *columns("staleness"),
]
