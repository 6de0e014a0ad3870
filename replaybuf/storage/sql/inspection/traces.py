"""What a train step was trained on, and what a worker made: the data of the command `trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from replaybuf.storage.sql.inspection.groups import extreme_rollouts, rows_of
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import (
    GONE,
    STEPS_BEFORE,
    Batch,
    Member,
    StepKey,
    batches_by,
    batches_of_steps,
    list_steps,
    next_step,
    whereabouts,
)
from replaybuf.storage.sql.statements.buffer_facts import last_uid as last_uid

_DRAWS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The draws for a train step in one run: `restores` is the number of restores before it.

    Groups that came back aren't in `groups`, unless all did. Rewards and staleness are those of consumed groups; while
    none is consumed yet, those of all drawn groups. `resumed` and `undone` are those of `StepKey`.
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

    @classmethod
    def of(cls, key: StepKey, batches: Sequence[Batch]) -> StepSummary:
        """Return the summary of these draws."""
        trained = consumed(batches)
        return cls(
            step=key.step,
            restores=key.restores,
            resumed=key.resumed,
            undone=key.undone,
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


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A train step in one run, with its draws and groups.

    `groups` are the groups trained on, each once, lowest reward first; `places` has their current places
    (`whereabouts`). `before` is the mean reward of the `steps_before` (at most `STEPS_BEFORE`) steps before. `verdict`
    is a sentence about outliers.
    """

    summary: StepSummary
    batches: list[Batch]
    groups: list[tuple[Batch, Member]]
    places: dict[int, str]
    workers: list[Part]
    tasks: list[Part]
    before: float | None
    steps_before: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What stands out in several steps: workers that are lower than the others all along (`all_along`), and tasks.

    `fell` has the step, the number of restores and the verdict of each step in which something stands out without the
    groups of those workers.
    """

    workers: list[tuple[str | None, Part]]
    fell: list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A step's parts compared with the earlier steps of its run: `others` are its tasks without outlying workers."""

    workers: list[Part]
    tasks: list[Part]
    others: list[Part]
    before: float | None
    steps_before: int

    def verdict(self, reward: float | None) -> str:
        return verdict(self.workers, self.tasks, reward, self.before, self.others)


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The groups of one worker in a train step, and the groups they are compared with; None where there were none."""

    summary: StepSummary
    part: Part


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """What a worker made: the last train steps with groups of the worker, newest first, and its groups in the buffer.

    `lowest` are its groups in these steps, lowest reward first. `buffered` has a row for each task and status. `draws`
    are the worker's own last draws.
    """

    steps: list[WorkerStep]
    lowest: list[tuple[Batch, Member]]
    buffered: list[dict[str, Any]]
    draws: list[Batch]


def summarise_steps(
    tx: ReadTransaction, buffer: str, *, before: int | None = None, limit: int | None = None
) -> list[StepSummary]:
    """Return the last steps of a buffer, lower than `before`, newest first; one summary for each run of a step."""
    steps = list_steps(tx, buffer, before=before, limit=limit)
    return [StepSummary.of(key, batches) for key, batches in batches_of_steps(tx, buffer, steps).items()]


def trace_step(tx: ReadTransaction, buffer: str, step: int) -> list[StepTrace]:
    """Return a train step of a buffer for each run that trained on it, last run first; [] if none did."""
    drawn = _with_steps_before(tx, buffer, {step})
    tables = _tables(drawn)
    return [_trace(tx, drawn, tables, key) for key in drawn if key.step == step]


def changes(found: Sequence[StepSummary]) -> list[float | None]:
    """Return the change of each step's mean reward from the step before in the same run, newest first."""
    changed: list[float | None] = []
    for i, one in enumerate(found):
        earlier = (other for other in found[i + 1 :] if other.step < one.step and other.restores <= one.restores)
        before = next(earlier, None)
        known = before is not None and one.reward is not None and before.reward is not None
        changed.append(one.reward - before.reward if known else None)  # type: ignore[operator, union-attr]
    return changed


def neighbours(tx: ReadTransaction, buffer: str, step: int) -> tuple[int | None, int | None]:
    """Return the nearest train steps with draws before and after a step."""
    return next(iter(list_steps(tx, buffer, before=step, limit=1)), None), next_step(tx, buffer, step)


def judge_steps(tx: ReadTransaction, buffer: str, found: Sequence[StepSummary]) -> Judged:
    """Return what stands out in these steps together."""
    drawn = _with_steps_before(tx, buffer, {one.step for one in found}) if found else {}
    tables, shown = _tables(drawn), {(one.step, one.restores) for one in found}
    keys = [key for key in drawn if (key.step, key.restores) in shown]
    many = sum(comparisons_of(tables[key]) for key in keys)
    workers, fell = all_along([tables[key] for key in keys if not key.undone]), list[tuple[int, int, str]]()
    rest = {key: without((part.name for _, part in workers), table) for key, table in tables.items()}
    for key in keys:
        compared = _compare(drawn, rest, key, many)
        if any(part.stands_out for part in (*compared.workers, *compared.others)):
            fell.append((key.step, key.restores, compared.verdict(None)))
    return Judged(workers, fell)


def _with_steps_before(tx: ReadTransaction, buffer: str, steps: set[int]) -> dict[StepKey, list[Batch]]:
    """Return the draws for these steps, and for the earlier steps they are compared with, newest step first."""
    earlier = list_steps(tx, buffer, before=min(steps), limit=STEPS_BEFORE)
    return batches_of_steps(tx, buffer, sorted({*steps, *earlier}), members=True)


def _tables(drawn: Mapping[StepKey, Sequence[Batch]]) -> dict[StepKey, Table]:
    return {key: tabulate(member for _, member in _groups(batches)) for key, batches in drawn.items()}


def _compare(
    drawn: Mapping[StepKey, Sequence[Batch]],
    tables: Mapping[StepKey, Table],
    key: StepKey,
    comparisons: int | None = None,
) -> _Compared:
    """Return a step's workers and tasks compared with the earlier steps of its run.

    `drawn` is newest step first, and last run first within a step. `comparisons`: the number of tests in a whole run.
    """
    compared = _before(drawn, tables, key)
    table = tables[key]
    workers = by_worker([table], comparisons=comparisons)
    tasks = by_task(table, compared, comparisons=comparisons)
    worse = [part.name for part in workers if part.stands_out]
    others = by_task(without(worse, table), [without(worse, one) for one in compared], comparisons=comparisons)
    every = mean(one.reward for of in compared for groups in of.values() for one in groups)
    return _Compared(workers, tasks, others, every, len(compared))


def _before(drawn: Mapping[StepKey, Sequence[Batch]], tables: Mapping[StepKey, Table], key: StepKey) -> list[Table]:
    """Return the tables of the steps before one, in the runs that it continues, oldest first."""
    earlier: dict[int, Table] = {}
    for other, batches in drawn.items():
        if other.step < key.step and other.restores <= key.restores and any(one.settled for one in batches):
            earlier.setdefault(other.step, tables[other])  # the last run that this one continues comes first
    return list(earlier.values())[:STEPS_BEFORE][::-1]


def _last_steps(tx: ReadTransaction, buffer: str, limit: int | None) -> dict[StepKey, list[Batch]]:
    return batches_of_steps(tx, buffer, list_steps(tx, buffer, limit=limit), members=True)


def tables_of_steps(tx: ReadTransaction, buffer: str, limit: int | None) -> list[Table]:
    """Return the groups of the last train steps by task and worker, without steps undone by a restore."""
    drawn = {key: batches for key, batches in _last_steps(tx, buffer, limit).items() if not key.undone}
    return [*_tables(drawn).values()]


@dataclass(frozen=True, slots=True)
class WorkerSteps:
    """What a worker made of several steps together, whether it is `worse` all along, and of each, newest first."""

    part: Part
    worse: bool
    steps: list[WorkerStep]


def steps_by_worker(tx: ReadTransaction, buffer: str, limit: int | None) -> list[WorkerSteps]:
    """Return what each worker made of the last train steps, worst first, without steps undone by a restore."""
    drawn = {key: batches for key, batches in _last_steps(tx, buffer, limit).items() if not key.undone}
    tables, found = _tables(drawn), dict[str | None, list[WorkerStep]]()
    for key, parts in _parts_of_steps(drawn).items():
        summary = StepSummary.of(key, drawn[key])
        for part in parts:
            found.setdefault(part.name, []).append(WorkerStep(summary, part))
    worse = {part.name for _, part in all_along([*tables.values()])}
    return [WorkerSteps(part, part.name in worse, found[part.name]) for part in by_worker([*tables.values()])]


def _parts_of_steps(drawn: Mapping[StepKey, Sequence[Batch]]) -> dict[StepKey, list[Part]]:
    """Return the workers of each step, each compared with the others in the step."""
    tables = _tables(drawn)
    many = sum(map(comparisons_of, tables.values()))
    return {key: by_worker([table], comparisons=many) for key, table in tables.items()}


_ANSWERS = "SELECT uid, position, worker, prompt, reward, response FROM rollouts WHERE uid IN ({uids})"


def lowest_answers(tx: ReadTransaction, buffer: str, run: StepTrace, most: int) -> list[dict[str, Any]]:
    """Return the rollouts of a step with the lowest rewards, among groups that still exist."""
    there = [one.uid for _, one in run.groups if run.places.get(one.uid) != GONE]
    chosen = extreme_rollouts(tx, buffer, None, most, worst=True, among=there, apart=False) if there else []
    rows = rows_of(tx, _ANSWERS, [uid for uid, _ in chosen])
    found = {(row["uid"], row["position"]): row for row in rows}
    return [found[place] for place in chosen]


def trace_worker(tx: ReadTransaction, buffer: str, worker: str, limit: int | None) -> WorkerTrace | None:
    """Return the made groups and draws of a worker in the last `limit` steps, or None if nothing is recorded of it."""
    steps: list[WorkerStep] = []
    lowest: list[tuple[Batch, Member]] = []
    last = _last_steps(tx, buffer, limit)
    for key, parts in _parts_of_steps(last).items():
        steps += [WorkerStep(StepSummary.of(key, last[key]), part) for part in parts if part.name == worker]
        lowest += [(drawn, one) for drawn, one in _groups(last[key]) if one.worker == worker]
    buffered = [{**row, "leased": bool(row["leased"])} for row in tx.rows(_BUFFERED, buffer=buffer, worker=worker)]
    draws = batches_by(tx, buffer, worker, _DRAWS_SHOWN)
    if not (steps or buffered or draws):
        return None
    return WorkerTrace(steps, sorted(lowest, key=_by_reward), buffered, draws)


def workers_of(tx: ReadTransaction, buffer: str) -> list[str]:
    """Return the names of the workers that made the groups in a buffer, or those of the last steps."""
    found = set(tx.values(_MAKERS, buffer=buffer))
    for batches in _last_steps(tx, buffer, STEPS_BEFORE).values():
        found |= {member.worker for one in batches for member in one.members if member.worker is not None}
        found |= {one.worker for one in batches if one.worker is not None}
    return sorted(found)


def consumed(batches: Sequence[Batch]) -> list[Batch]:
    """Return the draws with consumed groups; while there is none, all draws."""
    return [one for one in batches if one.settled] or list(batches)


def _trace(
    tx: ReadTransaction, drawn: Mapping[StepKey, list[Batch]], tables: Mapping[StepKey, Table], key: StepKey
) -> StepTrace:
    compared = _compare(drawn, tables, key)
    summary = StepSummary.of(key, drawn[key])
    groups, places = sorted(_groups(drawn[key]), key=_by_reward), whereabouts(tx, drawn[key])
    parts = compared.workers, compared.tasks, compared.before, compared.steps_before
    return StepTrace(summary, drawn[key], groups, places, *parts, compared.verdict(summary.reward))


def _groups(batches: Sequence[Batch]) -> list[tuple[Batch, Member]]:
    """Return the groups that were trained on, each once, with the last draw of each."""
    return list({member.uid: (drawn, member) for drawn in consumed(batches) for member in drawn.members}.values())


def _by_reward(drawn: tuple[Batch, Member]) -> tuple[bool, float, int]:
    reward = drawn[1].reward
    return reward is None, 0.0 if reward is None else reward, drawn[1].uid


def _known(batches: Sequence[Batch], field: str) -> list[Any]:
    return [value for one in batches if (value := getattr(one, field)) is not None]


def _weighted(batches: Sequence[Batch], field: str) -> float | None:
    """Return the mean of a field of draws, weighted by the number of consumed groups (if none, of drawn groups)."""
    known = [(value, one.settled or one.groups) for one in batches if (value := getattr(one, field)) is not None]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


_MAKERS = """
SELECT DISTINCT g.worker FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.buffer = :buffer AND g.worker IS NOT NULL"""
# Groups are read in one scan in storage order: `+ 0` keeps SQLite from the lanes' index.
_BUFFERED = """
SELECT l.task_name AS task_name, l.status AS status, l.leased AS leased, g.groups, g.reward, g.last_uid
FROM rb_lane l JOIN (
    SELECT lane + 0 AS lane, count(*) AS groups, avg(reward) AS reward, max(uid) AS last_uid
    FROM rb_group WHERE worker = :worker GROUP BY 1) g ON g.lane = l.id
WHERE l.buffer = :buffer ORDER BY l.task_name, l.status, l.leased"""
