"""Whose groups have worse rewards than they should: parts of a train step compared with the rest of it.

A step's mean reward falls when a worker makes bad groups, when a task's groups are bad whoever made them, when other
tasks are drawn, or when the policy got worse. So a group is compared with groups of its own task: a worker's with those
that others made for the same step, a task's with those of the steps before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: So many standard errors below the others, and chance is no explanation.
_STANDS_OUT = 3.0
#: Fewer rewards than this, beyond one a mean, say nothing about how far they spread.
_FEWEST = 3
#: Of the largest reward: differences that are small beside it aren't worth a word.
_LEAST_SPREAD = 0.01
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
    None where there is nothing to compare with. `errors` is `below` in standard errors.
    """

    name: str | None
    groups: int
    reward: float | None
    staleness: float | None
    others: float | None
    below: float | None
    errors: float

    @property
    def stands_out(self) -> bool:
        """Whether its rewards are lower than chance explains."""
        return self.errors >= _STANDS_OUT


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are finite numbers, or None when there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def by_worker(groups: Sequence[Drawn], before: Sequence[Drawn]) -> list[Part]:
    """Return a step's groups by who made them, the worst first.

    A group is compared with those that others made of its task for the same step, or else for the steps `before`.
    """

    now, then = _of_tasks(groups), _of_tasks(before)

    def others(worker: str | None, task_name: str) -> list[float]:
        for several in (now.get(task_name, ()), then.get(task_name, ())):
            if found := [reward for name, reward in several if name != worker]:
                return found
        return [reward for _, reward in then.get(task_name, ())]

    return _parts(groups, lambda one: one.worker, others)


def by_task(groups: Sequence[Drawn], before: Sequence[Drawn]) -> list[Part]:
    """Return a step's groups by task, compared with those of the steps `before`, the worst first."""
    then = _of_tasks(before)
    return _parts(groups, lambda one: one.task_name, lambda _, task: [reward for _, reward in then.get(task, ())])


def _parts(
    groups: Sequence[Drawn], name_of: Callable[[Drawn], str | None], others: Callable[[str | None, str], list[float]]
) -> list[Part]:
    named: dict[str | None, list[Drawn]] = {}
    for one in groups:
        named.setdefault(name_of(one), []).append(one)
    parts = [_part(name, own, lambda task, name=name: others(name, task)) for name, own in named.items()]  # type: ignore[misc]
    return sorted(parts, key=lambda part: (-part.errors, -(part.below or 0.0), part.name or ""))


def _part(name: str | None, own: Sequence[Drawn], others: Callable[[str], list[float]]) -> Part:
    reward, staleness = mean(one.reward for one in own), mean(one.staleness for one in own)
    compared = {task: found for task in {one.task_name for one in own} if (found := others(task))}
    rewards = {task: _rewards(one for one in own if one.task_name == task) for task in compared}
    count = sum(map(len, rewards.values()))
    if not count:
        return Part(name, len(own), reward, staleness, None, None, 0.0)
    expected = sum(len(rewards[task]) * _mean(found) for task, found in compared.items()) / count
    below = expected - sum(map(sum, rewards.values())) / count
    error = _standard_error(rewards, compared)
    return Part(name, len(own), reward, staleness, expected, below, below / error if error else 0.0)


def _standard_error(own: Mapping[str, list[float]], others: Mapping[str, list[float]]) -> float:
    """Return the standard error of the difference of the means, with the spread that groups have within a task."""
    every = [values for task in own for values in (own[task], others[task]) if values]
    known = sum(map(len, every)) - len(every)
    if known < _FEWEST:
        return math.inf
    means = [_mean(values) for values in every]
    apart = (value - mean for values, mean in zip(every, means, strict=True) for value in values)
    squares = sum(one * one for one in apart)  # of rewards without measure it is infinite; ** would raise
    spread = math.sqrt(squares / known)
    count = sum(map(len, own.values()))
    fewer = 1 / count + sum((len(own[task]) / count) ** 2 / len(others[task]) for task in own)
    largest = max(abs(value) for values in every for value in values)
    return max(spread, _LEAST_SPREAD * largest) * math.sqrt(fewer)


def _of_tasks(groups: Iterable[Drawn]) -> dict[str, list[tuple[str | None, float]]]:
    """Return the rewards of each task's groups, with who made them."""
    found: dict[str, list[tuple[str | None, float]]] = {}
    for one in groups:
        found.setdefault(one.task_name, []).extend((one.worker, reward) for reward in _rewards([one]))
    return found


def _rewards(groups: Iterable[Drawn]) -> list[float]:
    return [one.reward for one in groups if one.reward is not None and math.isfinite(one.reward)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(workers: Sequence[Part], tasks: Sequence[Part], reward: float | None, before: float | None) -> str:
    """Return in a sentence what stands out of a step: workers, or else tasks, or else nothing.

    `reward` and `before` are the mean rewards of the step and of the steps before it.
    """
    total = sum(part.groups for part in tasks)
    if worse := [part for part in workers if part.stands_out]:
        said = [
            f"{part.name or 'a worker without a name'} made {part.groups} of the {total} groups, of mean reward "
            f"{part.reward:.3f}, where those of others have {part.others:.3f}"
            for part in worse[:_NAMED]
        ]
        return "; ".join(said) + (f"; and {len(worse) - _NAMED} more workers" if len(worse) > _NAMED else "")
    if worse := [part for part in tasks if part.stands_out]:
        said = [
            f"task {part.name} (mean reward {part.reward:.3f}, before {part.others:.3f})" for part in worse[:_NAMED]
        ]
        return f"no worker stands out, but {', '.join(said)}"
    if reward is None:
        return "none of the groups has a reward"
    if before is None:
        return f"no worker stands out; the mean reward is {reward:.3f}"
    return f"no worker and no task stands out; the mean reward is {reward:.3f}, in the steps before it was {before:.3f}"
