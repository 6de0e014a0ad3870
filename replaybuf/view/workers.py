"""Workers compared: the groups of each in the last train steps, and those of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replaybuf.rules.comparison import Part, Table, all_along, by_worker
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.view.columns import BY_WORKER, Column, columns
from replaybuf.view.drawn import last_steps, tables_of


def read_shares(tx: ReadTransaction, buffer: str, limit: int | None) -> tuple[list[dict[str, Any]], ByTask]:
    """Return what each worker made of the last `limit` steps, the lowest first, and of each task.

    A worker's row has the fields of `Part`, and its `steps`, each with its own `Part`. `lead` is how far it is above
    the others, and it `stands_out` if it is below them all along. Steps that a restore undid are left out.
    """
    drawn = {key: batches for key, batches in last_steps(tx, buffer, limit).items() if not key.undone}
    tables, steps = tables_of(drawn), dict[str | None, list[tuple[int, Part]]]()
    for key, table in tables.items():
        for part in by_worker([table], of_run=True):
            steps.setdefault(part.name, []).append((key.step, part))
    every = [*tables.values()]
    worse = all_along(every)
    lower = {part.name for _, part in worse}
    rows = [
        asdict(part) | {"lead": -(part.below or 0.0), "stands_out": part.name in lower, "steps": steps[part.name]}
        for part in by_worker(every)
    ]
    return sorted(rows, key=lambda row: (row["lead"], row["name"] or "")), rewards_by_task(every, worse)


@dataclass(frozen=True, slots=True)
class ByTask:
    """How far each worker's groups of each task are above those of others, over the last steps.

    A row has the worker's `name`, for each task that number (None: nothing to compare), and for `TASK is worse`
    whether it is below the others all along.
    """

    tasks: list[str]
    rows: list[dict[str, Any]]

    @property
    def says_more(self) -> bool:
        """Return whether there are several tasks, and other workers to compare with."""
        return len(self.tasks) > 1 and any(row[task] is not None for row in self.rows for task in self.tasks)


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


#: The columns of the workers of `read_shares`.
SHARES = [
    *BY_WORKER[:1],
    *columns("groups", "reward", "others"),
    Column(
        "lead", "beside others", "change", title="mean reward beside that of groups that others made of the same tasks"
    ),
    *columns("staleness"),
]
