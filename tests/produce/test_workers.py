"""Workers of production, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from replaybuf import FencedError, NotReadyError, ReplayBuffer, Status
from replaybuf.errors import InputError, ProduceError
from replaybuf.produce import (
    AsyncProduceStrategy,
    ProduceSummary,
    Sampler,
    SyncProduceStrategy,
    TrainState,
    produce_loop,
    publish,
)
from replaybuf.storage.sql.engine.transaction import Hook, installed
from replaybuf.storage.sql.tasks import sweeper
from tests.produce.conftest import (
    Script,
    ScriptedLoop,
    assert_accounted,
    forever,
    items_of,
    leased,
    prompts,
    sampler_of,
)
from tests.stores import TASK, build, group, until

STRATEGY = AsyncProduceStrategy(over_sample=0.5, pause_timeout=2)


@pytest.fixture
def sampler(buffer: ReplayBuffer) -> Sampler:
    return sampler_of(buffer, 400)


@asynccontextmanager
async def working(
    loop: ScriptedLoop, sampler: Sampler, strategy: AsyncProduceStrategy = STRATEGY, size: int = 4, **options: Any
) -> AsyncIterator[asyncio.Task[ProduceSummary]]:
    """A worker at work, which is cancelled at the end if it has not ended by itself."""
    options = {"timeout": 30} | options
    task = asyncio.create_task(produce_loop(strategy, loop, sampler, size, **options))
    try:
        yield task
    finally:
        if task.cancel():
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def completed(buffer: ReplayBuffer, count: int) -> None:
    await buffer.wait_ready({TASK: count}, timeout=20)


async def stands_still(buffer: ReplayBuffer) -> int:
    """How many groups are completed, when there are some, and no more than before for some looks of a worker's."""
    count, same_count = -1, 0
    while same_count < 4:
        now = await buffer.count(TASK, Status.COMPLETED)
        count, same_count = now, (same_count + 1 if now == count > 0 else 0)
        await asyncio.sleep(0.1)
    return count


async def test_a_worker_keeps_a_batch_and_what_runs_ahead_in_the_buffer_and_no_more(sampler: Sampler) -> None:
    buffer, loop = sampler.buffer, ScriptedLoop()
    await publish(buffer, TrainState(1, 0))
    async with working(loop, sampler) as task:
        assert await stands_still(buffer) == 6
        assert loop.most <= 6
        await buffer.take_batch({TASK: 4})
        await completed(buffer, 6)
        assert await stands_still(buffer) == 6
        await publish(buffer, TrainState(2, 1, finished=True))
        assert (await asyncio.wait_for(task, 10)).produced == 10
    assert await leased(buffer) == 0


async def test_workers_together_keep_what_one_alone_would(shared_url: str) -> None:
    """More only by their races: each may begin what it saw room for at the same moment."""
    async with build(shared_url) as first, build(shared_url) as second, build(shared_url) as third:
        await publish(first, TrainState(1, 0))
        loops = [ScriptedLoop(Script(seconds=0.005)) for _ in range(3)]
        samplers = [sampler_of(buffer, 400) for buffer in (first, second, third)]
        async with contextlib.AsyncExitStack() as stack:
            for loop, sampler in zip(loops, samplers, strict=True):
                await stack.enter_async_context(working(loop, sampler))
            count = await stands_still(first)
            assert 6 <= count <= 3 * 6
            await first.take_batch({TASK: count})
            await completed(first, 6)
        groups = sorted(number for loop in loops for number in loop.order)
        assert groups == list(range(len(groups)))


class Looks(Hook):
    """Counts the looks of workers at the trainer's state, and of sweeps, and the writes of this process."""

    def __init__(self) -> None:
        self.workers = self.sweeps = self.writes = 0

    def statement(self, sql: str, values: Any, many: bool) -> None:
        self.workers += "FROM rb_cursor" in sql
        self.sweeps += "rb_past" in sql and "leased_until" in sql
        self.writes += sql == "BEGIN IMMEDIATE"


@pytest.mark.parametrize("waits_for", ["a trainer", "room", "a group"])
async def test_a_worker_looks_at_the_store_when_it_has_changed(
    tmp_path: Path, waits_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the clock: in the time of three sweeps, hardly more often than something was written."""
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 0.5)
    async with build(f"sqlite:///{tmp_path}/idle.db") as buffer:
        loop = ScriptedLoop(forever() if waits_for == "a group" else Script())
        if waits_for != "a trainer":
            await publish(buffer, TrainState(1, 0))
        async with working(loop, sampler_of(buffer, 400)):
            if waits_for == "room":
                await completed(buffer, 6)
            await asyncio.sleep(0)
            with installed(looks := Looks()):
                await until(lambda: looks.sweeps >= 3)
            assert looks.workers <= looks.writes + 4
            if waits_for == "a trainer":
                await publish(buffer, TrainState(1, 0))
            elif waits_for == "room":
                await buffer.take_batch({TASK: 6})
            await until(lambda: len(loop.order) == (12 if waits_for == "room" else 6))


@pytest.mark.parametrize("on_full", ["block", "reject"])
async def test_the_capacity_holds_workers_back(url: str, on_full: str) -> None:
    async with build(url, capacity=5, on_full=on_full) as buffer:
        sampler, loop = sampler_of(buffer, 400), ScriptedLoop()
        await publish(buffer, TrainState(1, 0))
        strategy = AsyncProduceStrategy(over_sample=5)
        async with working(loop, sampler, strategy, size=4):
            assert await stands_still(buffer) == 5
            await buffer.take_batch({TASK: 3})
            await completed(buffer, 5)
            assert await stands_still(buffer) == 5
        assert len(loop.order) == 8  # nothing was generated for which there was no room


class Weights:
    """Notes what is loaded, and whether anything was being generated then."""

    def __init__(self, loop: ScriptedLoop, gives: Callable[[TrainState], int | None] = lambda state: None) -> None:
        self.loaded: list[int] = []
        self.busy: list[int] = []
        self._loop, self._gives = loop, gives

    async def __call__(self, state: TrainState) -> int | None:
        self.loaded.append(state.model_step)
        self.busy.append(self._loop.running)
        await asyncio.sleep(0.01)
        self.busy.append(self._loop.running)
        return self._gives(state)


@pytest.mark.parametrize("partial", [True, False])
async def test_new_weights_are_loaded_while_nothing_is_generated(sampler: Sampler, partial: bool) -> None:
    script = Script(tokens=12, seconds=0.01)
    buffer, loop = sampler.buffer, ScriptedLoop(script)
    weights = Weights(loop)
    strategy = AsyncProduceStrategy(over_sample=0.5, enable_partial_rollout=partial)
    await publish(buffer, TrainState(0, 0))
    async with working(loop, sampler, strategy, load_weights=weights):
        for step in range(3):
            script.tokens = 10**9 if partial else 12  # then nothing is done before the worker hears of the weights
            await until(lambda: loop.running > 0)
            await publish(buffer, TrainState(step + 1, step + 1, weights=f"weights-{step + 1}"))
            await until(lambda step=step: weights.loaded[-1] == step + 1)
            script.tokens = 12
            await completed(buffer, 4)
            await buffer.take_batch({TASK: 4})
    assert weights.loaded == [0, 1, 2, 3]
    assert set(weights.busy) == {0}
    assert (loop.pauses > 0) == partial
    assert await leased(buffer) == 0


async def test_weights_may_lag_by_max_lag(sampler: Sampler) -> None:
    loop = ScriptedLoop()
    weights = Weights(loop)
    await publish(sampler.buffer, TrainState(0, 0))
    async with working(loop, sampler, load_weights=weights, max_lag=2):
        for step in range(1, 7):
            await completed(sampler.buffer, 4)
            await publish(sampler.buffer, TrainState(step, step))
            await sampler.buffer.take_batch({TASK: 4})
            await asyncio.sleep(0.25)
        await completed(sampler.buffer, 4)
    assert weights.loaded == [0, 3, 6]


async def test_weights_that_are_too_old_are_loaded_anew_though_they_may_lag(sampler: Sampler) -> None:
    loop = ScriptedLoop()
    weights = Weights(loop)
    await publish(sampler.buffer, TrainState(1, 0))
    strategy = AsyncProduceStrategy(max_staleness=1)
    async with working(loop, sampler, strategy, load_weights=weights, max_lag=50):
        await completed(sampler.buffer, 4)
        await sampler.buffer.take_batch({TASK: 4})
        await publish(sampler.buffer, TrainState(8, 7))
        await until(lambda: weights.loaded == [0, 7])
        await completed(sampler.buffer, 4)


async def test_a_loader_says_which_weights_it_has_loaded(sampler: Sampler) -> None:
    """The trainer may have saved newer ones meanwhile, or these may be on their way still: then it isn't asked again
    and again."""
    loop = ScriptedLoop(Script(tokens=5, seconds=0.01))
    weights = Weights(loop, lambda state: state.model_step - 1)
    await publish(sampler.buffer, TrainState(7, 6))
    strategy = AsyncProduceStrategy(enable_partial_rollout=True)
    async with working(loop, sampler, strategy, load_weights=weights):
        await completed(sampler.buffer, 4)
    assert (weights.loaded, loop.pauses) == ([6], 0)
    assert {step for item in await items_of(sampler.buffer) for step in item.item[0].response_model_steps} == {5}


async def test_a_loader_that_raises_ends_the_worker(sampler: Sampler) -> None:
    async def load(state: TrainState) -> None:
        raise OSError("no such weights")

    await publish(sampler.buffer, TrainState(1, 0))
    with pytest.raises(OSError, match="no such weights"):
        await produce_loop(STRATEGY, ScriptedLoop(), sampler, 4, load_weights=load, timeout=10)
    await assert_accounted(sampler)


@pytest.mark.parametrize("finished", [True, False])
async def test_finished_or_a_stop_ends_workers_and_interrupts_what_they_generate(
    sampler: Sampler, finished: bool
) -> None:
    stop, loop = asyncio.Event(), ScriptedLoop(scripts={0: forever()})
    await publish(sampler.buffer, TrainState(1, 0))
    async with working(loop, sampler, stop=stop) as task:
        await completed(sampler.buffer, 5)
        if finished:
            await publish(sampler.buffer, TrainState(2, 1, finished=True))
        else:
            stop.set()
        summary = await asyncio.wait_for(task, 10)
    assert summary.interrupted == 1
    assert (loop.running, loop.paused) == (0, True)
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
    "no prompts": (
        TrainState(1, 0),
        3,
        {},
        r"no prompt is left in the dataset \(0 in flight\), and the trainer has not finished",
    ),
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
        await produce_loop(strategy, ScriptedLoop(), sampler_of(buffer, size), 4, timeout=0.5)


async def test_a_long_generation_is_no_reason_to_give_up(sampler: Sampler) -> None:
    await publish(sampler.buffer, TrainState(1, 0))
    loop = ScriptedLoop(Script(tokens=1, seconds=0.8))
    async with working(loop, sampler, timeout=0.2):
        await completed(sampler.buffer, 6)


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
        sampler = sampler_of(buffer, 400)
        await publish(buffer, TrainState(1, 0))
        await buffer.checkpoint(1)
        loop = ScriptedLoop(Script(tokens=1, seconds=0.4) if running else Script())
        async with build(shared_url) as trainer:
            async with working(loop, sampler) as task:
                await until(lambda: (loop.running if running else len(loop.order)) == 6)
                await trainer.restore(1)
                await asyncio.wait([task], timeout=10)
                with pytest.raises(FencedError):
                    task.result()
            assert await trainer.count(TASK, Status.COMPLETED) == 0
            assert await leased(trainer) == 0


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
        valid_arguments = {
            "strategy": STRATEGY,
            "agent_loop": ScriptedLoop(),
            "sampler": Sampler(buffer, prompts(2), TASK),
            "batch_size": 2,
        }
        start = time.monotonic()
        with pytest.raises(InputError, match=message):
            await produce_loop(**(valid_arguments | changed))
        assert time.monotonic() - start < 5


async def test_a_batch_that_the_limits_can_never_deliver_is_refused() -> None:
    async with build("memory://", capacity=4, on_full="block") as buffer:
        sampler = Sampler(buffer, prompts(9), TASK)
        with pytest.raises(InputError, match="would wait for ever"):
            await produce_loop(STRATEGY, ScriptedLoop(), sampler, 5)
        with pytest.raises(InputError, match="would wait for ever"):
            await STRATEGY.produce_batch(ScriptedLoop(), sampler, 5, train_step=1, model_step=0)
