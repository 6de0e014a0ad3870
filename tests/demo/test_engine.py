"""The engine as an agent loop: what it says depends on the weights alone, and it can be interrupted at any moment."""

import asyncio
import time

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, Status
from replaybuf.cli.demo.policy import (
    END,
    TOKEN_SECONDS,
    Engine,
    Policy,
    decode,
    is_over,
    rows_of,
    token_seconds,
    verify,
)
from replaybuf.cli.demo.worker import TASK, sampler_of
from tests.demo.made import generated, new_group, tokens_of

PROMPT = "14-9="
LONG = 60.0


def opinionated(seed):
    """A policy with opinions, so that mistakes show."""
    policy = Policy.create()
    policy.weights[...] = np.random.default_rng(seed).normal(size=policy.weights.shape)
    return policy


@pytest.fixture
def new_engine():
    """Engines with weights of a seed."""

    def make(*, weights=0, step=0, seconds=0.0, seed=0):
        engine = Engine(seed, token_seconds=seconds)
        engine.load(opinionated(weights), step)
        return engine

    return make


async def generate(engine, number=0, *, group=None):
    return await engine.generate_group(new_group(number=number) if group is None else group, partial=True)


async def interrupted_after(engine, tokens, group=None):
    """A group that was paused when it had so many tokens."""
    said = 0

    async def goes_on(seconds):
        nonlocal said
        said += 1
        return said <= tokens

    engine._goes_on = goes_on
    group = await generate(engine, group=group)
    del engine._goes_on
    return group


async def test_it_doesnt_matter_who_generates(new_engine):
    first, second = new_engine(), new_engine()
    await generate(first, 1)  # it has done other things before
    groups = await asyncio.gather(generate(first, 7), generate(first, 8), generate(second, 7))
    assert tokens_of(groups[0]) == tokens_of(groups[2]) != tokens_of(groups[1])
    for one, other in zip(groups[0], groups[2], strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("tokens", [0, 1, 2])
async def test_an_interrupted_group_that_is_continued_by_the_same_weights_is_the_same(new_engine, tokens):
    group = await interrupted_after(new_engine(), tokens)
    assert Status.ABORTED in {rollout.status for rollout in group}
    assert max(len(rollout.response_ids) for rollout in group) == tokens
    assert tokens_of(await generate(new_engine(), group=group)) == tokens_of(await generate(new_engine()))
    assert {rollout.status for rollout in group} == {Status.COMPLETED}


async def test_what_was_said_stays_when_other_weights_go_on(new_engine):
    group = await interrupted_after(new_engine(), 1)
    before = tokens_of(group)
    after = tokens_of(await generate(new_engine(weights=1, step=3), group=group))
    assert [said[:1] for said in after] == before
    assert after != tokens_of(await generate(new_engine()))


async def test_log_probs_are_those_of_the_distribution_sampled_from():
    policy = opinionated(0)
    for rollout in await generated(policy):
        expected = policy.log_probs(rows_of(PROMPT, rollout.response_ids)[:-1])
        places = np.arange(len(rollout.response_ids))
        assert np.allclose(rollout.logprobs, expected[places, rollout.response_ids], atol=1e-5)


async def test_tokens_are_sampled_as_often_as_their_probability():
    policy, n = opinionated(0), 4000
    firsts = [ids[0] for number in range(n // 8) for ids in tokens_of(await generated(policy, number=number))]
    expected = np.exp(policy.log_probs(rows_of(PROMPT, []))[0])
    observed = np.bincount(firsts, minlength=len(expected)) / n
    assert np.all(np.abs(observed - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-4)


async def test_a_completed_rollout_has_its_text_and_the_verifiers_reward():
    for rollout in await generated(Policy.create()):
        assert is_over(rollout.response_ids)
        assert rollout.finish_reason == ("stop" if rollout.response_ids[-1] == END else "length")
        assert rollout.response == decode(rollout.response_ids)
        assert rollout.reward == verify(PROMPT, rollout.response_ids)


async def test_a_pause_ends_the_wait_for_a_token(new_engine):
    engine = new_engine(seconds=LONG)
    running = [asyncio.create_task(generate(engine, number)) for number in range(4)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await engine.pause()
    groups = await asyncio.gather(*running)
    assert time.monotonic() - began < LONG / 10
    assert {rollout.status for group in groups for rollout in group} == {Status.ABORTED}


async def test_a_cancelled_call_leaves_the_group_as_it_was(new_engine):
    engine, group = new_engine(seconds=LONG), new_group()
    running = asyncio.create_task(generate(engine, group=group))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert tokens_of(group) == [[]] * 8
    assert {rollout.status for rollout in group} == {Status.INIT}


def test_the_times_of_tokens_have_a_long_tail():
    times = [token_seconds(0, number) for number in range(2000)]
    assert np.median(times) == pytest.approx(TOKEN_SECONDS, rel=0.15)
    assert np.quantile(times, 0.99) > 5 * TOKEN_SECONDS
    assert times[:10] == [token_seconds(0, number) for number in range(10)]


async def test_each_token_has_the_step_of_the_weights_that_said_it(new_engine, tmp_path):
    """The first token is of step 0; then the group is interrupted, and other weights go on."""
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/demo.db").build() as buffer:
        sampler = sampler_of(buffer, 0, 1)
        [prompt] = await sampler.draw()
        await interrupted_after(new_engine(), 1, group=prompt.group)
        await prompt.finish(model_step=0, current_train_step=1)
        [prompt] = await sampler.draw()
        await generate(new_engine(weights=1, step=3), group=prompt.group)
        await prompt.finish(model_step=3, current_train_step=4)
        [group] = await buffer.get(1, TASK)
    steps = {tuple(rollout.response_model_steps) for rollout in group}
    assert steps <= {(0,), (0, 3), (0, 3, 3)}
    assert (0, 3, 3) in steps
    assert all(len(rollout.response_model_steps) == len(rollout.response_ids) for rollout in group)
