"""Train steps: what was trained on, made by whom, how stale, and how it compares with the steps before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.rules.comparison import Part, by_task, by_worker, mean, verdict
from replaybuf.storage.sql.inspection.batches import (
    STEPS_BEFORE,
    Batch,
    Member,
    StepKey,
    batches_before,
    batches_by,
    batches_of_steps,
    list_steps,
    whereabouts,
)
from replaybuf.storage.sql.inspection.look import Look

_DRAWS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The draws for a train step in one run: `restores` is the number of restores before it.

    Rewards and staleness are those of the groups that were consumed; of a step of which none is yet, of all that were
    drawn. `undone`: a later restore went back to before this step.
    """

    step: int
    restores: int
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
            undone=key.undone,
            first_at=min(one.taken_at for one in batches),
            last_at=max(one.taken_at for one in batches),
            batches=len(batches),
            groups=sum(one.groups for one in batches),
            settled=sum(one.settled for one in batches),
            reward=_weighted(trained, "reward"),
            min_reward=min((one.min_reward for one in trained if one.min_reward is not None), default=None),
            max_reward=max((one.max_reward for one in trained if one.max_reward is not None), default=None),
            staleness=_weighted(trained, "staleness"),
            max_staleness=max((one.max_staleness for one in trained if one.max_staleness is not None), default=None),
            oldest_model_step=min(
                (one.oldest_model_step for one in trained if one.oldest_model_step is not None), default=None
            ),
            newest_model_step=max(
                (one.newest_model_step for one in trained if one.newest_model_step is not None), default=None
            ),
            taken_by=sorted({one.worker for one in batches if one.worker is not None}),
        )


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A train step in one run, with its draws and groups.

    `groups` are those that were trained on, each once, lowest reward first, and `places` says where they are now
    (`batches.whereabouts`). `before` has the mean reward of the up to `STEPS_BEFORE` steps before. `verdict` says in a
    sentence what stands out.
    """

    summary: StepSummary
    batches: list[Batch]
    groups: list[tuple[Batch, Member]]
    places: dict[int, str]
    workers: list[Part]
    tasks: list[Part]
    before: float | None
    verdict: str


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
    look: Look, buffer: str, *, before: int | None = None, limit: int | None = None
) -> list[StepSummary]:
    """Return the last steps of a buffer, `before` one of them, newest first; a step of several runs has several."""
    steps = list_steps(look, buffer, before=before, limit=limit)
    return [StepSummary.of(key, batches) for key, batches in batches_of_steps(look, buffer, steps).items()]


def trace_step(look: Look, buffer: str, step: int) -> list[StepTrace]:
    """Return a train step of a buffer, for each run that trained on it, the last run first; [] if none did."""
    return [
        _trace(look, buffer, key, batches)
        for key, batches in batches_of_steps(look, buffer, [step], members=True).items()
    ]


def trace_worker(look: Look, buffer: str, worker: str, limit: int | None) -> WorkerTrace | None:
    """Return what a worker made and drew in the last `limit` steps, or None if nothing is known of it."""
    steps: list[WorkerStep] = []
    lowest: list[tuple[Batch, Member]] = []
    newest = list_steps(look, buffer, limit=limit)
    for key, batches in batches_of_steps(look, buffer, newest, members=True).items():
        groups = _groups(batches)
        parts = [part for part in by_worker([one for _, one in groups], []) if part.name == worker]
        steps += [WorkerStep(StepSummary.of(key, batches), part) for part in parts]
        lowest += [(drawn, one) for drawn, one in groups if one.worker == worker]
    buffered = [{**row, "leased": bool(row["leased"])} for row in look.rows(_BUFFERED, buffer=buffer, worker=worker)]
    draws = batches_by(look, buffer, worker, _DRAWS_SHOWN)
    if not (steps or buffered or draws):
        return None
    return WorkerTrace(steps, sorted(lowest, key=_by_reward), buffered, draws)


def workers_of(look: Look, buffer: str) -> list[str]:
    """Return the names of those who made the groups in a buffer, or of the last steps."""
    found = {name for (name,) in look.table(_MAKERS, buffer=buffer)[1]}
    for batches in batches_of_steps(look, buffer, list_steps(look, buffer, limit=STEPS_BEFORE), members=True).values():
        found |= {member.worker for one in batches for member in one.members if member.worker is not None}
        found |= {one.worker for one in batches if one.worker is not None}
    return sorted(found)


def consumed(batches: Sequence[Batch]) -> list[Batch]:
    """Return the draws of which groups were consumed; all of them while none is."""
    return [one for one in batches if one.settled] or list(batches)


def _trace(look: Look, buffer: str, key: StepKey, batches: list[Batch]) -> StepTrace:
    groups = _groups(batches)
    members, earlier = [one for _, one in groups], batches_before(look, buffer, key)
    before = [one for drawn in earlier if drawn.settled for one in drawn.members]
    workers, tasks = by_worker(members, before), by_task(members, before)
    summary, mean_before = StepSummary.of(key, batches), mean(one.reward for one in before)
    return StepTrace(
        summary=summary,
        batches=batches,
        groups=sorted(groups, key=_by_reward),
        places=whereabouts(look, batches),
        workers=workers,
        tasks=tasks,
        before=mean_before,
        verdict=verdict(workers, tasks, summary.reward, mean_before),
    )


def _groups(batches: Sequence[Batch]) -> list[tuple[Batch, Member]]:
    """Return the groups that were trained on, each once, with the last draw that had it."""
    return list({member.uid: (drawn, member) for drawn in consumed(batches) for member in drawn.members}.values())


def _by_reward(drawn: tuple[Batch, Member]) -> tuple[bool, float, int]:
    reward = drawn[1].reward
    return reward is None, 0.0 if reward is None else reward, drawn[1].uid


def _weighted(batches: Sequence[Batch], field: str) -> float | None:
    """Return the mean of a field of draws, weighted by the groups that were consumed, or else drawn."""
    known = [(value, one.settled or one.groups) for one in batches if (value := getattr(one, field)) is not None]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


_MAKERS = """
SELECT DISTINCT g.worker FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE l.buffer = :buffer AND g.worker IS NOT NULL"""
_BUFFERED = """
SELECT
    l.task_name AS task_name, l.status AS status, l.leased AS leased, count(*) AS groups, avg(g.reward) AS reward,
    max(g.uid) AS last_uid
FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer AND g.worker = :worker
GROUP BY l.task_name, l.status, l.leased ORDER BY l.task_name, l.status, l.leased"""
