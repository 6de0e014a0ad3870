"""Interrupting generation: within a bound, also where the agent loop is deaf; nothing of a prompt is lost by it."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from replaybuf import NotReadyError, Status
from replaybuf.produce import AsyncProduceStrategy, ProduceSummary, Sampler
from tests.produce.laws import assert_accounted, ids, items_of
from tests.produce.scripted import ScriptedLoop, forever
from tests.stores import TASK

STRATEGY = AsyncProduceStrategy(over_sample=0.5, pause_timeout=0.2, enable_partial_rollout=True)


async def produce(loop: ScriptedLoop, sampler: Sampler) -> ProduceSummary:
    return await STRATEGY.produce_batch(loop, sampler, 4, train_step=1, model_step=0, timeout=30)


async def test_a_deaf_loop_is_cancelled_and_nothing_of_the_call_is_kept(
    sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop(scripts={0: forever(deaf=True), 1: forever(deaf=True)})
    with caplog.at_level(logging.WARNING, "replaybuf.produce"):
        summary = await produce(loop, sampler)
    assert 0.2 <= summary.pause_seconds < 5
    assert summary.interrupted == 0
    assert loop.running == 0
    assert "2 groups were not done 0.2 s after pause(); they begin anew later" in caplog.text
    waiting = await items_of(sampler.buffer, Status.INIT)
    assert sorted(ids(waiting)) == [0, 1]
    assert {rollout.response for item in waiting for rollout in item.item} == {None}
    await assert_accounted(sampler)


async def test_being_cancelled_by_a_pause_is_no_failed_delivery(sampler: Sampler) -> None:
    """However often it happens, the prompt isn't set aside."""
    loop = ScriptedLoop(scripts={0: forever(deaf=True)})
    for _ in range(6):
        await produce(loop, sampler)
        await sampler.buffer.delete({"status": "completed"})
    assert await sampler.buffer.count(TASK, Status.FAILED) == 0
    assert ids(await items_of(sampler.buffer, Status.INIT)) == [0]


async def test_a_loop_that_ignores_its_cancellation_does_not_hold_up_the_batch(sampler: Sampler) -> None:
    """Its prompt stays in flight, and is stored when it is done."""
    loop = ScriptedLoop(scripts={0: forever(deaf=True, stubborn=True)})
    began = time.monotonic()
    produced = (await produce(loop, sampler)).produced
    assert produced >= 4
    assert time.monotonic() - began < 10
    assert loop.running == 1
    loop.scripts[0].tokens = 1
    while loop.running:
        await sampler.buffer.storage.changed(5, sampler.buffer.storage.version())
    await sampler.buffer.wait_ready({TASK: produced + 1}, timeout=10)
    await assert_accounted(sampler)


async def test_generation_is_paused_between_batches_and_resumed_for_the_next(sampler: Sampler) -> None:
    loop = ScriptedLoop(scripts={0: forever()})
    for number in range(1, 3):
        await produce(loop, sampler)
        assert (loop.running, loop.pauses) == (0, number)
        await sampler.buffer.delete({"status": "completed"})


async def test_a_pause_that_hangs_is_given_up(sampler: Sampler) -> None:
    class Hanging(ScriptedLoop):
        async def pause(self) -> None:
            await asyncio.sleep(3600)

    loop = Hanging(scripts={0: forever()})
    summary = await produce(loop, sampler)
    assert 0.2 <= summary.pause_seconds < 5
    assert loop.running == 0
    await assert_accounted(sampler)


async def test_a_resume_that_hangs_ends_the_batch(sampler: Sampler) -> None:
    class Hanging(ScriptedLoop):
        async def resume(self) -> None:
            await asyncio.sleep(3600)

    with pytest.raises(NotReadyError, match=r"after 0.2 s: resume\(\) of the agent loop \(Hanging\) has not returned"):
        await produce(Hanging(), sampler)
    assert (await sampler.counts()).drawn == 0
