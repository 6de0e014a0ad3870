"""Train steps: what each was trained on, by whom it was made, and what stands out; what a worker made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import (
    Part,
    Table,
    all_along,
    by_task,
    by_worker,
    comparisons_of,
    mean,
    tabulate,
    verdict,
    without,
)
from replaybuf.storage.sql.inspection.groups import choose, extreme_rollouts, rows_of
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import (
    GONE,
    STEPS_BEFORE,
    Batch,
    Member,
    Recorded,
    StepKey,
    batches_by,
    batches_of_steps,
    list_steps,
    next_step,
    recorded,
    whereabouts,
)
from replaybuf.view.columns import BY_WORKER, Column, columns

#: The draws for each train step of each run, newest step first, and last run first within a step.
_Drawn = Mapping[StepKey, Sequence[Batch]]
_DRAWS_SHOWN = 20


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
    drawn = batches_of_steps(tx, name, list_steps(tx, name, before=before, limit=limit))
    found = [StepRow.of(key, batches) for key, batches in drawn.items()]
    shown = [one for one in _with_changes(found) if first is None or one.step >= first]
    looked_at, count = list[StepRow](), 0
    for one in shown:
        count += one.groups
        if count > judged and looked_at:
            break
        looked_at.append(one)
    worse, lower = _judge(tx, name, looked_at)
    rows = [replace(one, lower=lower.get((one.step, one.restores), "")) for one in shown]
    return Steps(name, tx.now(), rows, worse, recorded(tx, name))


def _with_changes(found: Sequence[StepRow]) -> list[StepRow]:
    """Return steps, newest first, with the change of each mean reward from the step before in the same run."""
    rows = []
    for place, one in enumerate(found):
        earlier = (other for other in found[place + 1 :] if other.step < one.step and other.restores <= one.restores)
        before = next(earlier, None)
        known = before is not None and one.reward is not None and before.reward is not None
        rows.append(replace(one, change=one.reward - before.reward) if known else one)  # type: ignore[operator, union-attr]
    return rows


def _judge(
    tx: ReadTransaction, buffer: str, found: Sequence[StepRow]
) -> tuple[list[WorseWorker], dict[tuple[int, int], str]]:
    """Return the workers that are below the others in these steps all along, and without them what stands out in each
    step, by step and restores."""
    if not found:
        return [], {}
    drawn, shown = _with_steps_before(tx, buffer, {one.step for one in found}), {(o.step, o.restores) for o in found}
    tables = _tables(drawn)
    keys = [key for key in drawn if (key.step, key.restores) in shown]
    many = sum(comparisons_of(tables[key]) for key in keys)
    worse = all_along([tables[key] for key in keys if not key.undone])
    rest = {key: without((part.name for _, part in worse), table) for key, table in tables.items()}
    compared = {key: _compare(drawn, rest, key, many) for key in keys}
    lower = {(key.step, key.restores): one.verdict(None) for key, one in compared.items() if one.stands_out}
    return [WorseWorker(*one) for one in worse], lower


def neighbours(tx: ReadTransaction, buffer: str, step: int) -> tuple[int | None, int | None]:
    """Return the nearest train steps with draws before and after a step."""
    return next(iter(list_steps(tx, buffer, before=step, limit=1)), None), next_step(tx, buffer, step)


#: The columns of `Steps.rows`.
STEPS = [
    *columns("step", "last_at", "groups", spare=("last_at",)),
    Column("consumed", "consumed", usual=None),
    Column("reward", "reward", "reward", bad="lower"),
    *columns("change", "min_reward", "max_reward", "staleness", "max_staleness", "weights", "run", "taken_by",
             spare=("min_reward", "max_reward", "weights")),
]  # fmt: skip


# Comparisons


@dataclass(frozen=True, slots=True)
class _Compared:
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


def _with_steps_before(tx: ReadTransaction, buffer: str, steps: set[int]) -> _Drawn:
    """Return the draws for these steps, and for the earlier steps they are compared with, newest step first."""
    earlier = list_steps(tx, buffer, before=min(steps), limit=STEPS_BEFORE)
    return batches_of_steps(tx, buffer, sorted({*steps, *earlier}), members=True)


def _tables(drawn: _Drawn) -> dict[StepKey, Table]:
    return {key: tabulate(member for _, member in _groups(batches)) for key, batches in drawn.items()}


def _compare(drawn: _Drawn, tables: Mapping[StepKey, Table], key: StepKey, comparisons: int | None = None) -> _Compared:
    """Return a step's workers and tasks compared with the earlier steps of its run.

    `comparisons` is the number of tests in a whole run.
    """
    before, table = _before(drawn, tables, key), tables[key]
    workers = by_worker([table], comparisons=comparisons)
    tasks = by_task(table, before, comparisons=comparisons)
    worse = [part.name for part in workers if part.stands_out]
    others = by_task(without(worse, table), [without(worse, one) for one in before], comparisons=comparisons)
    every = mean(one.reward for of in before for groups in of.values() for one in groups)
    return _Compared(workers, tasks, others, every, len(before))


def _before(drawn: _Drawn, tables: Mapping[StepKey, Table], key: StepKey) -> list[Table]:
    """Return the tables of the steps before one, in the runs that it continues, newest first."""
    earlier: dict[int, Table] = {}
    for other, batches in drawn.items():
        if other.step < key.step and other.restores <= key.restores and any(one.settled for one in batches):
            earlier.setdefault(other.step, tables[other])  # the last run that this one continues comes first
    return list(earlier.values())[:STEPS_BEFORE]


def _last_steps(tx: ReadTransaction, buffer: str, limit: int | None) -> _Drawn:
    return batches_of_steps(tx, buffer, list_steps(tx, buffer, limit=limit), members=True)


def _consumed(batches: Sequence[Batch]) -> list[Batch]:
    """Return the draws with consumed groups; while there is none, all draws."""
    return [one for one in batches if one.settled] or list(batches)


def _groups(batches: Sequence[Batch]) -> list[tuple[Batch, Member]]:
    """Return the groups that were trained on, each once, with the last draw of each."""
    return list({member.uid: (drawn, member) for drawn in _consumed(batches) for member in drawn.members}.values())


def _by_reward(drawn: tuple[Batch, Member]) -> tuple[bool, float, int]:
    reward = drawn[1].reward
    return reward is None, 0.0 if reward is None else reward, drawn[1].uid


def _known(batches: Sequence[Batch], field: str) -> list[Any]:
    return [value for one in batches if (value := getattr(one, field)) is not None]


def _weighted(batches: Sequence[Batch], field: str) -> float | None:
    """Return the mean of a field of draws, weighted by the number of consumed groups (if none, of drawn groups)."""
    known = [(value, one.settled or one.groups) for one in batches if (value := getattr(one, field)) is not None]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


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
    batches: list[Batch]
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


def read_step(tx: ReadTransaction, buffer: str, step: int, worst: int) -> list[Step]:
    """Return a train step for each run that trained on it, last run first, with the `worst` answers of each."""
    drawn = _with_steps_before(tx, buffer, {step})
    tables = _tables(drawn)
    return [_step(tx, buffer, drawn, tables, key, worst) for key in drawn if key.step == step]


_PROMPTS = "SELECT uid, prompt FROM groups WHERE uid IN ({uids})"
_ANSWERS = "SELECT uid, position, worker, prompt, reward, response FROM rollouts WHERE uid IN ({uids})"


def _step(
    tx: ReadTransaction, buffer: str, drawn: _Drawn, tables: Mapping[StepKey, Table], key: StepKey, worst: int
) -> Step:
    summary, compared, places = StepRow.of(key, drawn[key]), _compare(drawn, tables, key), whereabouts(tx, drawn[key])
    members = sorted(_groups(drawn[key]), key=_by_reward)
    there = [one.uid for _, one in members if places[one.uid] != GONE]
    prompts = {row["uid"]: row["prompt"] for row in rows_of(tx, _PROMPTS, there)}
    groups = [
        StepGroup(
            key.step,
            key.restores,
            batch.id,
            batch.worker,
            **{name: getattr(one, name) for name in Member.__slots__},
            now=places[one.uid],
            prompt=prompts.get(one.uid),
        )
        for batch, one in members
    ]
    return Step(
        summary,
        compared.verdict(summary.reward),
        compared.before,
        compared.steps_before,
        compared.workers,
        compared.tasks,
        [replace(one, members=()) for one in drawn[key]],
        groups,
        _lowest(tx, buffer, there, worst) if worst and there else [],
    )


def _lowest(tx: ReadTransaction, buffer: str, uids: Sequence[int], most: int) -> list[Answer]:
    """Return the rollouts with the lowest rewards among these groups."""
    chosen = extreme_rollouts(tx, buffer, None, most, worst=True, among=uids)
    found = {(row["uid"], row["position"]): row for row in rows_of(tx, _ANSWERS, [uid for uid, _ in chosen])}
    return [Answer(**found[place]) for place in chosen]


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
    draws: list[Batch]


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


def _worker_steps(drawn: _Drawn) -> list[tuple[str | None, WorkerStep]]:
    """Return the groups of each worker in each step beside those of others in the step."""
    tables = _tables(drawn)
    many = sum(map(comparisons_of, tables.values()))
    found = []
    for key, table in tables.items():
        row = StepRow.of(key, drawn[key])
        for part in by_worker([table], comparisons=many):
            values = (getattr(part, name) for name in WorkerStep.__slots__[5:])
            found.append((part.name, WorkerStep(key.step, key.restores, key.undone, row.last_at, row.groups, *values)))
    return found


def read_worker(tx: ReadTransaction, buffer: str, worker: str, limit: int | None) -> Worker | None:
    """Return what a worker made of the last `limit` steps, and what it drew; None if nothing is recorded of it."""
    drawn = _last_steps(tx, buffer, limit)
    steps = [one for name, one in _worker_steps(drawn) if name == worker]
    lowest = sorted(
        ((batch, one) for batches in drawn.values() for batch, one in _groups(batches) if one.worker == worker),
        key=_by_reward,
    )
    buffered = [{**row, "leased": bool(row["leased"])} for row in tx.rows(_BUFFERED, buffer=buffer, worker=worker)]
    draws = batches_by(tx, buffer, worker, _DRAWS_SHOWN)
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
    for batches in _last_steps(tx, buffer, STEPS_BEFORE).values():
        found |= {member.worker for one in batches for member in one.members if member.worker is not None}
        found |= {one.worker for one in batches if one.worker is not None}
    return sorted(found)


def read_shares(tx: ReadTransaction, buffer: str, limit: int | None) -> tuple[list[WorkerShare], ByTask]:
    """Return what each worker made of the last `limit` steps, the lowest first, and of each task.

    Steps that a restore undid are left out.
    """
    drawn = {key: batches for key, batches in _last_steps(tx, buffer, limit).items() if not key.undone}
    tables, steps = [*_tables(drawn).values()], dict[str | None, list[WorkerStep]]()
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
