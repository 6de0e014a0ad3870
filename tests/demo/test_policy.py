"""The policy, its training and its engine: the gradient, that it learns from stale data, and pauses at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from replaybuf.cli.demo.policy import (
    END,
    PROMPTS,
    VOCABULARY_SIZE,
    Engine,
    Policy,
    Prompts,
    answer_of,
    encode,
    objective,
    prompt_of,
    rows_of,
    verify,
)
from replaybuf.cli.demo.worker import GROUP_SIZE
from replaybuf.values.rollouts.rollout import RolloutState, Status

LONG = 60.0


def new_group(prompt: str = "14-9=", number: int = 0) -> list[RolloutState]:
    """Rollouts to be generated, as a sampler gives them."""
    message = [{"role": "user", "content": prompt}]
    made = [RolloutState(message=message, prompt_ids=encode(prompt), group_id=number) for _ in range(GROUP_SIZE)]
    for rollout in made:
        rollout.response_ids = []
    return made


async def generated(policy: Policy, prompt: str = "14-9=", number: int = 0) -> list[RolloutState]:
    """A completed group."""
    engine = Engine(token_seconds=0)
    engine.load(policy, 0)
    return await engine.generate_group(new_group(prompt, number), partial=True)


def tokens_of(group: Sequence[RolloutState]) -> list[list[int]]:
    return [list(rollout.response_ids) for rollout in group]


def test_the_gradient_agrees_with_finite_differences() -> None:
    rng, n = np.random.default_rng(0), 40
    logits, direction = rng.normal(size=(2, n, VOCABULARY_SIZE))
    tokens, advantages = rng.integers(VOCABULARY_SIZE, size=n), rng.normal(size=n)

    def at(shift: float) -> tuple[float, np.ndarray]:
        moved = logits + shift * direction
        log_probs = moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))
        return objective(log_probs, tokens, behaviour, advantages, np.full(n, 1 / n))

    behaviour = np.full(n, -np.log(VOCABULARY_SIZE))
    assert (at(1e-6)[0] - at(-1e-6)[0]) / 2e-6 == pytest.approx(np.vdot(at(0)[1], direction), rel=1e-4)


async def learn(steps: int, lag: int) -> list[float]:
    """The reward of each step of a run in which every batch comes from the weights of `lag` steps ago."""
    policy, weights, rewards, prompts = Policy.create(), [], [], Prompts(10_000)
    for step in range(steps):
        weights.append(policy.weights.copy())
        behaviour = Policy(weights[max(0, step - lag)], policy.squares)
        numbers = range(16 * step, 16 * step + 16)
        groups = [await generated(behaviour, prompt_of([prompts[n]]), n) for n in numbers]
        rewards.append(policy.train(groups))
    return rewards


async def test_the_reward_rises_on_stale_data_and_a_run_repeats_exactly() -> None:
    rewards = await learn(60, lag=2)
    assert np.mean(rewards[:6]) < 0.1
    assert np.mean(rewards[-6:]) > 0.25
    assert await learn(4, lag=2) == rewards[:4]


def test_an_epoch_of_the_stream_has_every_prompt_once() -> None:
    stream = Prompts(100)
    assert {prompt_of([stream[number]]) for number in range(len(PROMPTS))} == set(PROMPTS)
    assert (answer_of("7+5="), answer_of("14-9=")) == (12, 5)


@pytest.mark.parametrize(
    ("text", "reward"), [("12", 1.0), ("1", 0.1), ("0", 0.1), ("", 0.0), ("+", 0.0), ("-2", 0.0), ("01", 0.0)]
)
def test_the_reward_of_an_answer(text: str, reward: float) -> None:
    assert verify("7+5=", [*encode(text), END]) == reward


async def test_an_engine_writes_what_it_sampled_and_from_which_distribution() -> None:
    policy = Policy.create()
    policy.weights[...] = np.random.default_rng(0).normal(size=policy.weights.shape)
    for rollout in await generated(policy):
        expected = policy.log_probs(rows_of("14-9=", rollout.response_ids)[:-1])
        places = np.arange(len(rollout.response_ids))
        assert np.allclose(rollout.logprobs, expected[places, rollout.response_ids], atol=1e-5)
        assert rollout.reward == verify("14-9=", rollout.response_ids)


async def test_a_paused_group_goes_on_where_it_was() -> None:
    engine, group = Engine(token_seconds=LONG), new_group()
    engine.load(Policy.create(), 0)
    running = asyncio.create_task(engine.generate_group(group, partial=True))
    await asyncio.sleep(0)
    await engine.pause()
    await asyncio.wait_for(running, LONG / 4)
    assert {rollout.status for rollout in group} == {Status.ABORTED}
    again = Engine(token_seconds=0)
    again.load(Policy.create(), 0)
    assert tokens_of(await again.generate_group(group, partial=True)) == tokens_of(await generated(Policy.create()))
