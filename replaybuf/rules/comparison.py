"""Finds workers whose rewards are lower than others', and tasks whose are lower than in the steps before.

There are two marks. A worker's groups are compared with those that others made of the same task, in one step or over
the last steps; those of a task, and of all tasks together, with those of the steps before. What is lower stands out if
it is so by more standard errors than chance makes of all the comparisons of a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import Any, NamedTuple, Protocol

#: Standard errors beyond which a part of a step stands out, and a worker over the last steps: by chance one of 300,000
#: comparisons does, and one of 30,000, since there are fewer of these.
_LEVEL_OF_STEP, _LEVEL_OVER_STEPS = 4.5, 4.0
#: Small steps are compared together, until a block of them has so many groups of a task.
_BLOCK_SIZE = 24
#: Fewer groups than this, on either side, are no evidence; nor are fewer rewards beyond one for each mean.
_FEWEST_SAMPLES = 3
#: The least spread of rewards, relative to their root mean square: few groups may be equal.
_LEAST_SPREAD = 0.05
_MOST_NAMED = 3


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

    `reward` and `staleness` are means (None where no group has one). `others` is the mean reward of what they are
    compared with, `below` is `others - reward`; both are None where there is nothing to compare with. `errors` is
    `below` in standard errors. `stands_out`: it is lower than chance explains.
    """

    name: str | None
    groups: int
    reward: float | None
    staleness: float | None
    others: float | None
    below: float | None
    errors: float
    stands_out: bool


class _Sums(NamedTuple):
    """The number of usable rewards, their sum, and that of their squares: infinite rather than an error."""

    number: int
    total: float
    squares: float


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are finite numbers, or None when there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def tabulate(groups: Iterable[Drawn]) -> dict[tuple[str, str | None], list[Drawn]]:
    """Return groups by task and worker."""
    table = defaultdict[tuple[str, str | None], list[Drawn]](list)
    for group in groups:
        table[group.task_name, group.worker].append(group)
    return dict(table)


def without(workers: Iterable[str | None], table: Table) -> Table:
    """Return a table without the groups of these workers."""
    left_out = {*workers}
    return {key: groups for key, groups in table.items() if key[1] not in left_out}


def by_worker(steps: Sequence[Table], level: float = _LEVEL_OF_STEP) -> list[Part]:
    """Return the groups of steps by worker, the worst first, each compared with its task's groups of others."""
    pairs = defaultdict[str | None, list[_Pair]](list)
    for table in steps:
        totals = {task: _sums(_groups_of_task(table, task)) for task in {task for task, _ in table}}
        for (task, worker), groups in table.items():
            pairs[worker].append((groups, _Sums(*map(sub, totals[task], _sums(groups)))))
    return _compare(pairs, level)


def by_task(groups: Table, before: Sequence[Table]) -> list[Part]:
    """Return a step's groups by task, the worst first, each compared with those of the steps `before`."""
    earlier = {task: [group for table in before for group in _groups_of_task(table, task)] for task, _ in groups}
    pairs = {task: [(_groups_of_task(groups, task), _sums(past))] for task, past in earlier.items()}
    return _compare(pairs, _LEVEL_OF_STEP)


def in_all_tasks(groups: Table, before: Sequence[Table]) -> Part:
    """Return all groups of a step, those of each task and worker compared with the same of the steps `before`.

    So a dip of all tasks is seen that is too small in each, whatever the tasks and the workers differ by.
    """
    pairs = [(own, _sums(group for table in before for group in table.get(key, ()))) for key, own in groups.items()]
    [part] = _compare({None: pairs}, _LEVEL_OF_STEP)
    return part


def over_steps(steps: Sequence[Table]) -> dict[str | None, list[Part]]:
    """Return the workers compared over consecutive steps, the worst first: in each task, and in all (None).

    They are compared block by block, so that a change of the policy isn't taken for a worker's. A worker stands out if
    it does so without the worst of its steps, too.
    """
    compared, tasks = {}, sorted({task for table in steps for task, _ in table})
    for task in (*tasks, None):
        of_task = [{key: groups for key, groups in table.items() if task in (None, key[0])} for table in steps]
        size = _BLOCK_SIZE * (len(tasks) if task is None else 1)
        compared[task] = [
            replace(part, stands_out=part.stands_out and _stands_out_again(part, of_task, size))
            for part in by_worker(_blocks(of_task, size), _LEVEL_OVER_STEPS)
        ]
    return compared


def _blocks(steps: Sequence[Table], size: int) -> list[Table]:
    """Return consecutive steps put together, until each block has so many groups."""
    blocks, groups = list[Table](), list[Drawn]()
    for number, table in enumerate(steps, start=1):
        groups += [group for cell in table.values() for group in cell]
        if groups and (len(groups) >= size or number == len(steps)):
            blocks.append(tabulate(groups))
            groups = []
    return blocks


def _stands_out_again(part: Part, steps: Sequence[Table], size: int) -> bool:
    def lacks(table: Table) -> float:
        own = _sums(group for (_, worker), groups in table.items() if worker == part.name for group in groups)
        return (part.others or 0.0) * own.number - own.total

    worst = max(range(len(steps)), key=lambda place: lacks(steps[place]))
    parts = by_worker(_blocks([*steps[:worst], *steps[worst + 1 :]], size), _LEVEL_OVER_STEPS)
    return any(other.stands_out for other in parts if other.name == part.name)


def worse_workers(compared: Mapping[str | None, Sequence[Part]]) -> list[tuple[str | None, Part]]:
    """Return the workers that stand out over steps, each once: in the one task of several, or in all (None)."""
    by_name = defaultdict[str | None, list[tuple[str | None, Part]]](list)
    for task, parts in compared.items():  # all comes last
        for part in parts:
            if part.stands_out:
                by_name[part.name].append((task, part))
    several = len(compared) > 2  # more than one task, and all
    return [marks[0 if len(marks) == 2 and several else -1] for marks in by_name.values()]


#: Groups, and the sums of those that they are compared with.
_Pair = tuple[Sequence[Drawn], _Sums]


def _compare(pairs_of: Mapping[Any, Sequence[_Pair]], level: float) -> list[Part]:
    parts = []
    for name, pairs in pairs_of.items():
        groups = [group for own, _ in pairs for group in own]
        reward, stale = mean(group.reward for group in groups), mean(group.staleness for group in groups)
        samples = [(sums, rest) for own, rest in pairs if (sums := _sums(own)).number and rest.number]
        others, below, errors = _measure_distance(samples) if samples else (None, None, 0.0)
        parts.append(Part(name, len(groups), reward, stale, others, below, errors, errors >= level))
    return sorted(parts, key=lambda part: (-part.errors, -(part.below or 0.0), part.name or ""))


def _measure_distance(pairs: Sequence[tuple[_Sums, _Sums]]) -> tuple[float, float, float]:
    """Return the mean of others, how far rewards are below it, and that in standard errors by the spread in samples.

    Student's t is normalised as in Wallace, "Bounds on normal approximations to Student's and the chi-square
    distributions" (1959).
    """
    count, fewest = sum(own.number for own, _ in pairs), sum(rest.number for _, rest in pairs)
    others = sum(own.number * rest.total / rest.number for own, rest in pairs) / count
    below = others - sum(own.total for own, _ in pairs) / count
    samples = [sample for pair in pairs for sample in pair]
    dof = sum(sample.number for sample in samples) - len(samples)
    if min(dof, count, fewest) < _FEWEST_SAMPLES:
        return others, below, 0.0
    squares = sum(max(0.0, sample.squares - _square(sample.total) / sample.number) for sample in samples)
    typical = math.sqrt(sum(sample.squares for sample in samples) / (dof + len(samples)))
    spread = max(math.sqrt(squares / dof), _LEAST_SPREAD * typical)
    shares = ((1 / own.number + 1 / rest.number) * _square(own.number / count) for own, rest in pairs)
    error = spread * math.sqrt(sum(shares))
    if not error or not math.isfinite(error) or not math.isfinite(below):
        return others, below, 0.0
    normal = math.sqrt(dof * math.log1p(_square(below / error) / dof)) * (8 * dof + 1) / (8 * dof + 3)
    return others, below, math.copysign(normal, below)


def _sums(groups: Iterable[Drawn]) -> _Sums:
    rewards = [group.reward for group in groups if group.reward is not None and math.isfinite(group.reward)]
    return _Sums(len(rewards), sum(rewards), sum(map(_square, rewards)))


def _groups_of_task(table: Table, task: str) -> list[Drawn]:
    return [group for (name, _), groups in table.items() if name == task for group in groups]


def _square(number: float) -> float:
    return number * number


def verdict(
    workers: Sequence[Part],
    tasks: Sequence[Part],
    others: Sequence[Part] = (),
    together: Part | None = None,
    *,
    besides: bool = False,
) -> str:
    """Return a sentence about what stands out in a step: workers, else tasks, else nothing.

    `others` are the tasks without the groups of workers that stand out, and `together` is all of these
    (`in_all_tasks`). `besides`: it follows a sentence about workers that stand out over the last steps.
    """
    if worse := [part for part in workers if part.stands_out]:
        total = sum(part.groups for part in tasks)
        sentences = [
            f"{part.name or 'a worker without a name'} made {part.groups} of the {total} groups, of mean reward "
            f"{part.reward:.3f}, where those of others have {part.others:.3f}"
            for part in worse[:_MOST_NAMED]
        ]
        sentences += [f"and {len(worse) - _MOST_NAMED} more workers"] if len(worse) > _MOST_NAMED else []
        fell = _fallen_tasks(others, together)
        return "; ".join([*sentences, *([f"the groups of others are lower than before, too: {fell}"] if fell else [])])
    no_worker = "no other worker" if besides else "no worker"
    fell = _fallen_tasks(tasks, together)
    return f"{no_worker} stands out, but {fell}" if fell else f"{no_worker} and no task stands out"


def _fallen_tasks(tasks: Sequence[Part], together: Part | None) -> str:
    """Return the tasks whose rewards are lower than before by more than chance explains, or an empty text."""
    fell = [part for part in tasks if part.stands_out][:_MOST_NAMED]
    if not fell and together is not None and together.stands_out:
        return f"all tasks together (mean reward {together.reward:.3f}, before {together.others:.3f})"
    return ", ".join(f"task {part.name} (mean reward {part.reward:.3f}, before {part.others:.3f})" for part in fell)
