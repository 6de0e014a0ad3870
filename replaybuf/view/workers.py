"""Workers compared: the groups of each in the last train steps and those of others, and its draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import (
    Part,
    Table,
    all_along,
    by_worker,
)
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import (
    STEPS_BEFORE,
    Batch,
    batches_by,
)
from replaybuf.view.columns import BY_WORKER, Column, columns
from replaybuf.view.drawn import (
    Drawn,
    StepRow,
    by_reward,
    groups_of,
    last_steps,
    tables_of,
)

_DRAWS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The groups of one worker in a train step of `of` groups, beside those of others."""

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
class WorkerGroup:
    """A group of a worker that a step was trained on."""

    step: int | None
    uid: int
    task_name: str
    reward: float | None
    staleness: int | None
    created_at: datetime | None


@dataclass(frozen=True, slots=True)
class Worker:
    """The last train steps with groups of a worker, these groups (lowest reward first), those in the buffer by task and
    status, and its own last draws."""

    worker: str
    steps: list[WorkerStep]
    groups: list[WorkerGroup]
    buffered: list[dict[str, Any]]
    draws: list[Batch]


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
    """Return the groups of each worker in each step beside those of others in the step."""
    tables = tables_of(drawn)
    found = []
    for key, table in tables.items():
        row = StepRow.of(key, drawn[key])
        for part in by_worker([table], of_run=True):
            values = (getattr(part, name) for name in WorkerStep.__slots__[5:])
            found.append((part.name, WorkerStep(key.step, key.restores, key.undone, row.last_at, row.groups, *values)))
    return found


def read_worker(tx: ReadTransaction, buffer: str, worker: str, limit: int | None) -> Worker | None:
    """Return what a worker made of the last `limit` steps, and what it drew; None if nothing is recorded of it."""
    drawn = last_steps(tx, buffer, limit)
    steps = [one for name, one in _worker_steps(drawn) if name == worker]
    lowest = sorted(
        ((batch, one) for batches in drawn.values() for batch, one in groups_of(batches) if one.worker == worker),
        key=by_reward,
    )
    buffered = [{**row, "leased": bool(row["leased"])} for row in tx.rows(_BUFFERED, buffer=buffer, worker=worker)]
    draws = [replace(one, members=()) for one in batches_by(tx, buffer, worker, _DRAWS_SHOWN)]
    if not (steps or buffered or draws):
        return None
    names = WorkerGroup.__slots__[1:]
    groups = [WorkerGroup(batch.step, *(getattr(one, name) for name in names)) for batch, one in lowest]
    return Worker(worker, steps, groups, buffered, draws)


# Groups are read in one scan in storage order: `+ 0` keeps SQLite from the lanes' index.
_BUFFERED = """
SELECT l.task_name AS task_name, l.status AS status, l.leased AS leased, g.groups, g.reward, g.last_uid
FROM rb_lane l JOIN (
    SELECT lane + 0 AS lane, count(*) AS groups, avg(reward) AS reward, max(uid) AS last_uid
    FROM rb_group WHERE worker = :worker GROUP BY 1) g ON g.lane = l.id
WHERE l.buffer = :buffer ORDER BY l.task_name, l.status, l.leased"""
_MAKERS = """
SELECT DISTINCT g.worker FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.buffer = :buffer AND g.worker IS NOT NULL"""


def workers_of(tx: ReadTransaction, buffer: str) -> list[str]:
    """Return the names of the workers that made the groups in a buffer, or those of the last steps."""
    found = set(tx.values(_MAKERS, buffer=buffer))
    for batches in last_steps(tx, buffer, STEPS_BEFORE).values():
        found |= {member.worker for one in batches for member in one.members if member.worker is not None}
        found |= {one.worker for one in batches if one.worker is not None}
    return sorted(found)


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
    return sorted(shares, key=lambda one: (one.lead, one.name or "")), _by_task(tables, worse)


@dataclass(frozen=True, slots=True)
class ByTask:
    """How far each worker's groups of each task are above those of others, over the last steps.

    A row has the worker's `name`, for each task that number (None: nothing to compare), and for `TASK is worse`
    whether it is below the others all along.
    """

    tasks: list[str]
    rows: list[dict[str, Any]]


def _by_task(tables: Sequence[Table], found_worse: Sequence[tuple[str | None, Part]]) -> ByTask:
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


#: The columns of `Worker.steps`, `Worker.groups`, `Worker.buffered`, and of `WorkerShare`.
WORKER_STEPS = columns("step", "groups", "of", "reward", "others", "below", "staleness")
WORKER_GROUPS = columns("uid", "step", "task_name", "reward", "staleness")
BUFFERED = [
    *columns("task_name", "status"),
    Column("leased", "leased", "word", usual=False),
    *columns("groups", "reward", "last_uid"),
]
SHARES = [
    *BY_WORKER[:1],
    *columns("groups", "reward", "others"),
    Column(
        "lead", "beside others", "change", title="mean reward beside that of groups that others made of the same tasks"
    ),
    *columns("staleness"),
]
