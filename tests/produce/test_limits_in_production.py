"""A buffer that is full, or whose rate limit holds puts back: batches wait for room, and lose nothing by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replaybuf import NotReadyError, ReplayBuffer, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler, SyncProduceStrategy
from tests.produce.laws import assert_accounted, ids, take
from tests.produce.scripted import Script, ScriptedLoop, prompts
from tests.stores import TASK, build, group, until


def two_are_running(loop: ScriptedLoop) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return loop.running == 2

    return look


def sampler_of(buffer: ReplayBuffer) -> Sampler:
    return Sampler(buffer, prompts(60), TASK, epochs=1)


@pytest.mark.parametrize("on_full", ["block", "reject"])
async def test_no_more_is_generated_than_there_is_room_for(url: str, on_full: str) -> None:
    async with build(url, capacity=4, on_full=on_full) as buffer:
        sampler, loop = sampler_of(buffer), ScriptedLoop()
        for _ in range(3):
            summary = await AsyncProduceStrategy(over_sample=2).produce_batch(
                loop, sampler, 3, train_step=1, model_step=0, timeout=30
            )
            assert summary.produced >= 3
            assert await buffer.count(TASK, Status.COMPLETED) <= 4
            await take(buffer, await buffer.count(TASK, Status.COMPLETED))
        assert loop.most <= 4
        metrics: Any = await buffer.metrics(distributions=False)
        assert metrics["tasks"][TASK].get("refused", 0) == 0


@pytest.mark.parametrize("on_full", ["block", "reject"])
async def test_a_group_for_which_there_is_no_room_is_kept_until_there_is(url: str, on_full: str) -> None:
    """Others have filled the buffer while it was generated."""
    async with build(url, capacity=2, on_full=on_full, put_timeout=0.1) as buffer:
        sampler, loop = sampler_of(buffer), ScriptedLoop(Script(tokens=1, seconds=0.2))
        wanted = SyncProduceStrategy(
            should_continue=lambda completed, size: len(produced) < 2, on_group=lambda made: produced.append(made)
        )
        produced: list[Any] = []
        batch = asyncio.create_task(wanted.produce_batch(loop, sampler, 2, train_step=1, model_step=0, timeout=30))
        await until(two_are_running(loop))
        for number in (100, 101):
            await buffer.put(group(number), TASK)
        await asyncio.sleep(0.5)
        assert not batch.done()
        await take(buffer, 2)
        assert (await batch).produced == 2
        assert sorted(ids(await take(buffer, 2))) == [0, 1]
        assert loop.calls == {0: 1, 1: 1}


async def test_what_has_no_room_when_the_time_is_over_is_generated_again(url: str) -> None:
    async with build(url, capacity=2, on_full="block", put_timeout=0.1) as buffer:
        sampler, loop = sampler_of(buffer), ScriptedLoop(Script(tokens=1, seconds=0.1))
        strategy = SyncProduceStrategy(pause_timeout=0.2, should_continue=lambda completed, size: True)
        batch = asyncio.create_task(strategy.produce_batch(loop, sampler, 2, train_step=1, model_step=0, timeout=0.6))
        await until(two_are_running(loop))
        for number in (100, 101):
            await buffer.put(group(number), TASK)
        with pytest.raises(NotReadyError):
            await batch
        await buffer.delete({"status": "completed"})
        await assert_accounted(sampler)
        assert (await sampler.counts()).waiting == 2


async def test_a_buffer_that_evicts_holds_nothing_back(url: str) -> None:
    async with build(url, capacity=4, on_full="evict") as buffer:
        sampler = sampler_of(buffer)
        summary = await AsyncProduceStrategy(over_sample=1).produce_batch(
            ScriptedLoop(Script(deaf=True)), sampler, 4, train_step=1, model_step=0, timeout=30
        )
        assert summary.produced == 8
        assert await buffer.count(TASK, Status.COMPLETED) == 4


async def test_the_rate_limit_holds_batches_back(url: str) -> None:
    async with build(url, samples_per_insert=1, error_buffer=4) as buffer:
        sampler, loop = sampler_of(buffer), ScriptedLoop()
        for _ in range(3):
            await AsyncProduceStrategy(over_sample=3).produce_batch(
                loop, sampler, 3, train_step=1, model_step=0, timeout=30
            )
            assert await buffer.count(TASK, Status.COMPLETED) <= 4
            await take(buffer, 3)
        assert loop.most <= 4
