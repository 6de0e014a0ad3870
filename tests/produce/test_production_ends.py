"""Production under limits, and production that is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from replaybuf import NotReadyError, ReplayBuffer, Status
from replaybuf.produce import (
    AsyncProduceStrategy,
    Sampler,
    SyncProduceStrategy,
    TrainState,
    produce_loop,
    publish,
    rollout_worker,
)
from tests.faults.test_cancelled import MOMENTS, CancelledAt
from tests.produce.conftest import (
    Script,
    ScriptedLoop,
    assert_accounted,
    forever,
    ids,
    items_of,
    leased,
    produce,
    prompts,
    sampler_of,
    take,
)
from tests.stores import TASK, build, group, until, until_equal


@pytest.mark.parametrize(
    "limits",
    [
        {"capacity": 4, "on_full": "block"},
        {"capacity": 4, "on_full": "reject"},
        {"samples_per_insert": 1, "error_buffer": 4},
    ],
)
async def test_no_more_is_generated_than_there_is_room_for(url: str, limits: dict[str, Any]) -> None:
    async with build(url, **limits) as buffer:
        sampler, loop = sampler_of(buffer), ScriptedLoop()
        for _ in range(3):
            summary = await produce(AsyncProduceStrategy(over_sample=2), loop, sampler, 3)
            assert summary.produced >= 3
            assert await buffer.count(TASK, Status.COMPLETED) <= 4
            await take(buffer, await buffer.count(TASK, Status.COMPLETED))
        assert loop.most <= 4
        metrics: Any = await buffer.metrics(distributions=False)
        assert metrics["tasks"][TASK].get("refused", 0) == 0


@pytest.mark.parametrize("on_full", ["block", "reject"])
async def test_a_group_for_which_there_is_no_room_is_kept_until_there_is(
    url: str, on_full: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others have filled the buffer while it was generated. It is tried again after a change, or each second.

    The log says so once, however often it is.
    """
    async with build(url, capacity=2, on_full=on_full, put_timeout=0.1) as buffer:
        filled = asyncio.Event()
        sampler, loop = sampler_of(buffer), ScriptedLoop(Script(tokens=1), sleep=lambda _: filled.wait())
        strategy = SyncProduceStrategy(
            should_continue=lambda completed, size: len(produced) < 2, on_group=lambda result: produced.append(result)
        )
        produced: list[Any] = []
        batch = asyncio.create_task(produce(strategy, loop, sampler, 2))
        await until(lambda: loop.running == 2)
        for number in (100, 101):
            await buffer.put(group(number), TASK)
        filled.set()
        await asyncio.sleep(0.5)
        assert not batch.done()
        metrics: Any = await buffer.metrics(distributions=False)
        assert metrics["tasks"][TASK]["refused"] <= 10
        assert len([record for record in caplog.records if record.name == "replaybuf.produce"]) <= 1
        await take(buffer, 2)
        assert (await batch).produced == 2
        assert sorted(ids(await take(buffer, 2))) == [0, 1]
        assert loop.calls == {0: 1, 1: 1}


@pytest.mark.parametrize("stubborn", [False, True])
async def test_what_has_no_room_when_the_time_is_over_is_generated_again(url: str, stubborn: bool) -> None:
    """Also if it is completed only when it is cancelled, by an agent loop that suppresses that."""
    async with build(url, capacity=2, on_full="block", put_timeout=0.1) as buffer:
        filled = asyncio.Event()
        script = Script(tokens=1, stubborn=stubborn)
        sampler, loop = sampler_of(buffer), ScriptedLoop(script, sleep=lambda _: filled.wait())
        strategy = SyncProduceStrategy(pause_timeout=0.2, should_continue=lambda completed, size: True)
        batch = asyncio.create_task(produce(strategy, loop, sampler, 2, timeout=0.6))
        await until(lambda: loop.running == 2)
        for number in (100, 101):
            await buffer.put(group(number), TASK)
        if not stubborn:
            filled.set()
        assert (await asyncio.wait([batch], timeout=10))[0]
        with pytest.raises(NotReadyError):
            await batch
        await buffer.delete({"status": "completed"})
        await assert_accounted(sampler)
        assert (await sampler.counts()).waiting == 2


async def test_a_buffer_that_evicts_holds_nothing_back(url: str) -> None:
    async with build(url, capacity=4, on_full="evict") as buffer:
        sampler = sampler_of(buffer)
        summary = await produce(AsyncProduceStrategy(over_sample=1), ScriptedLoop(Script(deaf=True)), sampler, 4)
        assert summary.produced == 8
        assert await buffer.count(TASK, Status.COMPLETED) == 4


@pytest.mark.parametrize("ending", ["batch", "worker", "stopped worker"])
async def test_a_dataset_that_hangs_does_not_outlast_the_timeout(
    url: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep a worker from hearing that it shall stop; its prompts aren't lost."""
    monkeypatch.setattr(rollout_worker, "_LONGEST_SECONDS", 0.3)
    goes_on, stop = threading.Event(), asyncio.Event()

    class Hanging:
        def __iter__(self) -> Iterator[Any]:
            goes_on.wait(20)
            return iter(prompts(3))

    async with build(url) as buffer:
        sampler, strategy = Sampler(buffer, Hanging(), TASK, epochs=1), AsyncProduceStrategy()
        await publish(buffer, TrainState(1, 0))
        try:
            async with asyncio.timeout(10):
                if ending == "stopped worker":
                    asyncio.get_running_loop().call_later(0.2, stop.set)
                    await produce_loop(strategy, ScriptedLoop(), sampler, 2, stop=stop)
                else:
                    call: Callable[..., Awaitable[Any]] = produce if ending == "batch" else produce_loop
                    with pytest.raises(NotReadyError, match=r"after 0\.2 s: task math: (0 of 2|its dataset has given)"):
                        await call(strategy, ScriptedLoop(), sampler, 2, timeout=0.2)
        finally:
            goes_on.set()
        assert (await produce(strategy, ScriptedLoop(), sampler, 3)).produced == 3


def test_a_dataset_that_hangs_does_not_keep_the_event_loop_from_ending() -> None:
    """Nor the process: no thread that is waited for at the end reads it."""
    goes_on = threading.Event()

    class Hanging:
        def __iter__(self) -> Iterator[Any]:
            goes_on.wait()
            return iter(prompts(3))

    async def give_up() -> None:
        async with build("memory://") as buffer:
            with pytest.raises(NotReadyError):
                await produce(SyncProduceStrategy(), ScriptedLoop(), Sampler(buffer, Hanging(), TASK), 2, timeout=0.2)

    running = threading.Thread(target=asyncio.run, args=(give_up(),))
    running.start()
    try:
        running.join(20)
        assert not running.is_alive()
    finally:
        goes_on.set()
        running.join()


async def test_a_worker_without_patience_does_what_there_is_to_do(sampler: Sampler) -> None:
    await publish(sampler.buffer, TrainState(1, 0))
    with pytest.raises(NotReadyError, match="wait, and nobody takes them"):
        await produce_loop(AsyncProduceStrategy(), ScriptedLoop(), sampler, 2, timeout=0)
    assert await sampler.buffer.count(TASK, Status.COMPLETED) == 2


SIZE = 3


class CancelledFrom(CancelledAt):
    """Cancels also at the waits after the n-th, `times` times in all."""

    def __init__(self, call: Awaitable[Any], number: int, moment: str, times: int) -> None:
        super().__init__(call, number, moment)
        self._left = times

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
    finished, _ = await asyncio.wait([task], timeout=20)
    assert finished, f"cancelled at wait {number} {moment}, it hangs"
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
    await produce(SyncProduceStrategy(), loop, sampler, SIZE, timeout=20)


async def async_batch(loop: ScriptedLoop, sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(
        over_sample=1.0, pause_timeout=0.05, enable_partial_rollout=True, max_staleness=3, tail_batch_trigger_size=2
    )
    await produce(strategy, loop, sampler, SIZE, timeout=20)


async def worker(loop: ScriptedLoop, sampler: Sampler) -> None:
    """Which loads weights twice, and is stopped when a batch is there."""
    stop = asyncio.Event()
    remaining = [SIZE]

    def count(_: Any) -> None:
        remaining[0] -= 1
        if not remaining[0]:
            stop.set()

    async def load(state: TrainState) -> None:
        await asyncio.sleep(0)
        if state.model_step == 0:
            await publish(sampler.buffer, TrainState(2, 1))

    await publish(sampler.buffer, TrainState(1, 0))
    strategy = AsyncProduceStrategy(over_sample=1.0, pause_timeout=0.05, enable_partial_rollout=True, on_group=count)
    await produce_loop(strategy, loop, sampler, SIZE, load_weights=load, stop=stop, timeout=20)


async def step_through(buffer: ReplayBuffer, production: Production, moment: str, times: int, stride: int) -> None:
    """Cancel it at the first wait, the one `stride` later, and so on, each time with a new task."""
    number, was_cancelled = 1, True
    while was_cancelled:  # the last time it comes to its end before
        sampler = Sampler(buffer, prompts(9), f"{number} {moment}", epochs=1)
        loop = script()
        was_cancelled = await ended(production(loop, sampler), number, moment, times)
        assert loop.running == 0
        # PostgreSQL may be undoing a cancelled draw, over another connection.
        await until_equal(0, lambda task_name=sampler.task_name: leased(buffer, task_name))
        await assert_accounted(sampler)
        await finish(sampler)
        number += stride
    assert number > 8


async def finish(sampler: Sampler) -> None:
    """What was cancelled goes on: all prompts come to their end."""
    strategy = AsyncProduceStrategy(should_continue=lambda completed, size: completed < size)
    await produce(strategy, ScriptedLoop(Script(tokens=1, seconds=0)), sampler, 8, train_step=2, model_step=1)
    for status in (Status.INIT, Status.ABORTED, Status.EXPIRED, Status.FAILED):
        assert len(await items_of(sampler.buffer, status, sampler.task_name)) <= 1
    await sampler.buffer.delete({})


#: How often in a row, and at every so many waits: at all of them in the long form.
CASES = [
    pytest.param("memory", 1, 1),
    pytest.param("memory", 3, 1),
    pytest.param("sqlite", 3, 8),
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
