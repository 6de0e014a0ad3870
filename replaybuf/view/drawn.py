"""The draws of train steps: what was trained on in each, summed up, and compared with the steps before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import (
    Part,
    Table,
    by_task,
    by_worker,
    in_all_tasks,
    mean,
    tabulate,
    verdict,
    without,
)
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import (
    STEPS_BEFORE,
    Batch,
    Member,
    StepKey,
    batches_of_steps,
    list_steps,
)

#: The draws for each train step of each run, newest step first, and last run first within a step.
Drawn = Mapping[StepKey, Sequence[Batch]]


@dataclass(frozen=True, slots=True)
class StepRow:
    """The draws for a train step in one run.

    `restores` is the number of restores before it; `resumed`: the run continues from a checkpoint; `undone`: a later
    restore returned to a point before the step. `lower` says what stands out in it, if anything. Of one worker's groups
    alone, `others` is the mean reward of those that others made of the same tasks.
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
    others: float | None = None
    lower: str = ""

    @classmethod
    def of(cls, key: StepKey, batches: Sequence[Batch]) -> StepRow:
        """Return the summary of these draws. Groups that came back aren't in `groups`, unless all did.

        Rewards and staleness are those of consumed groups; while none is consumed yet, those of all drawn groups.
        """
        trained = _settled_draws(batches)
        return cls(
            **asdict(key),
            first_at=min(batch.taken_at for batch in batches),
            last_at=max(batch.taken_at for batch in batches),
            batches=len(batches),
            groups=sum(batch.groups - batch.back for batch in batches) or sum(batch.groups for batch in batches),
            settled=sum(batch.settled for batch in batches),
            reward=_weighted_mean(trained, "reward"),
            min_reward=min(_known_values(trained, "min_reward"), default=None),
            max_reward=max(_known_values(trained, "max_reward"), default=None),
            staleness=_weighted_mean(trained, "staleness"),
            max_staleness=max(_known_values(trained, "max_staleness"), default=None),
            oldest_model_step=min(_known_values(trained, "oldest_model_step"), default=None),
            newest_model_step=max(_known_values(trained, "newest_model_step"), default=None),
            taken_by=sorted({batch.worker for batch in batches if batch.worker is not None}),
        )

    @property
    def weights(self) -> str:
        """The train steps of the weights that made its groups: `410`, `408 to 410`, or a dash."""
        oldest, newest = self.oldest_model_step, self.newest_model_step
        return "-" if oldest is None else str(oldest) if oldest == newest else f"{oldest} to {newest}"

    @property
    def run(self) -> str:
        """The run of the step, by the restores before it."""
        run = f"restore {self.restores}" if self.resumed else "first"
        return f"{run}, undone" if self.undone else run

    @property
    def consumed(self) -> int | None:
        """The number of consumed groups if it isn't that of all."""
        return None if self.settled == self.groups else self.settled


@dataclass(frozen=True, slots=True)
class Compared:
    """A step's parts compared with the earlier steps of its run.

    `others` are its tasks without outlying workers, and `together` is all of them (`in_all_tasks`).
    """

    workers: list[Part]
    tasks: list[Part]
    others: list[Part]
    together: Part | None
    before: float | None

    @property
    def stands_out(self) -> bool:
        return any(part is not None and part.stands_out for part in (*self.workers, *self.others, self.together))

    def verdict(self, *, besides: bool = False) -> str:
        """Describe the workers and tasks that stand out. `besides`: it continues a sentence about all steps."""
        return verdict(self.workers, self.tasks, self.others, self.together, besides=besides)


def with_steps_before(tx: Transaction, buffer: str, steps: set[int]) -> Drawn:
    """Return the draws for these steps, and for the earlier steps they are compared with, newest step first."""
    earlier = list_steps(tx, buffer, before=min(steps), limit=STEPS_BEFORE)
    return batches_of_steps(tx, buffer, sorted({*steps, *earlier}), members=True)


def tables_of(drawn: Drawn) -> dict[StepKey, Table]:
    return {key: tabulate(member for _, member in groups_of(batches)) for key, batches in drawn.items()}


def compare(
    drawn: Drawn, tables: Mapping[StepKey, Table], key: StepKey, everybody: Mapping[StepKey, Table] | None = None
) -> Compared:
    """Return a step's workers compared with each other, and its tasks with the earlier steps of its run.

    `everybody` has the tables with the workers that were left out of `tables`, if any were: in all tasks together, each
    worker is compared with itself, but for those that stand out in the step.
    """
    before, table = _tables_before(drawn, tables, key), tables[key]
    workers, tasks = by_worker([table]), by_task(table, before)
    worse = [part.name for part in workers if part.stands_out]
    others = by_task(without(worse, table), [without(worse, earlier) for earlier in before])
    everybody = everybody or tables
    outliers = [part.name for part in by_worker([everybody[key]]) if part.stands_out]
    together = in_all_tasks(without(outliers, everybody[key]), _tables_before(drawn, everybody, key))
    reward = mean(group.reward for earlier in before for groups in earlier.values() for group in groups)
    return Compared(workers, tasks, others, together, reward)


def _tables_before(drawn: Drawn, tables: Mapping[StepKey, Table], key: StepKey) -> list[Table]:
    """Return the tables of the steps before one, in the runs that it continues, newest first."""
    earlier: dict[int, Table] = {}
    for past, batches in drawn.items():
        if past.step < key.step and past.restores <= key.restores and any(batch.settled for batch in batches):
            earlier.setdefault(past.step, tables[past])  # the last run that this one continues comes first
    return list(earlier.values())[:STEPS_BEFORE]


def of_task(drawn: Drawn, task: str | None) -> Drawn:
    """Return these draws, with the groups of one task only."""
    return drawn if task is None else {key: part for key, draws in drawn.items() if (part := only(draws, task=task))}


def only(batches: Sequence[Batch], *, task: str | None = None, worker: str | None = None) -> list[Batch]:
    """Return the draws with the groups of a task and a worker only, of any if None.

    Of a draw that was consumed in part, all of them count: which ones were isn't recorded.
    """
    chosen = []
    for batch in batches:
        part = [group for group in batch.members if task in (None, group.task_name) and worker in (None, group.worker)]
        if part:
            chosen.append(_with_groups(batch, part))
    return chosen


def _with_groups(batch: Batch, members: Sequence[Member]) -> Batch:
    rewards, stale, weights = (
        [value for member in members if (value := getattr(member, field)) is not None]
        for field in ("reward", "staleness", "oldest_model_step")
    )
    return replace(
        batch,
        members=members,
        groups=len(members),
        settled=len(members) if batch.settled else 0,
        back=0,
        reward=mean(rewards),
        min_reward=min(rewards, default=None),
        max_reward=max(rewards, default=None),
        staleness=mean(stale),
        max_staleness=max(stale, default=None),
        oldest_model_step=min(weights, default=None),
        newest_model_step=max(weights, default=None),
    )


def _settled_draws(batches: Sequence[Batch]) -> list[Batch]:
    """Return the draws with consumed groups; while there is none, all draws."""
    return [batch for batch in batches if batch.settled] or list(batches)


def groups_of(batches: Sequence[Batch]) -> list[tuple[Batch, Member]]:
    """Return the groups that were trained on, each once, with the last draw of each."""
    return list({member.uid: (drawn, member) for drawn in _settled_draws(batches) for member in drawn.members}.values())


def by_reward(drawn: tuple[Batch, Member]) -> tuple[bool, float, int]:
    reward = drawn[1].reward
    return reward is None, 0.0 if reward is None else reward, drawn[1].uid


def _known_values(batches: Sequence[Batch], field: str) -> list[Any]:
    return [value for batch in batches if (value := getattr(batch, field)) is not None]


def _weighted_mean(batches: Sequence[Batch], field: str) -> float | None:
    """Return the mean of a field of draws, weighted by the number of consumed groups (if none, of drawn groups)."""
    pairs = [(value, draw.settled or draw.groups) for draw in batches if (value := getattr(draw, field)) is not None]
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs) if pairs else None
