"""Which worker's, or task's, groups are worse than they should be."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from replaybuf.rules import comparison
from replaybuf.rules.comparison import Part, mean, tabulate, verdict, without


@dataclass
class One:
    task_name: str
    worker: str | None
    reward: float | None
    staleness: int | None = 0


def some(task_name: str, worker: str | None, *rewards: float | None) -> list[One]:
    return [One(task_name, worker, reward) for reward in rewards]


def by_worker(groups: list[One]) -> list[Part]:
    return comparison.by_worker([tabulate(groups)])


def by_task(groups: list[One], before: list[One]) -> list[Part]:
    return comparison.by_task(tabulate(groups), [tabulate(before)])


GOOD = some("math", "a", 1, 0.5, 1, 0.5) + some("math", "b", 1, 1, 0.5, 0.5)


def test_a_worker_that_makes_a_hard_task_is_compared_with_others_of_that_task() -> None:
    groups = GOOD + some("code", "a", 0, 0.25) + some("code", "c", 0.25, 0, 0.25, 0)
    [of_c] = [part for part in by_worker(groups) if part.name == "c"]
    assert of_c.others == pytest.approx(0.125)
    assert not of_c.stands_out


def test_one_unlucky_group_comes_behind_many_bad_ones() -> None:
    groups = GOOD * 2 + some("math", "unlucky", 0) + some("math", "bad", 0, 0, 0.25, 0.25, 0.25, 0)
    first, second, *_ = by_worker(groups)
    assert (first.name, second.name, second.stands_out) == ("bad", "unlucky", False)


def test_two_groups_without_spread_say_nothing_about_their_worker() -> None:
    parts = by_worker(some("math", "a", 0.5, 0.5) + some("math", "b", *[1.0] * 6))
    assert not any(part.stands_out for part in parts)


def test_a_worker_that_is_better_than_the_others_does_not_stand_out() -> None:
    parts = by_worker(some("math", "a", *[1.0] * 8) + some("math", "b", *[0.1] * 8) + some("math", "c", *[0.9] * 8))
    assert [part.name for part in parts if part.stands_out] == ["b"]
    assert parts[-1].name == "a"


def a_run(seed: int, *, steps: int = 48, bad: str = "", drift: float = 0.02) -> list[list[One]]:
    """Steps of two tasks and four workers whose policy gets better, and wavers; one worker may be bad at code."""
    rng = random.Random(seed)
    able, by_step = {"math": rng.uniform(0.1, 0.5), "code": rng.uniform(0.1, 0.5)}, []
    for _ in range(steps):
        able = {task: min(0.95, max(0.02, ability + rng.gauss(0.008, drift))) for task, ability in able.items()}
        groups = []
        for number in range(24):
            task, worker = ("math", "code")[number % 3 == 0], "abcd"[rng.randrange(4)]
            chance = min(1.0, max(0.0, able[task] + rng.gauss(0, 0.2))) * (
                0.3 if worker == bad and task == "code" else 1
            )
            groups.append(One(task, worker, sum(rng.random() < chance for _ in range(4)) / 4))
        by_step.append(groups)
    return by_step


def marks(run: list[list[One]]) -> tuple[list[str | None], list[int]]:
    """The workers that are below the others all along, and the steps below those before, as pages mark them."""
    tables = [tabulate(groups) for groups in run]
    bad_workers = [part.name for _, part in comparison.worse_workers(comparison.over_steps(tables))]
    without_bad = [without(bad_workers, table) for table in tables]
    fell = []
    for number, table in enumerate(without_bad):
        before, everybody = (past[max(0, number - 10) : number] for past in (without_bad, tables))
        parts = comparison.by_worker([table])
        parts += comparison.by_task(table, before)
        outliers = [part.name for part in comparison.by_worker([tables[number]]) if part.stands_out]
        parts.append(comparison.in_all_tasks(without(outliers, tables[number]), everybody))
        fell += [number] if any(part.stands_out for part in parts) else []
    return bad_workers, fell


@pytest.mark.parametrize("drift", [0.0, 0.02])
@pytest.mark.parametrize("runs", [10, pytest.param(100, marks=pytest.mark.long)])
def test_healthy_runs_have_no_mark(drift: float, runs: int) -> None:
    assert [seed for seed in range(runs) if marks(a_run(seed, drift=drift)) != ([], [])] == []


def test_a_worker_that_is_bad_at_one_task_is_marked_and_its_steps_are_not() -> None:
    """It makes two groups of that task a step."""
    assert [marks(a_run(seed, bad="c")) for seed in range(5)] == [(["c"], [])] * 5


def test_steps_of_one_group_of_a_task_are_compared_together() -> None:
    """A worker whose rewards are always 0 in one task of two: no step has another group to compare with."""
    chance, steps = random.Random(3), list[list[One]]()
    for _ in range(100):
        code, math = chance.choice("abcd"), chance.choice("abcd")
        right = 0.0 if code == "c" else chance.randrange(5) / 4
        steps.append(some("code", code, right) + some("math", math, chance.randrange(5) / 4))
    worse = comparison.worse_workers(comparison.over_steps([tabulate(groups) for groups in steps]))
    assert [(task, part.name, part.reward) for task, part in worse] == [("code", "c", 0.0)]


def test_a_bad_worker_and_a_small_dip_stand_out_of_many_comparisons() -> None:
    rng = random.Random(6)

    def groups(mean: float) -> list[One]:
        return [One("math", name, mean + rng.uniform(-0.05, 0.05)) for name in "abcdef" * 8]

    before = [tabulate(groups(0.7)) for _ in range(10)]
    [dip] = comparison.by_task(tabulate(groups(0.64)), before)
    assert dip.stands_out
    bad_groups = some("math", "bad", 0, 0.25, 0, 0)
    worst, *_ = comparison.by_worker([tabulate(groups(0.7) + bad_groups)])
    assert (worst.name, worst.stands_out) == ("bad", True)


def test_a_dip_of_all_tasks_stands_out_that_is_too_small_in_each() -> None:
    """Beside a worker that is bad at one task all along; without the dip nothing does, in as many steps."""
    rng = random.Random(4)

    def step(dip: float) -> comparison.Table:
        groups = []
        for task, worker in [(task, worker) for task in ("code", "math") for worker in "abcd"] * 16:
            chance = 0.65 - dip - (0.3 if (task, worker) == ("code", "c") else 0)
            groups.append(One(task, worker, sum(rng.random() < chance for _ in range(8)) / 8))
        return tabulate(groups)

    before = [step(0) for _ in range(10)]
    fallen = step(0.08)
    assert not any(part.stands_out for part in comparison.by_task(fallen, before))
    together = comparison.in_all_tasks(fallen, before)
    assert together.stands_out
    assert "all tasks together (mean reward 0.5" in verdict([], comparison.by_task(fallen, before), (), together)
    assert not any(comparison.in_all_tasks(step(0), before).stands_out for _ in range(100))
    assert not comparison.in_all_tasks({}, before).stands_out


def test_a_difference_that_is_tiny_beside_the_rewards_is_none() -> None:
    part, _ = by_worker(some("math", "a", *[0.999] * 8) + some("math", "b", *[1.0] * 8))
    assert (part.name, part.stands_out) == ("a", False)


@pytest.mark.parametrize("reward", [0.0, 1e308, -1e308])
def test_odd_rewards_are_no_trouble(reward: float) -> None:
    groups = some("math", "a", reward, reward) + some("math", "b", reward, reward, 0)
    assert len(by_worker(groups)) == 2
    assert verdict(by_worker(groups), by_task(groups, groups))


def test_groups_without_a_reward_are_counted_but_not_compared() -> None:
    [part] = by_worker(some("math", None, None, float("nan")))
    assert (part.name, part.groups, part.reward, part.below, part.stands_out) == (None, 2, None, None, False)
    assert mean([]) is None


def test_a_task_is_compared_with_the_steps_before() -> None:
    before = GOOD + some("code", "b", *[1, 1, 0.5, 1] * 2)
    worst, other = by_task(some("code", "a", *[0, 0, 0, 0.25] * 2) + GOOD, before)
    assert (worst.name, worst.stands_out, other.stands_out) == ("code", True, False)
    assert worst.others == 0.875


@pytest.mark.parametrize(
    ("groups", "before", "said"),
    [
        (GOOD * 3 + some("math", "bad", *[0] * 6), GOOD, "bad made 6 of the 30 groups, of mean reward 0.000"),
        (some("math", "a", *[0, 0.25] * 3), GOOD * 3, "no worker stands out, but task math"),
        (GOOD, GOOD, "no worker and no task stands out"),
    ],
)
def test_a_sentence_says_what_stands_out(groups: list[One], before: list[One], said: str) -> None:
    assert said in verdict(by_worker(groups), by_task(groups, before))
