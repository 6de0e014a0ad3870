"""Train steps: what each was trained on, by whom it was made, and what stands out; what a worker made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import Part, all_along, by_worker
from replaybuf.storage.sql.inspection.groups import choose, rows_of
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import GONE, Batch, Member, Recorded, recorded
from replaybuf.storage.sql.inspection.traces import (
    StepSummary,
    StepTrace,
    changes,
    judge_steps,
    lowest_answers,
    steps_by_worker,
    summarise_steps,
    tables_of_steps,
    trace_step,
    trace_worker,
)
from replaybuf.view.columns import BY_WORKER, Column, columns


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
class WorseWorker:
    """A worker whose groups are lower than those of others all along, in one task or in all (None)."""

    task_name: str | None
    part: Part

    def __str__(self) -> str:
        part, of = self.part, f" in {self.task_name}" if self.task_name else ""
        name = part.name or "a worker without a name"
        return (
            f"{name} is below the others all along{of}: {part.groups:,} groups of mean reward {part.reward:.3f}, "
            f"others {part.others:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """Train steps of a buffer, newest first, and what stands out in them together.

    `known` has the totals of all recorded draws.
    """

    buffer: str
    now: datetime
    rows: list[StepRow]
    worse: list[WorseWorker]
    known: Recorded


def read_steps(
    tx: ReadTransaction,
    buffer: str | None,
    *,
    first: int | None = None,
    before: int | None = None,
    limit: int | None = None,
    judged: int = 20_000,
) -> Steps:
    """Return the last steps of a buffer, from `first` on and before `before`, newest first.

    What stands out is looked for in the newest of them, with up to `judged` groups.
    """
    name = choose(tx, buffer)
    found = summarise_steps(tx, name, before=before, limit=limit)
    moved = changes(found)
    shown = [(one, change) for one, change in zip(found, moved, strict=True) if first is None or one.step >= first]
    count, looked_at = 0, list[StepSummary]()
    for one, _ in shown:
        count += one.groups
        if count > judged and looked_at:
            break
        looked_at.append(one)
    said = judge_steps(tx, name, looked_at)
    fell = {(step, restores): text for step, restores, text in said.fell}
    rows = [_row(one, change, fell.get((one.step, one.restores), "")) for one, change in shown]
    return Steps(name, tx.now(), rows, [WorseWorker(*one) for one in said.workers], recorded(tx, name))


def _row(one: StepSummary, change: float | None = None, lower: str = "") -> StepRow:
    return StepRow(**asdict(one), change=change, lower=lower)


#: The columns of `Steps.rows`.
STEPS = [
    *columns("step", "last_at", "groups", spare=("last_at",)),
    Column("consumed", "consumed", usual=None),
    Column("reward", "reward", "reward", bad="lower"),
    *columns("change", "min_reward", "max_reward", "staleness", "max_staleness", "weights", "run", "taken_by",
             spare=("min_reward", "max_reward", "weights")),
]  # fmt: skip


# One step


@dataclass(frozen=True, slots=True)
class StepGroup:
    """A group that a step was trained on, as it was drawn; `now` is its place, and `prompt` its prompt if it exists."""

    step: int
    restores: int
    batch: int
    taken_by: str | None
    uid: int
    task_name: str
    worker: str | None
    reward: float | None
    staleness: int | None
    oldest_model_step: int | None
    created_at: datetime | None
    now: str
    prompt: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A rollout with one of the lowest rewards of a step."""

    uid: int
    position: int
    worker: str | None
    prompt: str | None
    reward: float
    response: str | None

    @property
    def title(self) -> str:
        """Its group, place and reward, and who made it."""
        by = f", by {self.worker}" if self.worker else ""
        return f"group {self.uid}, rollout {self.position}, reward {self.reward:.3f}{by}"


@dataclass(frozen=True, slots=True)
class Step:
    """A train step in one run: a sentence about what stands out, its groups by worker and task, and its draws.

    `groups` are those trained on, each once, lowest reward first; `worst` the answers with the lowest rewards among
    them. `reward_before` is the mean reward of the `steps_before` steps before.
    """

    summary: StepRow
    verdict: str
    reward_before: float | None
    steps_before: int
    workers: list[Part]
    tasks: list[Part]
    batches: list[Draw]
    groups: list[StepGroup]
    worst: list[Answer]

    @property
    def stands_out(self) -> bool:
        return any(part.stands_out for part in (*self.workers, *self.tasks))

    @property
    def gone(self) -> int:
        """The number of groups that exist no more, nor their texts."""
        return sum(one.now == GONE for one in self.groups)

    @property
    def reward_text(self) -> str:
        """The mean reward, its range, and that of the steps before."""
        one = self.summary
        if one.reward is None:
            return ""
        text = f"{one.reward:.3f} ({one.min_reward:.3f} to {one.max_reward:.3f})"
        if self.reward_before is not None:
            side = "below" if one.reward < self.reward_before else "above"
            steps = "step" if self.steps_before == 1 else f"{self.steps_before} steps"
            text += f", {abs(one.reward - self.reward_before):.3f} {side} the {steps} before ({self.reward_before:.3f})"
        return text


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw by `worker` for a train step: `settled` of its groups were consumed, `back` came back."""

    id: int
    taken_at: datetime
    restores: int
    step: int | None
    status: str
    worker: str | None
    lease: int | None
    groups: int
    settled: int
    reward: float | None
    min_reward: float | None
    max_reward: float | None
    staleness: float | None
    max_staleness: int | None
    oldest_model_step: int | None
    newest_model_step: int | None
    back: int


def draw_of(one: Batch) -> Draw:
    """Return a draw without its members."""
    return Draw(**{name: getattr(one, name) for name in Draw.__slots__})


def read_step(tx: ReadTransaction, buffer: str, step: int, worst: int) -> list[Step]:
    """Return a train step for each run that trained on it, last run first, with the `worst` answers of each."""
    return [_step(tx, buffer, run, worst) for run in trace_step(tx, buffer, step)]


_PROMPTS = "SELECT uid, prompt FROM groups WHERE uid IN ({uids})"


def _step(tx: ReadTransaction, buffer: str, run: StepTrace, worst: int) -> Step:
    there = [one.uid for _, one in run.groups if run.places[one.uid] != GONE]
    prompts = {row["uid"]: row["prompt"] for row in rows_of(tx, _PROMPTS, there)}
    summary = run.summary
    groups = [
        StepGroup(
            summary.step,
            summary.restores,
            drawn.id,
            drawn.worker,
            now=run.places[one.uid],
            prompt=prompts.get(one.uid),
            **{name: getattr(one, name) for name in Member.__slots__},
        )
        for drawn, one in run.groups
    ]
    return Step(
        _row(summary),
        run.verdict,
        run.before,
        run.steps_before,
        run.workers,
        run.tasks,
        [draw_of(one) for one in run.batches],
        groups,
        [Answer(**one) for one in lowest_answers(tx, buffer, run, worst)] if worst else [],
    )


def no_draw(known: Recorded, which: str) -> str:
    """Return a sentence for steps without recorded draws."""
    if known.last is not None:
        return f"no draw {which} is recorded; those that are are for steps {known.first} to {known.last}"
    if known.batches:
        return (
            f"of {known.batches:,} recorded draws none names its train step: pass current_train_step= to "
            "them (train_step= to leased_steps or acknowledge), or refresh the staleness"
        )
    return "no draw is recorded: nothing was taken yet, or with history=0"


# Workers


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
    """What a worker made: the last train steps with its groups, these groups (lowest reward first), those in the buffer
    by task and status, and its own last draws."""

    worker: str
    steps: list[WorkerStep]
    groups: list[WorkerGroup]
    buffered: list[dict[str, Any]]
    draws: list[Draw]


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What a worker made of the last train steps together: `lead` is how far it is above the others.

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


def _worker_step(summary: StepSummary, part: Part) -> WorkerStep:
    of_step = (getattr(summary, name) for name in ("step", "restores", "undone", "last_at", "groups"))
    return WorkerStep(*of_step, *(getattr(part, name) for name in WorkerStep.__slots__[5:]))


def read_worker(tx: ReadTransaction, buffer: str, worker: str, limit: int | None) -> Worker | None:
    """Return what a worker made of the last `limit` steps, and what it drew; None if nothing is recorded of it."""
    found = trace_worker(tx, buffer, worker, limit)
    if found is None:
        return None
    groups = [
        WorkerGroup(drawn.step, *(getattr(one, name) for name in WorkerGroup.__slots__[1:]))
        for drawn, one in found.lowest
    ]
    steps = [_worker_step(one.summary, one.part) for one in found.steps]
    return Worker(worker, steps, groups, found.buffered, [draw_of(one) for one in found.draws])


def read_shares(tx: ReadTransaction, buffer: str, limit: int) -> list[WorkerShare]:
    """Return what each worker made of the last `limit` steps, without those that a restore undid; the lowest first."""
    found = [
        WorkerShare(
            one.part.name,
            one.part.groups,
            one.part.reward,
            one.part.others,
            one.part.staleness,
            -(one.part.below or 0.0),
            one.worse,
            [_worker_step(step.summary, step.part) for step in one.steps],
        )
        for one in steps_by_worker(tx, buffer, limit)
    ]
    return sorted(found, key=lambda one: (one.lead, one.name or ""))


@dataclass(frozen=True, slots=True)
class ByTask:
    """How far each worker's groups of each task are above those of others, over the last steps.

    A row has the worker's `name`, for each task that number (None: nothing to compare), and for `TASK is worse`
    whether it is below the others all along.
    """

    tasks: list[str]
    rows: list[dict[str, Any]]


def by_task_of(tx: ReadTransaction, buffer: str, limit: int) -> ByTask:
    """Return how each worker does at each task over the last `limit` steps, without those that a restore undid."""
    tables = tables_of_steps(tx, buffer, limit)
    tasks = sorted({task for table in tables for task, _ in table})
    worse = {(part.name, task) for task, part in all_along(tables)}
    found: dict[str | None, dict[str, Any]] = {}
    for task in tasks:
        of_task = [{key: groups for key, groups in table.items() if key[0] == task} for table in tables]
        for part in by_worker(of_task):
            row = found.setdefault(part.name, {"name": part.name, "stands_out": False} | dict.fromkeys(tasks))
            row[task] = None if part.below is None else -part.below
    for row in found.values():
        row |= {f"{task} is worse": bool({(row["name"], task), (row["name"], None)} & worse) for task in tasks}
    return ByTask(tasks, sorted(found.values(), key=lambda row: row["name"] or ""))


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
