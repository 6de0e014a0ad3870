"""The draws of train steps: what was trained on in each, summed up; steps and workers compared with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import Part, Table, all_along, by_task, by_worker, mean, tabulate, verdict, without
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import (
    STEPS_BEFORE,
    Batch,
    Member,
    StepKey,
    batches_of_steps,
    list_steps,
)
from replaybuf.view.columns import BY_WORKER, Column, columns

#: The draws for each train step of each run, newest step first, and last run first within a step.
Drawn = Mapping[StepKey, Sequence[Batch]]


@dataclass(frozen=True, slots=True)
class StepRow:
    """The draws for a train step in one run, with the change of the mean reward from the step before.

    `restores` is the number of restores before it; `resumed`: the run continues from a checkpoint; `undone`: a later
    restore returned to a point before the step. `lower` says what stands out in it, if anything.
    """

    step: int
    restores: int
    resumed: bool
    undone: bool
    first_at: datetime
    last_at: datetime
    batches: int
    groups: int
    settled: int
    reward: float | None
    min_reward: float | None
    max_reward: float | None
    staleness: float | None
    max_staleness: int | None
    oldest_model_step: int | None
    newest_model_step: int | None
    taken_by: list[str]
    change: float | None = None
    lower: str = ""

    @classmethod
    def of(cls, key: StepKey, batches: Sequence[Batch]) -> StepRow:
        """Return the summary of these draws. Groups that came back aren't in `groups`, unless all did.

        Rewards and staleness are those of consumed groups; while none is consumed yet, those of all drawn groups.
        """
        trained = _consumed(batches)
        return cls(
            **asdict(key),
            first_at=min(one.taken_at for one in batches),
            last_at=max(one.taken_at for one in batches),
            batches=len(batches),
            groups=sum(one.groups - one.back for one in batches) or sum(one.groups for one in batches),
            settled=sum(one.settled for one in batches),
            reward=_weighted(trained, "reward"),
            min_reward=min(_known(trained, "min_reward"), default=None),
            max_reward=max(_known(trained, "max_reward"), default=None),
            staleness=_weighted(trained, "staleness"),
            max_staleness=max(_known(trained, "max_staleness"), default=None),
            oldest_model_step=min(_known(trained, "oldest_model_step"), default=None),
            newest_model_step=max(_known(trained, "newest_model_step"), default=None),
            taken_by=sorted({one.worker for one in batches if one.worker is not None}),
        )

    @property
    def weights(self) -> str:
        """The train steps of the weights that made its groups, as text."""
        return span_text(self.oldest_model_step, self.newest_model_step)

    @property
    def run(self) -> str:
        """The run of the step, by the restores before it."""
        run = f"after restore {self.restores}" if self.resumed else "first"
        return f"{run}, undone" if self.undone else run

    @property
    def consumed(self) -> int | None:
        """The number of consumed groups if it isn't that of all."""
        return None if self.settled == self.groups else self.settled


def span_text(oldest: int | None, newest: int | None) -> str:
    """Return the train steps of weights: `410`, `408 to 410`, or a dash."""
    if oldest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A step's parts compared with the earlier steps of its run: `others` are its tasks without outlying workers."""

    workers: list[Part]
    tasks: list[Part]
    others: list[Part]
    before: float | None
    steps_before: int

    @property
    def stands_out(self) -> bool:
        return any(part.stands_out for part in (*self.workers, *self.others))

    def verdict(self, reward: float | None) -> str:
        return verdict(self.workers, self.tasks, reward, self.before, self.others)


def with_steps_before(tx: Transaction, buffer: str, steps: set[int]) -> Drawn:
    """Return the draws for these steps, and for the earlier steps they are compared with, newest step first."""
    earlier = list_steps(tx, buffer, before=min(steps), limit=STEPS_BEFORE)
    return batches_of_steps(tx, buffer, sorted({*steps, *earlier}), members=True)


def tables_of(drawn: Drawn) -> dict[StepKey, Table]:
    return {key: tabulate(member for _, member in groups_of(batches)) for key, batches in drawn.items()}


def compare(drawn: Drawn, tables: Mapping[StepKey, Table], key: StepKey, *, of_run: bool = False) -> Compared:
    """Return a step's workers and tasks compared with the earlier steps of its run; `of_run`: so are all others."""
    before, table = _before(drawn, tables, key), tables[key]
    workers = by_worker([table], of_run=of_run)
    tasks = by_task(table, before, of_run=of_run)
    worse = [part.name for part in workers if part.stands_out]
    others = by_task(without(worse, table), [without(worse, one) for one in before], of_run=of_run)
    every = mean(one.reward for of in before for groups in of.values() for one in groups)
    return Compared(workers, tasks, others, every, len(before))


def _before(drawn: Drawn, tables: Mapping[StepKey, Table], key: StepKey) -> list[Table]:
    """Return the tables of the steps before one, in the runs that it continues, newest first."""
    earlier: dict[int, Table] = {}
    for other, batches in drawn.items():
        if other.step < key.step and other.restores <= key.restores and any(one.settled for one in batches):
            earlier.setdefault(other.step, tables[other])  # the last run that this one continues comes first
    return list(earlier.values())[:STEPS_BEFORE]


def last_steps(tx: Transaction, buffer: str, limit: int | None) -> Drawn:
    return batches_of_steps(tx, buffer, list_steps(tx, buffer, limit=limit), members=True)


def _consumed(batches: Sequence[Batch]) -> list[Batch]:
    """Return the draws with consumed groups; while there is none, all draws."""
    return [one for one in batches if one.settled] or list(batches)


def groups_of(batches: Sequence[Batch]) -> list[tuple[Batch, Member]]:
    """Return the groups that were trained on, each once, with the last draw of each."""
    return list({member.uid: (drawn, member) for drawn in _consumed(batches) for member in drawn.members}.values())


def by_reward(drawn: tuple[Batch, Member]) -> tuple[bool, float, int]:
    reward = drawn[1].reward
    return reward is None, 0.0 if reward is None else reward, drawn[1].uid


def _known(batches: Sequence[Batch], field: str) -> list[Any]:
    return [value for one in batches if (value := getattr(one, field)) is not None]


def _weighted(batches: Sequence[Batch], field: str) -> float | None:
    """Return the mean of a field of draws, weighted by the number of consumed groups (if none, of drawn groups)."""
    known = [(value, one.settled or one.groups) for one in batches if (value := getattr(one, field)) is not None]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


# Workers


def read_shares(tx: Transaction, buffer: str, limit: int | None) -> tuple[list[dict[str, Any]], ByTask]:
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
