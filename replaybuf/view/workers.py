"""Workers compared with one another over the last train steps, in all tasks and in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from replaybuf.common import units
from replaybuf.rules.comparison import Part, Table, over_steps, without, worse_workers
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import StepKey, batches_of_steps, list_steps
from replaybuf.view.columns import Column
from replaybuf.view.drawn import Drawn, StepRow, of_task, tables_of, with_steps_before

#: Workers are compared over the last steps that have so many groups together; at least and at most over so many steps.
_GROUPS, _LEAST, _MOST = 600, 20, 300


@dataclass(frozen=True, slots=True)
class WorseWorker:
    """A worker whose groups are lower than those of others over these steps, in one task or in all (None)."""

    task_name: str | None
    part: Part
    steps: str

    def __str__(self) -> str:
        part, suffix = self.part, f" in {self.task_name}" if self.task_name else ""
        name, count = part.name or "a worker without a name", units.number_of(part.groups, "group")
        rewards = f"{count} of mean reward {part.reward:.3f}, others {part.others:.3f}"
        return f"{name} is below the others{suffix} over {self.steps}: {rewards}"


@dataclass(frozen=True, slots=True)
class ByTask:
    """The mean reward of each worker in each task, less that of the other workers there.

    A row has the worker's `name`, for each `task TASK` that difference (None: no other worker made groups of it), and
    for `worse TASK` whether it stands out.
    """

    tasks: list[str]
    rows: list[dict[str, Any]]

    @property
    def says_more(self) -> bool:
        """Return whether there are several tasks, and other workers to compare with."""
        return len(self.tasks) > 1 and any(row[f"task {task}"] is not None for row in self.rows for task in self.tasks)


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers over the last steps, which `steps` names: those that are `worse`, all, and all by task.

    One of `made` stands out if it is worse; the lowest come first. Steps that a restore undid are left out.
    """

    steps: str
    worse: list[WorseWorker]
    made: list[Part]
    by_task: ByTask

    def others_of(self, tables: Mapping[StepKey, Table]) -> dict[StepKey, Table]:
        """Return the tables of steps without the groups of the workers that are worse."""
        return {key: without((worker.part.name for worker in self.worse), table) for key, table in tables.items()}


def read_workers(
    tx: Transaction,
    buffer: str,
    *,
    before: int | None = None,
    task: str | None = None,
    also: Set[int] = frozenset(),
) -> tuple[Workers, Drawn]:
    """Return the workers over the last steps before `before`, in one task or in all.

    With them come the draws of these steps, of those that are asked for `also`, and of the steps before.
    """
    sizes = batches_of_steps(tx, buffer, list_steps(tx, buffer, before=before, limit=_MOST))
    steps, groups = set[int](), 0
    for key, batches in sizes.items():
        if len(steps) >= _LEAST and groups >= _GROUPS:
            break
        if not key.undone:
            steps.add(key.step)
            groups += StepRow.of(key, batches).groups
    all_steps = {*steps, *also}
    drawn = of_task(with_steps_before(tx, buffer, all_steps), task) if all_steps else {}
    tables = {key: table for key, table in tables_of(drawn).items() if key.step in steps and not key.undone}
    return _compare(tables, task), drawn


def _compare(tables: Mapping[StepKey, Table], task: str | None) -> Workers:
    """Compare the workers over these steps, newest first, which have one task or all."""
    parts = over_steps([*tables.values()])
    numbers = sorted({key.step for key in tables})
    steps = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}" if numbers else ""
    worse = [WorseWorker(task or task_name, part, steps) for task_name, part in worse_workers(parts)]
    names = {worker.part.name for worker in worse}
    lowest = sorted(parts[None], key=lambda part: (-(part.below or 0.0), part.name or ""))
    made = [replace(part, stands_out=part.name in names) for part in lowest]
    return Workers(steps, worse, made, _by_task(parts, worse))


def _by_task(results: Mapping[str | None, Sequence[Part]], worse: Sequence[WorseWorker]) -> ByTask:
    """Return the workers with a number for each task, those with the lowest number first."""
    tasks, marked = [task for task in results if task is not None], {(mark.part.name, mark.task_name) for mark in worse}
    rows: dict[str | None, dict[str, Any]] = {part.name: {"name": part.name} for part in results[None]}
    for task in tasks:
        parts = {part.name: part for part in results[task]}
        for name, row in rows.items():
            part = parts.get(name)
            row[f"task {task}"] = None if part is None or part.below is None else -part.below
            row[f"worse {task}"] = bool({(name, task), (name, None)} & marked)

    def lowest(row: dict[str, Any]) -> tuple[float, str]:
        leads = [lead for task in tasks if (lead := row[f"task {task}"]) is not None]
        return min(leads, default=0.0), row["name"] or ""

    return ByTask(tasks, sorted(rows.values(), key=lowest))


def by_task_columns(table: ByTask) -> list[Column]:
    """Return the columns of `ByTask.rows`."""
    tasks = (Column(f"task {task}", task, "change", bad=f"worse {task}") for task in table.tasks)
    return [Column("name", "worker", "name"), *tasks]
