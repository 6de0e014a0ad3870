"""The engine as an agent loop: what it says depends on the weights alone, and it can be interrupted at any moment."""

import asyncio
import time

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, Status
from replaybuf.demo.arithmetic import Prompt
from replaybuf.demo.engine import TOKEN_SECONDS, Engine, token_seconds
from replaybuf.demo.policy import Policy
from replaybuf.demo.settings import TASK, sampler_of
from replaybuf.produce import AgentLoop
from tests.demo.made import new_group, tokens_of

PROMPT = Prompt("14-9=")
LONG = 60.0


@pytest.fixture
def new_engine():
    """Engines with weights of a seed; at the end of the test they are closed."""
    engines = []

    def make(*, weights=0, step=0, seconds=0.0, seed=0):
        engine = Engine(seed, "session", token_seconds=seconds)
        engine.load(Policy.create(weights), step)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


async def generate(engine, number=0, *, group=None):
    return await engine.generate_group(new_group(PROMPT, number=number) if group is None else group, partial=True)


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


def test_it_is_an_agent_loop(new_engine):
    assert isinstance(new_engine(), AgentLoop)


async def test_a_group_is_completed_in_place(new_engine):
    group = new_group(PROMPT)
    assert await generate(new_engine(), group=group) is group
    assert {rollout.status for rollout in group} == {Status.COMPLETED}
    assert {rollout.session_id for rollout in group} == {"session"}


async def test_it_doesnt_matter_who_generates(new_engine):
    first, second = new_engine(), new_engine()
    await generate(first, 1)  # it has done other things before
    groups = await asyncio.gather(generate(first, 7), generate(first, 8), generate(second, 7))
    assert tokens_of(groups[0]) == tokens_of(groups[2]) != tokens_of(groups[1])
    for one, other in zip(groups[0], groups[2], strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 1}])
async def test_other_steps_and_seeds_say_other_things(new_engine, other):
    assert tokens_of(await generate(new_engine())) != tokens_of(await generate(new_engine(**other)))


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


async def test_a_pause_ends_the_wait_for_a_token(new_engine):
    engine = new_engine(seconds=LONG)
    running = [asyncio.create_task(generate(engine, number)) for number in range(4)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await engine.pause()
    groups = await asyncio.gather(*running)
    assert time.monotonic() - began < LONG / 10
    assert {rollout.status for group in groups for rollout in group} == {Status.ABORTED}


async def test_nothing_is_said_until_it_is_resumed(new_engine):
    engine = new_engine()
    await engine.pause()
    group = await generate(engine)
    assert tokens_of(group) == [[]] * 8
    await engine.resume()
    assert {rollout.status for rollout in await generate(engine, group=group)} == {Status.COMPLETED}


async def test_a_cancelled_call_leaves_the_group_as_it_was(new_engine):
    engine, group = new_engine(seconds=LONG), new_group(PROMPT)
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
        [prompt] = await sampler.sample()
        await interrupted_after(new_engine(), 1, group=prompt.group)
        await prompt.finish(model_step=0, current_train_step=1)
        [prompt] = await sampler.sample()
        await generate(new_engine(weights=1, step=3), group=prompt.group)
        await prompt.finish(model_step=3, current_train_step=4)
        [group] = await buffer.get(1, TASK)
    steps = {tuple(rollout.response_model_steps) for rollout in group}
    assert steps <= {(0,), (0, 3), (0, 3, 3)}
    assert (0, 3, 3) in steps
    assert all(len(rollout.response_model_steps) == len(rollout.response_ids) for rollout in group)
