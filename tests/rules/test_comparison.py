"""Which worker's, or task's, groups are worse than they should be."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.rules import comparison
from replaybuf.rules.comparison import Part, join, mean, tabulate, verdict


@dataclass
class One:
    task_name: str
    worker: str | None
    reward: float | None
    staleness: int | None = 0


def some(task_name: str, worker: str | None, *rewards: float | None) -> list[One]:
    return [One(task_name, worker, reward) for reward in rewards]


def by_worker(groups: list[One], before: list[One]) -> list[Part]:
    return comparison.by_worker(tabulate(groups), tabulate(before))


def by_task(groups: list[One], before: list[One]) -> list[Part]:
    return comparison.by_task(tabulate(groups), tabulate(before))


GOOD = some("math", "a", 1, 0.5, 1, 0.5) + some("math", "b", 1, 1, 0.5, 0.5)


def test_a_worker_is_compared_with_the_others_of_the_step() -> None:
    worst, *_ = by_worker(GOOD + some("math", "bad", 0, 0, 0.25, 0), [])
    assert (worst.name, worst.groups, worst.stands_out) == ("bad", 4, True)
    assert (worst.reward, worst.others, worst.below) == pytest.approx((0.0625, 0.75, 0.6875))


def test_a_worker_that_makes_a_hard_task_is_compared_with_others_of_that_task() -> None:
    groups = GOOD + some("code", "a", 0, 0.25) + some("code", "c", 0.25, 0, 0.25, 0)
    [of_c] = [part for part in by_worker(groups, []) if part.name == "c"]
    assert of_c.others == pytest.approx(0.125)
    assert not of_c.stands_out


def test_one_unlucky_group_comes_behind_many_bad_ones() -> None:
    groups = GOOD * 2 + some("math", "unlucky", 0) + some("math", "bad", 0, 0, 0.25, 0.25, 0.25, 0)
    first, second, *_ = by_worker(groups, [])
    assert (first.name, second.name, second.stands_out) == ("bad", "unlucky", False)


def test_the_only_worker_of_a_task_is_compared_with_the_steps_before() -> None:
    [part] = by_worker(some("math", "a", 0, 0, 0, 0.25), GOOD)
    assert part.others == 0.75
    assert part.stands_out


def test_two_groups_are_no_evidence() -> None:
    assert not any(part.stands_out for part in by_worker(some("math", "a", 0) + some("math", "b", 1), []))


def test_two_groups_without_spread_say_nothing_about_their_worker() -> None:
    parts = by_worker(some("math", "a", 0.5, 0.5) + some("math", "b", *[1.0] * 6), [])
    assert not any(part.stands_out for part in parts)


def test_a_worker_that_is_better_than_the_others_does_not_stand_out() -> None:
    parts = by_worker(some("math", "a", *[1.0] * 8) + some("math", "b", *[0.1] * 8) + some("math", "c", *[0.9] * 8), [])
    assert [part.name for part in parts if part.stands_out] == ["b"]
    assert parts[-1].name == "a"


def test_of_many_comparisons_hardly_one_stands_out_by_chance() -> None:
    """60 steps of 6 workers that are alike, thirty times."""
    rng, found = random.Random(27), 0
    for _ in range(30):
        for _ in range(60):
            groups = [One("math", name, sum(rng.random() < 0.6 for _ in range(4)) / 4) for name in "abcdef" * 4]
            parts = comparison.by_worker(tabulate(groups), {}, comparisons=60 * 7)
            found += sum(part.stands_out for part in parts)
    assert found <= 2


def test_a_bad_worker_and_a_small_dip_stand_out_of_many_comparisons() -> None:
    rng = random.Random(6)

    def groups(mean: float) -> list[One]:
        return [One("math", name, mean + rng.uniform(-0.05, 0.05)) for name in "abcdef" * 8]

    before = [one for _ in range(10) for one in groups(0.7)]
    [dip] = comparison.by_task(tabulate(groups(0.64)), tabulate(before), comparisons=60 * 7)
    assert dip.stands_out
    bad = some("math", "bad", 0, 0.25, 0, 0)
    worst, *_ = comparison.by_worker(tabulate(groups(0.7) + bad), tabulate(before), comparisons=60 * 7)
    assert (worst.name, worst.stands_out) == ("bad", True)


def test_a_difference_that_is_tiny_beside_the_rewards_is_none() -> None:
    part, _ = by_worker(some("math", "a", *[0.999] * 8) + some("math", "b", *[1.0] * 8), [])
    assert (part.name, part.stands_out) == ("a", False)


@pytest.mark.parametrize("reward", [0.0, 1e308, -1e308])
def test_odd_rewards_are_no_trouble(reward: float) -> None:
    groups = some("math", "a", reward, reward) + some("math", "b", reward, reward, 0)
    assert len(by_worker(groups, groups)) == 2
    assert verdict(by_worker(groups, []), by_task(groups, groups), reward, reward)


def test_groups_without_a_reward_are_counted_but_not_compared() -> None:
    [part] = by_worker(some("math", None, None, float("nan")), GOOD)
    assert (part.name, part.groups, part.reward, part.below, part.stands_out) == (None, 2, None, None, False)
    assert mean([]) is None


def test_a_task_is_compared_with_the_steps_before() -> None:
    worst, other = by_task(some("code", "a", 0, 0, 0, 0.25) + GOOD, GOOD + some("code", "b", 1, 1, 0.5, 1))
    assert (worst.name, worst.stands_out, other.stands_out) == ("code", True, False)
    assert worst.others == 0.875


@pytest.mark.parametrize(
    ("groups", "before", "said"),
    [
        (GOOD + some("math", "bad", 0, 0, 0, 0), GOOD, "bad made 4 of the 12 groups, of mean reward 0.000"),
        (some("math", "a", 0, 0.25) + some("math", "b", 0.25, 0), GOOD, "no worker stands out, but task math"),
        (GOOD, GOOD, "no worker and no task stands out"),
        (GOOD, [], "no worker stands out; the mean reward is 0.750"),
        (some("math", "a", None), [], "none of the groups has a reward"),
    ],
)
def test_a_sentence_says_what_stands_out(groups: list[One], before: list[One], said: str) -> None:
    rewards = [mean(one.reward for one in several) for several in (groups, before)]
    assert said in verdict(by_worker(groups, before), by_task(groups, before), *rewards)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.floats(-10, 10)), min_size=2, max_size=40))
def test_tables_that_are_joined_are_the_table_of_all(drawn: list[tuple[str, str, float]]) -> None:
    groups = [One(task, worker, reward) for task, worker, reward in drawn]
    half = len(groups) // 2
    joined, whole = join([tabulate(groups[:half]), tabulate(groups[half:])]), tabulate(groups)
    assert joined.keys() == whole.keys()
    for key, one in whole.items():
        assert astuple(joined[key]) == pytest.approx(astuple(one), abs=1e-9)
