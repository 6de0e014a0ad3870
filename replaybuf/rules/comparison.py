"""Finds workers and tasks with unexpectedly low rewards, by comparing parts of train steps with the rest of them.

There are two marks: a step's task is lower than the steps before, and a worker is lower than the others. A group is
compared with groups of its own task: a worker's with those of others for the same steps, a task's with those of the
steps before. A part stands out if Student's t of the difference is beyond what chance makes of a run's comparisons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Protocol

#: The probability that any part of a step, or of a run, stands out by chance alone (the family-wise error rate).
_CHANCE, _CHANCE_OF_RUN = 0.01, 0.001
#: Fewer groups than this, on either side, are no evidence; nor are fewer rewards beyond one for each mean.
_FEWEST = 3
#: The least spread of rewards, relative to the largest one: few groups may be equal.
_LEAST_SPREAD = 0.05
#: Steps vary by themselves if the variance of their means is this many times that from their groups.
_MORE = 2.0
_NAMED = 3


class Drawn(Protocol):
    """A drawn group, as far as comparisons need it."""

    @property
    def task_name(self) -> str: ...

    @property
    def worker(self) -> str | None: ...

    @property
    def reward(self) -> float | None: ...

    @property
    def staleness(self) -> int | None: ...


#: The groups of a step, by task and worker.
Table = Mapping[tuple[str, str | None], Sequence[Drawn]]


@dataclass(frozen=True, slots=True)
class Part:
    """The groups of one worker or task, and their comparison.

    `reward` and `staleness` are means (None where no group has one). `others` is the mean reward of the groups compared
    with, weighted by the part's groups; `below` is `others - reward`, None where there is nothing to compare with.
    `errors` is `below` in standard errors. `stands_out`: it is lower than chance explains.
    """

    name: str | None
    groups: int
    reward: float | None
    staleness: float | None
    others: float | None
    below: float | None
    errors: float
    stands_out: bool


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are finite numbers, or None when there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # infinite rather than an error


def tabulate(groups: Iterable[Drawn]) -> dict[tuple[str, str | None], list[Drawn]]:
    """Return groups by task and worker."""
    found = defaultdict[tuple[str, str | None], list[Drawn]](list)
    for one in groups:
        found[one.task_name, one.worker].append(one)
    return dict(found)


def comparisons_of(groups: Table) -> int:
    """Return the number of compared parts of a step: its workers and its tasks."""
    return len({worker for _, worker in groups}) + len({task for task, _ in groups})


def by_worker(steps: Sequence[Table], before: Sequence[Table] = (), *, comparisons: int | None = None) -> list[Part]:
    """Return the groups of steps by worker, the worst first, each compared with its task's groups of others.

    Those are of the same step, or of the steps `before` where nobody else made any. `comparisons` is the number of
    parts compared in a whole run; None: those of these steps.
    """
    pairs = defaultdict[str | None, list[_Pair]](list)
    for table in steps:
        for (task, worker), own in table.items():
            others = _rewards([table], task, worker) or _rewards(before, task, worker) or _rewards(before, task)
            pairs[worker].append(_Pair(own, _rewards([{(task, worker): own}], task), others))
    return _parts(pairs, sum(map(comparisons_of, steps)), comparisons)


def all_along(steps: Sequence[Table]) -> list[tuple[str | None, Part]]:
    """Return the workers that are lower than the others in several steps: in all tasks together (None), or in one.

    They are so without the worst of the steps, too.
    """
    tasks = sorted({task for table in steps for task, _ in table})
    many = (len(tasks) + 1) * len({worker for table in steps for _, worker in table})
    found: dict[str | None, tuple[str | None, Part]] = {}
    for task in (None, *tasks):
        of_task = [{key: one for key, one in table.items() if task in (None, key[0])} for table in steps]
        for part in by_worker(of_task, comparisons=many):
            if not part.stands_out or part.name in found:
                continue
            rest = _without_worst(of_task, part.name)
            if any(one.stands_out and one.name == part.name for one in by_worker(rest, comparisons=many)):
                found[part.name] = task, part
    return [*found.values()]


def _without_worst(steps: Sequence[Table], worker: str | None) -> list[Table]:
    """Return the steps without the one in which a worker is lowest, beside the others."""

    def below(table: Table) -> float:
        return next((part.below or 0.0 for part in by_worker([table]) if part.name == worker), 0.0)

    return sorted(steps, key=below)[:-1]


def by_task(groups: Table, before: Sequence[Table], *, comparisons: int | None = None) -> list[Part]:
    """Return a step's groups by task, compared with those of the steps `before`, the worst first."""
    pairs: dict[str | None, list[_Pair]] = {}
    for task in sorted({task for task, _ in groups}):
        own = [one for (name, _), several in groups.items() if name == task for one in several]
        means = [_mean(rewards) for table in before if (rewards := _rewards([table], task))]
        pairs[task] = [_Pair(own, _rewards([groups], task), _rewards(before, task), means)]
    return _parts(pairs, comparisons_of(groups), comparisons)


def without(workers: Iterable[str | None], table: Table) -> Table:
    """Return a table without the groups of these workers."""
    left_out = {*workers}
    return {key: groups for key, groups in table.items() if key[1] not in left_out}


@dataclass(frozen=True, slots=True)
class _Pair:
    """Groups, their rewards, those compared with, and for a task the mean rewards of the steps before."""

    groups: Sequence[Drawn]
    own: Sequence[float]
    others: Sequence[float]
    means: Sequence[float] = ()


def _square(number: float) -> float:
    return number * number


_NOBODY = object()


def _rewards(tables: Iterable[Table], task: str, apart_from: object = _NOBODY) -> list[float]:
    several = [groups for table in tables for key, groups in table.items() if key[0] == task and key[1] != apart_from]
    return [r for groups in several for one in groups if (r := one.reward) is not None and math.isfinite(r)]


def _parts(pairs: Mapping[str | None, Sequence[_Pair]], of_step: int, of_run: int | None) -> list[Part]:
    chance = _CHANCE / max(1, of_step) if of_run is None else _CHANCE_OF_RUN / max(1, of_run)
    bound = -NormalDist().inv_cdf(chance)  # Bonferroni
    parts = []
    for name, several in pairs.items():
        groups = [one for pair in several for one in pair.groups]
        compared = [pair for pair in several if pair.own and pair.others]
        count = sum(len(pair.own) for pair in compared)
        others = sum(len(pair.own) * _mean(pair.others) for pair in compared) / count if count else None
        below = None if others is None else others - sum(sum(pair.own) for pair in compared) / count
        errors = 0.0 if below is None else _errors(below, compared)
        reward, stale = mean(one.reward for one in groups), mean(one.staleness for one in groups)
        parts.append(Part(name, len(groups), reward, stale, others, below, errors, errors >= bound))
    return sorted(parts, key=lambda part: (-part.errors, -(part.below or 0.0), part.name or ""))


def _errors(below: float, compared: Sequence[_Pair]) -> float:
    """Return a difference of means in standard errors, which are estimated from the spread within samples.

    A difference from few steps that vary more than their groups explain is compared with how these differ. Student's
    distribution is normalised as in Wallace, "Bounds on normal approximations to Student's and the chi-square
    distributions" (1959).
    """
    samples = [sample for pair in compared for sample in (pair.own, pair.others)]
    known = sum(map(len, samples)) - len(samples)
    count, fewest = sum(len(pair.own) for pair in compared), sum(len(pair.others) for pair in compared)
    if known < _FEWEST or min(count, fewest) < _FEWEST:
        return 0.0
    spread = math.sqrt(
        sum(_square(one - middle) for sample in samples for middle in [_mean(sample)] for one in sample) / known
    )
    spread = max(spread, _LEAST_SPREAD * max(abs(one) for sample in samples for one in sample))
    error = spread * math.sqrt(sum((1 / len(p.own) + 1 / len(p.others)) * (len(p.own) / count) ** 2 for p in compared))
    means = compared[0].means
    if len(means) > _FEWEST:
        between = sum(_square(one - other) for one, other in pairwise(means)) / (2 * len(means) - 2)
        known = len(means) - 1 if between > _MORE * error**2 else known
        error = max(error, math.sqrt(between * (1 + 1 / len(means))))
    if not error or not math.isfinite(error) or not math.isfinite(below):
        return 0.0
    normal = math.sqrt(known * math.log1p((below / error) ** 2 / known)) * (8 * known + 1) / (8 * known + 3)
    return math.copysign(normal, below)


def verdict(
    workers: Sequence[Part],
    tasks: Sequence[Part],
    reward: float | None,
    before: float | None,
    others: Sequence[Part] = (),
) -> str:
    """Return a sentence about the outliers of a step: workers, else tasks, else none.

    `reward` and `before` are the mean rewards of the step and of the steps before it. `others` are the tasks without
    the groups of outlying workers.
    """
    total = sum(part.groups for part in tasks)
    if worse := [part for part in workers if part.stands_out]:
        said = [
            f"{part.name or 'a worker without a name'} made {part.groups} of the {total} groups, of mean reward "
            f"{part.reward:.3f}, where those of others have {part.others:.3f}"
            for part in worse[:_NAMED]
        ]
        said += [f"and {len(worse) - _NAMED} more workers"] if len(worse) > _NAMED else []
        fell = fallen(others)
        return "; ".join([*said, *([f"the groups of others are lower than before, too: {fell}"] if fell else [])])
    if fell := fallen(tasks):
        return f"no worker stands out, but {fell}"
    if reward is None:
        return "none of the groups has a reward"
    if before is None:
        return f"no worker stands out; the mean reward is {reward:.3f}"
    return f"no worker and no task stands out; the mean reward is {reward:.3f}, in the steps before it was {before:.3f}"


def fallen(tasks: Sequence[Part]) -> str:
    """Return the tasks whose rewards are lower than before by more than chance explains, or an empty text."""
    fell = [part for part in tasks if part.stands_out][:_NAMED]
    return ", ".join(f"task {one.name} (mean reward {one.reward:.3f}, before {one.others:.3f})" for one in fell)
