"""The policy and its training: advantages, the objective and its gradient, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest

from replaybuf.cli.demo.policy import (
    CHARACTERS,
    END,
    ENTROPY_BONUS,
    MAX_RESPONSE_TOKENS,
    PROMPTS,
    VOCABULARY_SIZE,
    Policy,
    Prompts,
    advantages_of,
    answer_of,
    decode,
    encode,
    is_over,
    objective,
    prompt_of,
    rows_of,
    verify,
)
from tests.demo.made import generated


def test_a_new_policy_is_uniform() -> None:
    log_probs = Policy.create().log_probs(rows_of("7+5=", [1, 2, END]))
    assert np.allclose(np.exp(log_probs), 1 / VOCABULARY_SIZE)


def test_each_beginning_of_an_answer_to_each_prompt_has_a_row_of_its_own() -> None:
    rows = [tuple(row) for prompt in PROMPTS for row in rows_of(prompt, [1, END])]
    assert len({own for _, own in rows}) == len(rows) == 3 * len(PROMPTS)
    assert len({shared for shared, _ in rows}) == 3
    assert max(map(max, rows)) < len(Policy.create().weights)


def test_advantages_have_mean_0_and_deviation_1() -> None:
    advantages = advantages_of(np.array([0.0, 0.1, 1.0, 1.0]))
    assert (advantages.mean(), advantages.std()) == pytest.approx((0, 1))


def test_equal_rewards_have_no_advantage() -> None:
    assert np.all(advantages_of(np.full(8, 0.1)) == 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "pull"), [(1.5, 1.0, 0), (0.5, -1.0, 0), (1.5, -1.0, -1.5), (0.5, 1.0, 0.5), (1.0, 1.0, 1.0)]
)
def test_a_token_is_pulled_until_its_ratio_has_gone_far_enough(ratio: float, advantage: float, pull: float) -> None:
    uniform = np.log(np.full((1, 4), 0.25))  # of the most entropy, whose bonus has no gradient
    one = np.array([1.0])
    _, gradient = objective(uniform, np.array([2]), np.log(0.25 / (ratio * one)), advantage * one, one)
    assert gradient[0] == pytest.approx(pull * np.array([-0.25, -0.25, 0.75, -0.25]))


def test_the_gradient_agrees_with_finite_differences() -> None:
    rng, n = np.random.default_rng(0), 40
    logits, direction = rng.normal(size=(2, n, VOCABULARY_SIZE))
    tokens, advantages = rng.integers(VOCABULARY_SIZE, size=n), rng.normal(size=n)

    def at(shift: float) -> tuple[float, np.ndarray]:
        moved = logits + shift * direction
        log_probs = moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))
        return objective(log_probs, tokens, behaviour, advantages, np.full(n, 1 / n))

    behaviour = np.full(n, -np.log(VOCABULARY_SIZE))
    assert ENTROPY_BONUS > 0
    assert (at(1e-6)[0] - at(-1e-6)[0]) / 2e-6 == pytest.approx(np.vdot(at(0)[1], direction), rel=1e-4)


async def learn(steps: int, lag: int) -> list[float]:
    """The reward of each step of a run in which every batch comes from the weights of `lag` steps ago."""
    policy, weights, rewards, prompts = Policy.create(), [], [], Prompts(0, 10_000)
    for step in range(steps):
        weights.append(policy.weights.copy())
        behaviour = Policy(weights[max(0, step - lag)], policy.squares)
        numbers = range(16 * step, 16 * step + 16)
        groups = [await generated(behaviour, prompt_of([prompts[n]]), n) for n in numbers]
        rewards.append(policy.train(groups))
    return rewards


async def test_the_reward_rises_on_stale_data() -> None:
    rewards = await learn(60, lag=2)
    assert np.mean(rewards[:6]) < 0.1
    assert np.mean(rewards[-6:]) > 0.25


async def test_a_run_repeats_exactly() -> None:
    assert await learn(4, lag=1) == await learn(4, lag=1)


# The arithmetic task: tokens, the stream of prompts, the verifier


def answer(text: str) -> list[int]:
    return [*encode(text), END]


def test_decode_undoes_encode() -> None:
    assert decode(answer(CHARACTERS)) == CHARACTERS


def test_the_prompts_are_distinct_and_their_answers_fit() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 72
    assert max(len(answer(str(answer_of(prompt)))) for prompt in PROMPTS) == MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(("text", "expected"), [("7+5=", 12), ("14-9=", 5)])
def test_the_answer_is_worked_out_from_the_text(text: str, expected: int) -> None:
    assert answer_of(text) == expected


def test_an_epoch_of_the_stream_has_every_prompt_once() -> None:
    stream = Prompts(3, 100)
    assert {prompt_of([stream[number]]) for number in range(len(PROMPTS))} == set(PROMPTS)
    with pytest.raises(IndexError):
        stream[100]


def test_the_stream_is_a_function_of_seed_and_number() -> None:
    first, longer, other = ([prompt_of([Prompts(*of)[n]]) for n in range(80)] for of in ((3, 80), (3, 100), (4, 80)))
    assert first == longer != other


@pytest.mark.parametrize(
    ("prompt", "reward"), [("12", 1.0), ("1", 0.1), ("0", 0.1), ("", 0.0), ("+", 0.0), ("-2", 0.0), ("01", 0.0)]
)
def test_the_reward_of_an_answer(prompt: str, reward: float) -> None:
    assert verify("7+5=", answer(prompt)) == reward


def test_an_answer_that_was_cut_off_is_over_and_has_no_reward() -> None:
    assert is_over(encode("123"))
    assert verify("7+5=", encode("123")) == 0.0
    assert not is_over(encode("12"))
    assert not is_over([])
