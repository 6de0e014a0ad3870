"""How workers end: the trainer has finished, they are stopped, nothing can be done, or the run was restored."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from replaybuf import FencedError, NotReadyError, ReplayBuffer, Status
from replaybuf.errors import InputError, ProduceError
from replaybuf.produce import AsyncProduceStrategy, Sampler, SyncProduceStrategy, TrainState, produce_loop, publish
from tests.produce.laws import assert_accounted, ids, items_of, leased
from tests.produce.scripted import Script, ScriptedLoop, forever, prompts
from tests.produce.test_workers import STRATEGY, completed, holds, working
from tests.stores import TASK, build, group, until


@pytest.fixture
def sampler(buffer: ReplayBuffer) -> Sampler:
    return Sampler(buffer, prompts(400), TASK, epochs=1)


async def test_finished_ends_workers_and_interrupts_what_they_generate(sampler: Sampler) -> None:
    loop = ScriptedLoop(scripts={0: forever()})
    await publish(sampler.buffer, TrainState(1, 0))
    async with working(loop, sampler) as task:
        await completed(sampler.buffer, 5)
        await publish(sampler.buffer, TrainState(2, 1, finished=True))
        summary = await asyncio.wait_for(task, 10)
    assert summary.interrupted == 1
    assert (loop.running, loop.paused) == (0, True)
    await assert_accounted(sampler)


async def test_stop_ends_a_worker(sampler: Sampler) -> None:
    stop, loop = asyncio.Event(), ScriptedLoop(forever())
    await publish(sampler.buffer, TrainState(1, 0))
    async with working(loop, sampler, stop=stop) as task:
        await until(holds(lambda: loop.running == 6))
        stop.set()
        assert (await asyncio.wait_for(task, 10)).interrupted == 6
    await assert_accounted(sampler)


@pytest.mark.parametrize("before", [True, False])
async def test_stop_ends_a_worker_that_waits_for_a_trainer(sampler: Sampler, before: bool) -> None:
    stop = asyncio.Event()
    if before:
        stop.set()
    async with working(ScriptedLoop(), sampler, stop=stop) as task:
        await asyncio.sleep(0.05)
        stop.set()
        assert (await asyncio.wait_for(task, 10)).produced == 0


IDLE: dict[str, tuple[TrainState | None, int, dict[str, Any], str]] = {
    "no trainer": (None, 400, {}, r"after 0.5 s: the trainer has published nothing; is it running\?"),
    "nobody takes": (TrainState(1, 0), 400, {}, "task math: 6 completed groups wait, and nobody takes them"),
    "no prompts": (TrainState(1, 0), 3, {}, r"no prompt is left \(0 in flight\), and the trainer has not finished"),
    "old weights": (
        TrainState(9, 2),
        400,
        {"max_staleness": 1},
        "weights of step 2 are too old for train step 9",
    ),
}


@pytest.mark.parametrize("name", IDLE)
async def test_a_worker_that_has_nothing_to_do_says_why(buffer: ReplayBuffer, name: str) -> None:
    state, size, options, message = IDLE[name]
    if state is not None:
        await publish(buffer, state)
    strategy = STRATEGY.model_copy(update=options)
    with pytest.raises(NotReadyError, match=message):
        await produce_loop(strategy, ScriptedLoop(), Sampler(buffer, prompts(size), TASK, epochs=1), 4, timeout=0.5)


async def test_a_long_generation_is_no_reason_to_give_up(sampler: Sampler) -> None:
    await publish(sampler.buffer, TrainState(1, 0))
    loop = ScriptedLoop(Script(tokens=1, seconds=0.8))
    async with working(loop, sampler, timeout=0.2):
        await completed(sampler.buffer, 6)


async def test_a_loop_that_always_fails_ends_the_worker(sampler: Sampler) -> None:
    await publish(sampler.buffer, TrainState(1, 0))
    strategy = AsyncProduceStrategy(max_failures=6)
    with pytest.raises(ProduceError, match=r"([6-9]|1[0-9]) groups in a row failed.*no luck"):
        await produce_loop(strategy, ScriptedLoop(Script(failures=99)), sampler, 4, timeout=10)
    await assert_accounted(sampler)


async def test_groups_that_are_all_filtered_end_the_worker(sampler: Sampler) -> None:
    await publish(sampler.buffer, TrainState(1, 0))
    strategy = AsyncProduceStrategy(is_valid=lambda group: False, give_up_after=2)
    with pytest.raises(ProduceError, match=r"task math: none was completed lately, after \d+ in vain: \d+ filtered"):
        await produce_loop(strategy, ScriptedLoop(), sampler, 4, timeout=10)
    await assert_accounted(sampler)


async def test_many_filtered_groups_do_not_end_a_worker_whose_others_are_completed(sampler: Sampler) -> None:
    await publish(sampler.buffer, TrainState(1, 0))
    strategy = AsyncProduceStrategy(is_valid=lambda group: group[0].group_id % 3 == 0, give_up_after=2)
    async with working(ScriptedLoop(), sampler, strategy):
        for _ in range(4):
            await completed(sampler.buffer, 4)
            await sampler.buffer.take_batch({TASK: 4})


@pytest.mark.parametrize("running", [True, False])
async def test_a_restore_ends_workers(shared_url: str, running: bool) -> None:
    """Those that generate when they store it or begin another, those that wait at once."""
    async with build(shared_url) as buffer:
        sampler = Sampler(buffer, prompts(400), TASK, epochs=1)
        await publish(buffer, TrainState(1, 0))
        await buffer.checkpoint(1)
        loop = ScriptedLoop(Script(tokens=1, seconds=0.4) if running else Script())
        async with build(shared_url) as trainer:
            async with working(loop, sampler) as task:
                await until(holds(lambda: (loop.running if running else len(loop.order)) == 6))
                await trainer.restore(1)
                await asyncio.wait([task], timeout=10)
                with pytest.raises(FencedError):
                    task.result()
            assert await trainer.count(TASK, Status.COMPLETED) == 0
            assert await leased(trainer) == 0


async def test_a_trainer_that_comes_back_finds_its_workers_at_work(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        sampler, loop = Sampler(buffer, prompts(400), TASK, epochs=1), ScriptedLoop()
        async with working(loop, sampler):
            trained: list[int] = []
            for step in range(4):
                async with build(shared_url) as trainer:  # each time another one
                    await publish(trainer, TrainState(step + 1, step))
                    batch, _ = await trainer.take_batch({TASK: 4}, timeout=10)
                    trained += ids(batch[TASK])
        assert len(set(trained)) == 16
        assert loop.running == 0


async def test_groups_that_expire_are_generated_again_by_workers(sampler: Sampler) -> None:
    buffer, strategy = sampler.buffer, AsyncProduceStrategy(max_staleness=1)
    for number in (1000, 1001):
        rollouts = group(number)
        rollouts[0].group_id = number
        await buffer.put(rollouts, TASK, model_step=0, current_train_step=1)
    await strategy.refresh(buffer, TASK, 5)
    await publish(buffer, TrainState(5, 4))
    loop = ScriptedLoop()
    async with working(loop, sampler, strategy):
        await completed(buffer, 4)
    assert loop.order[:2] == [1000, 1001]
    steps = {step for item in await items_of(buffer) for step in item.item[0].response_model_steps}
    assert steps == {4}


BAD: dict[str, Any] = {
    "batch_size": ({"batch_size": 0}, "batch_size must be"),
    "max_lag": ({"max_lag": -1}, "max_lag must be"),
    "max_lag of a text": ({"max_lag": "1"}, "max_lag must be"),
    "timeout": ({"timeout": -1}, "timeout must be"),
    "strategy": ({"strategy": SyncProduceStrategy()}, "needs an AsyncProduceStrategy"),
    "sampler": ({"sampler": None}, "expected a Sampler"),
    "agent_loop": ({"agent_loop": object()}, "an agent loop needs"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_arguments_are_refused_at_once(name: str) -> None:
    changed, message = BAD[name]
    async with build("memory://") as buffer:
        good = {
            "strategy": STRATEGY,
            "agent_loop": ScriptedLoop(),
            "sampler": Sampler(buffer, prompts(2), TASK),
            "batch_size": 2,
        }
        began = time.monotonic()
        with pytest.raises(InputError, match=message):
            await produce_loop(**(good | changed))
        assert time.monotonic() - began < 5


async def test_a_batch_that_the_limits_can_never_deliver_is_refused() -> None:
    async with build("memory://", capacity=4, on_full="block") as buffer:
        sampler = Sampler(buffer, prompts(9), TASK)
        with pytest.raises(InputError, match="would wait for ever"):
            await produce_loop(STRATEGY, ScriptedLoop(), sampler, 5)
        with pytest.raises(InputError, match="would wait for ever"):
            await STRATEGY.produce_batch(ScriptedLoop(), sampler, 5, train_step=1, model_step=0)
