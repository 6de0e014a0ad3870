"""Tail batches: the slowest prompts are gathered, and generated to their end by themselves."""

from __future__ import annotations

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler
from tests.produce.laws import ids, items_of, produce, take
from tests.produce.scripted import Script, ScriptedLoop, forever
from tests.stores import TASK, group


async def put(buffer: ReplayBuffer, number: int, status: Status, interrupted: int | None = None) -> None:
    rollouts = group(number, status=status)
    rollouts[0].group_id = number
    await buffer.put(rollouts, TASK, tags=None if interrupted is None else {"interrupted": interrupted})


async def test_expired_groups_wait_until_enough_have_gathered(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(tail_batch_trigger_size=3, over_sample=1.0), ScriptedLoop()
    for number in (100, 101):
        await put(sampler.buffer, number, Status.EXPIRED)
    await produce(strategy, loop, sampler, 3)
    assert not set(loop.order) & {100, 101}
    assert await sampler.buffer.count(TASK, Status.EXPIRED) == 2


async def test_a_tail_batch_is_made_of_what_has_gathered_alone_without_running_ahead(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(tail_batch_trigger_size=3, over_sample=1.0), ScriptedLoop()
    for number in range(100, 104):
        await put(sampler.buffer, number, Status.EXPIRED)
    summary = await produce(strategy, loop, sampler, 3)
    assert loop.order == [100, 101, 102]
    assert (summary.produced, summary.continued, loop.most) == (3, 3, 3)
    assert (await sampler.counts()).drawn == 0


async def test_groups_that_were_interrupted_often_gather_with_the_expired_ones(sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(tail_batch_trigger_size=3, tail_batch_max_tries=2, over_sample=1.0)
    loop = ScriptedLoop()
    await put(sampler.buffer, 100, Status.ABORTED, 1)
    await put(sampler.buffer, 101, Status.ABORTED, 2)
    await put(sampler.buffer, 102, Status.ABORTED, 5)
    await put(sampler.buffer, 103, Status.EXPIRED)
    await produce(strategy, loop, sampler, 3)
    assert loop.order == [103, 101, 102]


async def test_groups_that_were_interrupted_seldom_or_by_others_come_first_until_then(sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(tail_batch_trigger_size=3, tail_batch_max_tries=2)
    loop = ScriptedLoop()
    await put(sampler.buffer, 100, Status.ABORTED, 3)
    await put(sampler.buffer, 101, Status.ABORTED, 1)
    await put(sampler.buffer, 102, Status.ABORTED)
    await put(sampler.buffer, 103, Status.EXPIRED)
    await produce(strategy, loop, sampler, 3)
    assert loop.order == [101, 102, 0]
    assert sorted(ids(await items_of(sampler.buffer, Status.ABORTED))) == [100]


async def test_without_max_tries_only_expired_ones_gather(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(tail_batch_trigger_size=2), ScriptedLoop()
    for number in (100, 101):
        await put(sampler.buffer, number, Status.ABORTED, 9)
    await put(sampler.buffer, 102, Status.EXPIRED)
    await produce(strategy, loop, sampler, 3)
    assert loop.order == [100, 101, 0]


async def test_a_tail_batch_that_is_larger_than_what_has_gathered_is_filled_up(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(tail_batch_trigger_size=2), ScriptedLoop()
    await put(sampler.buffer, 100, Status.EXPIRED)
    await put(sampler.buffer, 101, Status.EXPIRED)
    await put(sampler.buffer, 102, Status.ABORTED, 1)
    await produce(strategy, loop, sampler, 4)
    assert loop.order == [100, 101, 102, 0]


async def test_a_trigger_of_0_means_no_tail_batches(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(over_sample=0.5), ScriptedLoop()
    await put(sampler.buffer, 100, Status.EXPIRED)
    await put(sampler.buffer, 101, Status.ABORTED, 9)
    await produce(strategy, loop, sampler, 4)
    assert loop.order[:2] == [101, 100]
    assert len(loop.order) >= 6


async def test_a_trigger_of_minus_1_leaves_expired_groups_where_they_are(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(tail_batch_trigger_size=-1), ScriptedLoop()
    await put(sampler.buffer, 100, Status.EXPIRED)
    await put(sampler.buffer, 101, Status.ABORTED, 9)
    await produce(strategy, loop, sampler, 3)
    assert loop.order == [101, 0, 1]


async def test_the_slowest_prompts_are_trained_in_the_end(sampler: Sampler) -> None:
    """They would be interrupted in every other batch."""
    strategy = AsyncProduceStrategy(over_sample=1.0, tail_batch_trigger_size=2, tail_batch_max_tries=1)
    loop = ScriptedLoop(scripts={number: Script(tokens=40, seconds=0.01) for number in (0, 1)})
    trained: list[int] = []
    for _ in range(6):
        await produce(strategy, loop, sampler, 2)
        trained += ids(await take(sampler.buffer, 2))
        if {0, 1} <= set(trained):
            break
    assert {0, 1} <= set(trained)
    assert len(trained) == len(set(trained))


async def test_a_tail_batch_that_fails_gathers_again(sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(tail_batch_trigger_size=2, tail_batch_max_tries=1, pause_timeout=1)
    for number in (100, 101):
        await put(sampler.buffer, number, Status.EXPIRED)
    loop = ScriptedLoop(forever())
    with pytest.raises(TimeoutError):
        await strategy.produce_batch(loop, sampler, 2, train_step=1, model_step=0, timeout=0.1)
    assert await strategy.again(sampler) == (
        True,
        [Status.EXPIRED, (Status.ABORTED, {"tags.interrupted": {"$gte": 1}}), Status.ABORTED],
    )
    loop.default = Script()
    await produce(strategy, loop, sampler, 2)
    assert sorted(ids(await take(sampler.buffer, 2))) == [100, 101]
    assert await sampler.buffer.count_where({}) == 0
