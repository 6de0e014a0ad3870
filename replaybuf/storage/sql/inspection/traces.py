"""What `trace` tells of steps and workers: what a train step was trained on, and what a worker made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import (
    Part,
    Rewards,
    Table,
    by_task,
    by_worker,
    comparisons_of,
    fallen,
    join,
    of_others,
    tabulate,
    verdict,
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

    Groups that came back aren't among its `groups`, unless all have. Rewards and staleness are those of the groups that
    were consumed; of a step of which none is yet, of all that were drawn. `resumed` and `undone` are those of
    `StepKey`.
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

    `groups` are those that were trained on, each once, lowest reward first, and `places` says where they are now (as
    `whereabouts` does). `before` has the mean reward of the up to `STEPS_BEFORE` steps before, of which there are
    `steps_before`. `verdict` says in a sentence what stands out.
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
    """What stands out of a step, in a sentence: the names of workers, and whether the others' rewards fell, too."""

    verdict: str
    workers: tuple[str | None, ...]
    fell: bool


@dataclass(frozen=True, slots=True)
class _Compared:
    """A step's parts beside the steps before it in its run: `others` are its tasks without workers that stand out."""

    workers: list[Part]
    tasks: list[Part]
    others: list[Part]
    before: float | None
    steps_before: int

    def verdict(self, reward: float | None) -> str:
        return verdict(self.workers, self.tasks, reward, self.before, self.others)


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The groups of one worker in a train step, and what they are compared with; None where there were none."""

    summary: StepSummary
    part: Part


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """What a worker made: of the last train steps those that had groups of it, newest first; its groups in the buffer.

    `lowest` are its groups in these steps, lowest reward first. `buffered` has a row for each task and status. `draws`
    are the last ones that it made itself.
    """

    steps: list[WorkerStep]
    lowest: list[tuple[Batch, Member]]
    buffered: list[dict[str, Any]]
    draws: list[Batch]


def summarise_steps(
    tx: ReadTransaction, buffer: str, *, before: int | None = None, limit: int | None = None
) -> list[StepSummary]:
    """Return the last steps of a buffer, `before` one of them, newest first; a step of several runs has several."""
    steps = list_steps(tx, buffer, before=before, limit=limit)
    return [StepSummary.of(key, batches) for key, batches in batches_of_steps(tx, buffer, steps).items()]


def trace_step(tx: ReadTransaction, buffer: str, step: int) -> list[StepTrace]:
    """Return a train step of a buffer, for each run that trained on it, the last run first; [] if none did."""
    drawn = _with_steps_before(tx, buffer, {step})
    tables = _tables(drawn)
    return [_trace(tx, drawn, tables, key) for key in drawn if key.step == step]


def changes(found: Sequence[StepSummary]) -> list[float | None]:
    """Return the change of the mean reward of steps, newest first, from the step before in the same run."""
    changed: list[float | None] = []
    for i, one in enumerate(found):
        earlier = (other for other in found[i + 1 :] if other.step < one.step and other.restores <= one.restores)
        before = next(earlier, None)
        known = before is not None and one.reward is not None and before.reward is not None
        changed.append(one.reward - before.reward if known else None)  # type: ignore[operator, union-attr]
    return changed


def neighbours(tx: ReadTransaction, buffer: str, step: int) -> tuple[int | None, int | None]:
    """Return the train steps before and after one for which something was drawn."""
    return next(iter(list_steps(tx, buffer, before=step, limit=1)), None), next_step(tx, buffer, step)


def judge_steps(tx: ReadTransaction, buffer: str, found: Sequence[StepSummary]) -> dict[tuple[int, int], Judged]:
    """Return of those steps in which a worker or a task stands out, what `trace step` says of them.

    The keys are the step and the number of restores before it.
    """
    if not found:
        return {}
    drawn = _with_steps_before(tx, buffer, {one.step for one in found})
    tables = _tables(drawn)
    keys = {(key.step, key.restores): key for key in drawn}
    judged = {}
    many = sum(comparisons_of(tables[keys[one.step, one.restores]]) for one in found)
    for one in found:
        compared = _compare(drawn, tables, keys[one.step, one.restores], many)
        worse = tuple(part.name for part in compared.workers if part.stands_out)
        fell = bool(fallen(compared.others))
        if worse or fell:
            judged[one.step, one.restores] = Judged(compared.verdict(one.reward), worse, fell)
    return judged


def _with_steps_before(tx: ReadTransaction, buffer: str, steps: set[int]) -> dict[StepKey, list[Batch]]:
    """Return the draws for these steps, and for those before them that they are compared with, newest step first."""
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
    """Return a step's workers and tasks beside the steps before it in its run.

    `drawn` has the newest steps first, and of each the last run. The step is one of several, with so many comparisons.
    """
    earlier: dict[int, Table] = {}
    for other, batches in drawn.items():
        if other.step < key.step and other.restores <= key.restores and any(one.settled for one in batches):
            earlier.setdefault(other.step, tables[other])  # the last run that this one goes on from comes first
    compared = list(earlier.values())[:STEPS_BEFORE]
    table, before = tables[key], join(compared)
    every = sum(before.values(), start=Rewards())
    many = comparisons_of(table) if comparisons is None else comparisons
    workers = by_worker(table, before, comparisons=many)
    tasks = by_task(table, before, comparisons=many)
    others = by_task(of_others(workers, table), of_others(workers, before), comparisons=many)
    return _Compared(workers, tasks, others, every.mean if every.count else None, len(compared))


def _last_steps(tx: ReadTransaction, buffer: str, limit: int | None) -> dict[StepKey, list[Batch]]:
    return batches_of_steps(tx, buffer, list_steps(tx, buffer, limit=limit), members=True)


def steps_by_worker(tx: ReadTransaction, buffer: str, limit: int | None) -> dict[str | None, list[WorkerStep]]:
    """Return what each worker made of the last train steps, newest first, without those that a restore undid."""
    found: dict[str | None, list[WorkerStep]] = {}
    drawn = {key: batches for key, batches in _last_steps(tx, buffer, limit).items() if not key.undone}
    for key, parts in _parts_of_steps(drawn).items():
        summary = StepSummary.of(key, drawn[key])
        for part in parts:
            found.setdefault(part.name, []).append(WorkerStep(summary, part))
    return found


def _parts_of_steps(drawn: Mapping[StepKey, Sequence[Batch]]) -> dict[StepKey, list[Part]]:
    """Return the workers of steps, each beside the others of its step."""
    tables = _tables(drawn)
    many = sum(map(comparisons_of, tables.values()))
    return {key: by_worker(table, {}, comparisons=many) for key, table in tables.items()}


_ANSWERS = "SELECT uid, position, worker, prompt, reward, response FROM rollouts WHERE uid IN ({uids})"


def lowest_answers(tx: ReadTransaction, buffer: str, run: StepTrace, most: int) -> list[dict[str, Any]]:
    """Return the rollouts with the lowest rewards of a step, where they still are."""
    there = [one.uid for _, one in run.groups if run.places.get(one.uid) != GONE]
    chosen = extreme_rollouts(tx, buffer, None, most, worst=True, among=there, apart=False) if there else []
    rows = rows_of(tx, _ANSWERS, [uid for uid, _ in chosen])
    found = {(row["uid"], row["position"]): row for row in rows}
    return [found[place] for place in chosen]


def trace_worker(tx: ReadTransaction, buffer: str, worker: str, limit: int | None) -> WorkerTrace | None:
    """Return what a worker made and drew in the last `limit` steps, or None if nothing is known of it."""
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
    """Return the names of those who made the groups in a buffer, or of the last steps."""
    found = set(tx.values(_MAKERS, buffer=buffer))
    for batches in _last_steps(tx, buffer, STEPS_BEFORE).values():
        found |= {member.worker for one in batches for member in one.members if member.worker is not None}
        found |= {one.worker for one in batches if one.worker is not None}
    return sorted(found)


def consumed(batches: Sequence[Batch]) -> list[Batch]:
    """Return the draws of which groups were consumed; all of them while none is."""
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
    """Return the groups that were trained on, each once, with the last draw that had it."""
    return list({member.uid: (drawn, member) for drawn in consumed(batches) for member in drawn.members}.values())


def _by_reward(drawn: tuple[Batch, Member]) -> tuple[bool, float, int]:
    reward = drawn[1].reward
    return reward is None, 0.0 if reward is None else reward, drawn[1].uid


def _known(batches: Sequence[Batch], field: str) -> list[Any]:
    return [value for one in batches if (value := getattr(one, field)) is not None]


def _weighted(batches: Sequence[Batch], field: str) -> float | None:
    """Return the mean of a field of draws, weighted by the groups that were consumed, or else drawn."""
    known = [(value, one.settled or one.groups) for one in batches if (value := getattr(one, field)) is not None]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


_MAKERS = """
SELECT DISTINCT g.worker FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.buffer = :buffer AND g.worker IS NOT NULL"""
# Groups are read once, in the order in which they lie: not by the index of their lanes, which `+ 0` keeps SQLite from.
_BUFFERED = """
SELECT l.task_name AS task_name, l.status AS status, l.leased AS leased, g.groups, g.reward, g.last_uid
FROM rb_lane l JOIN (
    SELECT lane + 0 AS lane, count(*) AS groups, avg(reward) AS reward, max(uid) AS last_uid
    FROM rb_group WHERE worker = :worker GROUP BY 1) g ON g.lane = l.id
WHERE l.buffer = :buffer ORDER BY l.task_name, l.status, l.leased"""
