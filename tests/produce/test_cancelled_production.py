"""Production is cancelled at every await: every prompt is finished or waits, nothing hangs, no task is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler, SyncProduceStrategy, TrainState, produce_loop, publish
from tests.faults.test_cancelled import MOMENTS, CancelledAt
from tests.produce.laws import assert_accounted, items_of, leased
from tests.produce.scripted import Script, ScriptedLoop, forever, prompts
from tests.stores import build, until

SIZE = 3


class CancelledFrom(CancelledAt):
    """Cancels also at the waits after the n-th, `times` times in all."""

    def __init__(self, call: Awaitable[Any], number: int, moment: str, times: int) -> None:
        super().__init__(call, number, moment)
        self._left = times

    def __await__(self) -> Generator[Any, Any, Any]:
        return super().__await__()

    def _cancel(self, waited_for: Any) -> None:
        super()._cancel(waited_for)
        self._left -= 1
        if self._left:
            self._number += 1


async def ended(call: Awaitable[Any], number: int, moment: str, times: int) -> bool:
    """Whether it was cancelled. It ends within a few seconds, in either case."""
    stepping = CancelledFrom(call, number, moment, times)

    async def run() -> None:
        await stepping

    task = asyncio.create_task(run())
    done, _ = await asyncio.wait([task], timeout=20)
    assert done, f"cancelled at wait {number} {moment}, it hangs"
    if not task.cancelled():
        await task
    return task.cancelled()


def script() -> ScriptedLoop:
    """Some are quick, one fails, one is left over, one doesn't hear that."""
    scripts = {0: forever(), 1: Script(failures=1), 2: Script(status=Status.FILTERED), 4: forever(deaf=True)}
    return ScriptedLoop(Script(tokens=2, seconds=0.0005), scripts)


Production = Callable[[ScriptedLoop, Sampler], Awaitable[Any]]


async def sync_batch(loop: ScriptedLoop, sampler: Sampler) -> None:
    loop.scripts.pop(0)
    loop.scripts.pop(4)
    await SyncProduceStrategy().produce_batch(loop, sampler, SIZE, train_step=1, model_step=0, timeout=20)


async def async_batch(loop: ScriptedLoop, sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(
        over_sample=1.0, pause_timeout=0.05, enable_partial_rollout=True, max_staleness=3, tail_batch_trigger_size=2
    )
    await strategy.produce_batch(loop, sampler, SIZE, train_step=1, model_step=0, timeout=20)


async def worker(loop: ScriptedLoop, sampler: Sampler) -> None:
    """Which loads weights twice, and is stopped when a batch is there."""
    stop = asyncio.Event()
    left = [SIZE]

    def told(_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            stop.set()

    async def load(state: TrainState) -> None:
        await asyncio.sleep(0)
        if state.model_step == 0:
            await publish(sampler.buffer, TrainState(2, 1))

    await publish(sampler.buffer, TrainState(1, 0))
    strategy = AsyncProduceStrategy(over_sample=1.0, pause_timeout=0.05, enable_partial_rollout=True, on_group=told)
    await produce_loop(strategy, loop, sampler, SIZE, load_weights=load, stop=stop, timeout=20)


async def step_through(buffer: ReplayBuffer, production: Production, moment: str, times: int, stride: int) -> None:
    """Cancel it at the first wait, the one `stride` later, and so on, each time with a new task."""
    number, was_cancelled = 1, True
    while was_cancelled:  # the last time it comes to its end before
        sampler = Sampler(buffer, prompts(9), f"{number} {moment}", epochs=1)
        loop = script()
        was_cancelled = await ended(production(loop, sampler), number, moment, times)
        assert loop.running == 0

        async def is_settled(task_name: str = sampler.task_name) -> bool:
            return await leased(buffer, task_name) == 0

        await until(is_settled)  # PostgreSQL may be undoing a cancelled draw, over another connection
        await assert_accounted(sampler)
        await finish(sampler)
        number += stride
    assert number > 8


async def finish(sampler: Sampler) -> None:
    """What was cancelled goes on: all prompts come to their end."""
    strategy = AsyncProduceStrategy(should_continue=lambda completed, size: completed < size)
    await strategy.produce_batch(ScriptedLoop(Script(tokens=1, seconds=0)), sampler, 8, train_step=2, model_step=1)
    for status in (Status.INIT, Status.ABORTED, Status.EXPIRED, Status.FAILED):
        assert len(await items_of(sampler.buffer, status, sampler.task_name)) <= 1
    await sampler.buffer.delete({})


#: How often in a row, and at every so many waits: at all of them in the long form.
CASES = [
    pytest.param("memory", 1, 1),
    pytest.param("memory", 3, 1),
    pytest.param("sqlite", 3, 6),
    pytest.param("postgresql", 3, 30),
    *(pytest.param(kind, times, 1, marks=pytest.mark.long) for kind in ("sqlite", "postgresql") for times in (1, 3)),
]


@pytest.mark.parametrize(("new_url", "times", "stride"), CASES, indirect=["new_url"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("production", [sync_batch, async_batch, worker])
async def test_a_cancelled_production_leaves_every_prompt_finished_or_waiting(
    new_url: Callable[[], str], production: Production, moment: str, times: int, stride: int
) -> None:
    async with build(new_url(), unfit=1000) as buffer:
        await step_through(buffer, production, moment, times, stride)
