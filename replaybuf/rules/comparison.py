"""Whose groups have worse rewards than they should: parts of a train step compared with the rest of it.

A step's mean reward falls when a worker makes bad groups, when a task's groups are bad whoever made them, when other
tasks are drawn, or when the policy got worse. So a group is compared with groups of its own task: a worker's with those
that others made for the same step, a task's with those of the steps before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

#: The probability that chance alone makes any part of what is compared stand out.
_CHANCE = 0.01
#: Fewer groups than this, on either side, say nothing about their worker. Nor do fewer rewards, beyond one a mean,
#: about how far they spread.
_FEWEST = 3
#: Of the largest reward: groups spread at least so far, also where the few that are compared are equal.
_LEAST_SPREAD = 0.05
_NAMED = 3


class Drawn(Protocol):
    """What is compared: a group as a draw had it."""

    @property
    def task_name(self) -> str: ...

    @property
    def worker(self) -> str | None: ...

    @property
    def reward(self) -> float | None: ...

    @property
    def staleness(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """The groups of one worker or task, and those that they are compared with.

    `reward` and `staleness` are means (None where no group has one). `others` is the mean reward of the groups compared
    with, as if there were as many of each task; `below` is how far `reward` is below it, negative if it is above, and
    None where there is nothing to compare with. `errors` is `below` in standard errors, made smaller where few groups
    tell how large these are, and `bound` is how many of them chance doesn't explain.
    """

    name: str | None
    groups: int
    reward: float | None
    staleness: float | None
    others: float | None
    below: float | None
    errors: float
    bound: float

    @property
    def stands_out(self) -> bool:
        """Whether its rewards are lower than chance explains."""
        return self.errors >= self.bound


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are finite numbers, or None when there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of groups that were drawn: their number, how many of them have a staleness and its sum, and their rewards.

    Of the rewards they are the number, the mean, the sum of squared distances from it, and the largest without its
    sign. Two are joined as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
    """

    groups: int = 0
    with_staleness: int = 0
    staleness: float = 0.0
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    @staticmethod
    def of(groups: Sequence[Drawn]) -> Rewards:
        """Return those of groups; rewards that are missing or no finite numbers are left out."""
        rewards = [one.reward for one in groups if one.reward is not None and math.isfinite(one.reward)]
        stale = [one.staleness for one in groups if one.staleness is not None]
        middle = sum(rewards) / len(rewards) if rewards else 0.0
        return Rewards(
            len(groups),
            len(stale),
            sum(stale),
            len(rewards),
            middle,
            sum((one - middle) * (one - middle) for one in rewards),
            max(map(abs, rewards), default=0.0),
        )

    def __add__(self, other: Rewards) -> Rewards:
        count, apart = self.count + other.count, other.mean - self.mean
        share = other.count / count if count else 0.0
        return Rewards(
            self.groups + other.groups,
            self.with_staleness + other.with_staleness,
            self.staleness + other.staleness,
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart * apart * share * self.count,
            max(self.largest, other.largest),
        )


#: The rewards of a step's groups, by task and by who made them.
Table = Mapping[tuple[str, str | None], Rewards]


def tabulate(groups: Iterable[Drawn]) -> dict[tuple[str, str | None], Rewards]:
    """Return the rewards of groups by task and by who made them."""
    found: dict[tuple[str, str | None], list[Drawn]] = {}
    for one in groups:
        found.setdefault((one.task_name, one.worker), []).append(one)
    return {key: Rewards.of(several) for key, several in found.items()}


def join(tables: Iterable[Table]) -> dict[tuple[str, str | None], Rewards]:
    """Return the table of all groups of several tables."""
    found: dict[tuple[str, str | None], Rewards] = {}
    for table in tables:
        for key, rewards in table.items():
            found[key] = found[key] + rewards if key in found else rewards
    return found


def comparisons_of(groups: Table) -> int:
    """Return how many parts of a step are compared: its workers and its tasks."""
    return len({worker for _, worker in groups}) + len({task for task, _ in groups})


def by_worker(groups: Table, before: Table, *, comparisons: int | None = None) -> list[Part]:
    """Return a step's groups by who made them, the worst first.

    A group is compared with those that others made of its task for the same step, or else for the steps `before`. The
    step is one of several whose parts are so many `comparisons` together, or else alone.
    """

    def others(worker: str | None, task_name: str) -> Rewards:
        for table in (groups, before):
            if (found := _of_task(table, task_name, apart_from=worker)).count:
                return found
        return _of_task(before, task_name)

    return _parts(groups, 1, others, comparisons)


def by_task(groups: Table, before: Table, *, comparisons: int | None = None) -> list[Part]:
    """Return a step's groups by task, compared with those of the steps `before`, the worst first."""
    return _parts(groups, 0, lambda _, task_name: _of_task(before, task_name), comparisons)


def of_others(workers: Sequence[Part], table: Table) -> Table:
    """Return the part of a table that is of workers who don't stand out."""
    worse = {part.name for part in workers if part.stands_out}
    return {key: rewards for key, rewards in table.items() if key[1] not in worse}


_NOBODY = object()


def _of_task(table: Table, task_name: str, *, apart_from: object = _NOBODY) -> Rewards:
    found = (one for (task, worker), one in table.items() if task == task_name and worker != apart_from)
    return sum(found, start=Rewards())


def _parts(
    groups: Table, part: int, others: Callable[[str | None, str], Rewards], comparisons: int | None
) -> list[Part]:
    """Return the parts of a table by task (0) or by worker (1)."""
    many = comparisons_of(groups) if comparisons is None else comparisons
    bound = -NormalDist().inv_cdf(_CHANCE / max(1, many))  # chance explains no more in any of them (Bonferroni)
    named: dict[str | None, dict[str, Rewards]] = {}
    for key, rewards in groups.items():
        of_tasks = named.setdefault(key[part], {})
        of_tasks[key[0]] = of_tasks.get(key[0], Rewards()) + rewards
    parts = [_part(name, own, {task: others(name, task) for task in own}, bound) for name, own in named.items()]
    return sorted(parts, key=lambda part: (-part.errors, -(part.below or 0.0), part.name or ""))


def _part(name: str | None, own: Mapping[str, Rewards], others: Mapping[str, Rewards], bound: float) -> Part:
    every = sum(own.values(), start=Rewards())
    reward = every.mean if every.count else None
    staleness = every.staleness / every.with_staleness if every.with_staleness else None
    compared = [(own[task], found) for task, found in others.items() if found.count and own[task].count]
    if not compared:
        return Part(name, every.groups, reward, staleness, None, None, 0.0, bound)
    count = sum(mine.count for mine, _ in compared)
    expected = sum(mine.count * found.mean for mine, found in compared) / count
    below = expected - sum(mine.count * mine.mean for mine, _ in compared) / count
    errors = _surprise(below, compared)
    return Part(name, every.groups, reward, staleness, expected, below, errors, bound)


def _surprise(below: float, compared: Sequence[tuple[Rewards, Rewards]]) -> float:
    """Return a difference in standard errors, as many as are as improbable if these were known exactly.

    They are estimated from few groups: the difference has Student's distribution, and becomes normal as in Wallace,
    "Bounds on normal approximations to Student's and the chi-square distributions" (1959).
    """
    error, known = _standard_error(compared)
    if not error or not math.isfinite(error) or not math.isfinite(below):
        return 0.0
    ratio = below / error
    normal = math.sqrt(known * math.log1p(ratio * ratio / known)) * (8 * known + 1) / (8 * known + 3)
    return math.copysign(normal, ratio)


def _standard_error(compared: Sequence[tuple[Rewards, Rewards]]) -> tuple[float, int]:
    """Return the standard error of the difference of the means, with the spread that groups have within a task.

    With it comes the number of rewards that say how far they spread; the error is infinite where these are too few.
    """
    every = [one for pair in compared for one in pair]
    known = sum(one.count for one in every) - len(every)
    fewest = min(sum(one.count for one in side) for side in zip(*compared, strict=True))
    if known < _FEWEST or fewest < _FEWEST:
        return math.inf, known
    spread = math.sqrt(sum(one.squares for one in every) / known)  # of rewards without measure it is infinite
    count = sum(mine.count for mine, _ in compared)
    fewer = 1 / count + sum((mine.count / count) ** 2 / found.count for mine, found in compared)
    return max(spread, _LEAST_SPREAD * max(one.largest for one in every)) * math.sqrt(fewer), known


def verdict(
    workers: Sequence[Part],
    tasks: Sequence[Part],
    reward: float | None,
    before: float | None,
    others: Sequence[Part] = (),
) -> str:
    """Return in a sentence what stands out of a step: workers, or else tasks, or else nothing.

    `reward` and `before` are the mean rewards of the step and of the steps before it. `others` are the tasks without
    the groups of workers that stand out.
    """
    total = sum(part.groups for part in tasks)
    if worse := [part for part in workers if part.stands_out]:
        said = [
            f"{part.name or 'a worker without a name'} made {part.groups} of the {total} groups, of mean reward "
            f"{part.reward:.3f}, where those of others have {part.others:.3f}"
            for part in worse[:_NAMED]
        ]
        if len(worse) > _NAMED:
            said.append(f"and {len(worse) - _NAMED} more workers")
        if fell := fallen(others):
            said.append(f"the groups of others are lower than before, too: {fell}")
        return "; ".join(said)
    if fell := fallen(tasks):
        return f"no worker stands out, but {fell}"
    if reward is None:
        return "none of the groups has a reward"
    if before is None:
        return f"no worker stands out; the mean reward is {reward:.3f}"
    return f"no worker and no task stands out; the mean reward is {reward:.3f}, in the steps before it was {before:.3f}"


def fallen(tasks: Sequence[Part]) -> str:
    """Return the tasks whose rewards are lower than before by more than chance explains, or an empty text."""
    said = [
        f"task {part.name} (mean reward {part.reward:.3f}, before {part.others:.3f})"
        for part in tasks
        if part.stands_out
    ]
    return ", ".join(said[:_NAMED])
