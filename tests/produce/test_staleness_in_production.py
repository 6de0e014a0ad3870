"""Production: tail batches, pauses, staleness."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from replaybuf import NotReadyError, ReplayBuffer, Status
from replaybuf.errors import ProduceError
from replaybuf.produce import AsyncProduceStrategy, ProduceSummary, Sampler
from tests.produce.conftest import Script, ScriptedLoop, assert_accounted, forever, ids, items_of, produce, take
from tests.stores import TASK, group


@pytest.mark.parametrize(
    ("most", "interval", "threshold"), [(None, 1, None), (0, 1, 1), (2, 1, 3), (0, 4, 4), (1, 4, 8), (3, 2, 8)]
)
def test_staleness_is_counted_in_updates_of_the_weights(most: int | None, interval: int, threshold: int | None) -> None:
    for name, field in (("max_staleness", "stale_threshold"), ("max_token_staleness", "token_stale_threshold")):
        options: dict[str, Any] = {name: most, "sync_weights_interval": interval}
        assert getattr(AsyncProduceStrategy(**options).expiry, field) == threshold


@pytest.mark.parametrize("name", ["max_staleness", "max_token_staleness"])
async def test_completed_groups_that_have_become_too_old_are_generated_again(sampler: Sampler, name: str) -> None:
    options: dict[str, Any] = {name: 1}
    strategy, loop = AsyncProduceStrategy(**options), ScriptedLoop()
    await produce(strategy, loop, sampler, 3, train_step=1, model_step=0)
    assert (await produce(strategy, loop, sampler, 3, train_step=2, model_step=0)).reused == 3  # staleness 1
    summary = await produce(strategy, loop, sampler, 3, train_step=3, model_step=2)
    assert (summary.expired, summary.reused, summary.continued, summary.produced) == (3, 0, 3, 3)
    batch = await take(sampler.buffer, 3)
    assert sorted(ids(batch)) == [0, 1, 2]
    assert {tuple(rollout.response_model_steps) for group in batch for rollout in group} == {(2, 2, 2)}


@pytest.mark.parametrize(("name", "stays"), [("max_staleness", False), ("max_token_staleness", True)])
async def test_partial_responses_expire_by_their_oldest_or_their_freshest_token(
    sampler: Sampler, name: str, stays: bool
) -> None:
    """The one begun at step 0 and continued at step 1 is 2 steps old at step 3 by the oldest, 1 by the freshest."""
    options: dict[str, Any] = {name: 1}
    strategy = AsyncProduceStrategy(over_sample=0.5, enable_partial_rollout=True, **options)
    loop = ScriptedLoop(scripts={0: forever()})
    for step in (0, 1):
        await produce(strategy, loop, sampler, 2, train_step=step + 1, model_step=step)
        await sampler.buffer.delete({"status": "completed"})
    (partial,) = await items_of(sampler.buffer, Status.ABORTED)
    assert set(partial.item[0].response_model_steps) == {0, 1}
    assert await strategy.refresh(sampler.buffer, TASK, 3) == (0 if stays else 1)
    assert await sampler.buffer.count(TASK, Status.ABORTED) == stays


@pytest.mark.parametrize("name", ["max_staleness", "max_token_staleness"])
async def test_weights_that_are_too_old_generate_nothing(sampler: Sampler, name: str) -> None:
    options: dict[str, Any] = {name: 1}
    strategy, loop = AsyncProduceStrategy(**options), ScriptedLoop()
    assert strategy.too_old(0, 3)
    assert not strategy.too_old(0, 2)
    with pytest.raises(ProduceError, match=r"weights of step 0 are too old for train step 3.*load newer weights"):
        await produce(strategy, loop, sampler, 3, train_step=3, model_step=0)
    assert loop.order == []
    assert (await produce(strategy, loop, sampler, 3, train_step=2, model_step=0)).produced == 3


async def test_a_continued_group_that_is_too_old_when_it_is_done_is_generated_again(sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(over_sample=0.5, enable_partial_rollout=True, max_staleness=1)
    loop = ScriptedLoop(scripts={0: forever()})
    await produce(strategy, loop, sampler, 2, train_step=1, model_step=0)
    await sampler.buffer.delete({"status": "completed"})
    loop.scripts.clear()
    summary = await produce(
        strategy.model_copy(update={"over_sample": 0.0}), loop, sampler, 4, train_step=3, model_step=2
    )
    assert (summary.expired, summary.produced) == (1, 4)
    (regenerated,) = [item for item in await items_of(sampler.buffer, Status.COMPLETED) if ids([item]) == [0]]
    assert set(regenerated.item[0].response_model_steps) == {2}


async def test_a_trigger_of_minus_1_drops_what_expires_and_new_prompts_take_its_place(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(max_staleness=0, tail_batch_trigger_size=-1), ScriptedLoop()
    await produce(strategy, loop, sampler, 3, train_step=1, model_step=0)
    summary = await produce(strategy, loop, sampler, 3, train_step=2, model_step=1)
    assert (summary.expired, summary.produced, summary.continued) == (3, 3, 0)
    assert sorted(ids(await take(sampler.buffer, 3))) == [3, 4, 5]
    assert (len(sampler.buffer), await sampler.buffer.dropped(TASK)) == (0, 3)


async def put(buffer: ReplayBuffer, number: int, status: Status, interrupted: int | None = None) -> None:
    rollouts = group(number, status=status)
    rollouts[0].group_id = number
    await buffer.put(rollouts, TASK, tags=None if interrupted is None else {"interrupted": interrupted})


E, A = Status.EXPIRED, Status.ABORTED
#: Settings, the groups 100, 101, ... that wait, with how often they were interrupted, and the order of generation.
CASES: dict[str, tuple[dict[str, Any], list[tuple[Status, int | None]], list[int]]] = {
    "too few have gathered": ({"tail_batch_trigger_size": 3}, [(E, None), (E, None)], [0, 1, 2]),
    "enough": ({"tail_batch_trigger_size": 3, "over_sample": 1.0}, [(E, None)] * 4, [100, 101, 102]),
    "interrupted often": (
        {"tail_batch_trigger_size": 3, "tail_batch_max_tries": 2, "over_sample": 1.0},
        [(A, 1), (A, 2), (A, 5), (E, None)],
        [103, 101, 102],
    ),
    "interrupted seldom, or by others": (
        {"tail_batch_trigger_size": 3, "tail_batch_max_tries": 2},
        [(A, 3), (A, 1), (A, None), (E, None)],
        [101, 102, 0],
    ),
    "only expired ones gather": ({"tail_batch_trigger_size": 2}, [(A, 9), (A, 9), (E, None)], [100, 101, 0]),
    "filled up": ({"tail_batch_trigger_size": 2}, [(E, None), (E, None), (A, 1)], [100, 101, 102, 0]),
    "no tail batches": ({}, [(E, None), (A, 9)], [101, 100, 0]),
    "expired ones stay where they are": ({"tail_batch_trigger_size": -1}, [(E, None), (A, 9)], [101, 0, 1]),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_generated_and_in_which_order(sampler: Sampler, name: str) -> None:
    """A tail batch has what has gathered first, and runs ahead of nothing."""
    options, waiting, order = CASES[name]
    for number, (status, interrupted) in enumerate(waiting, 100):
        await put(sampler.buffer, number, status, interrupted)
    loop = ScriptedLoop()
    await produce(AsyncProduceStrategy(**options), loop, sampler, len(order))
    assert loop.order == order


async def test_a_tail_batch_that_fails_gathers_again(sampler: Sampler) -> None:
    strategy = AsyncProduceStrategy(tail_batch_trigger_size=2, tail_batch_max_tries=1, pause_timeout=1)
    for number in (100, 101):
        await put(sampler.buffer, number, Status.EXPIRED)
    loop = ScriptedLoop(forever())
    with pytest.raises(TimeoutError):
        await produce(strategy, loop, sampler, 2, timeout=0.1)
    assert await strategy.again(sampler) == (
        True,
        [Status.EXPIRED, (Status.ABORTED, {"tags.interrupted": {"$gte": 1}}), Status.ABORTED],
    )
    loop.default = Script()
    await produce(strategy, loop, sampler, 2)
    assert sorted(ids(await take(sampler.buffer, 2))) == [100, 101]
    assert await sampler.buffer.count_where({}) == 0


STRATEGY = AsyncProduceStrategy(over_sample=0.5, pause_timeout=0.2, enable_partial_rollout=True)


async def run_scripted(loop: ScriptedLoop, sampler: Sampler) -> ProduceSummary:
    return await produce(STRATEGY, loop, sampler, 4)


async def test_a_deaf_loop_is_cancelled_and_nothing_of_the_call_is_kept(
    sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop(scripts={0: forever(deaf=True), 1: forever(deaf=True)})
    with caplog.at_level(logging.WARNING, "replaybuf.produce"):
        summary = await run_scripted(loop, sampler)
    assert 0.2 <= summary.seconds < 30
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
        await run_scripted(loop, sampler)
        await sampler.buffer.delete({"status": "completed"})
    assert await sampler.buffer.count(TASK, Status.FAILED) == 0
    assert ids(await items_of(sampler.buffer, Status.INIT)) == [0]


async def test_a_loop_that_ignores_its_cancellation_does_not_hold_up_the_batch(sampler: Sampler) -> None:
    """Its prompt stays in flight, and is stored when it is done."""
    loop = ScriptedLoop(scripts={0: forever(deaf=True, stubborn=True)})
    start = time.monotonic()
    produced = (await run_scripted(loop, sampler)).produced
    assert produced >= 4
    assert time.monotonic() - start < 10
    assert loop.running == 1
    loop.scripts[0].tokens = 1
    while loop.running:
        await sampler.buffer.storage.changed(5, sampler.buffer.storage.version())
    await sampler.buffer.wait_ready({TASK: produced + 1}, timeout=10)
    await assert_accounted(sampler)


async def test_generation_is_paused_between_batches_and_resumed_for_the_next(sampler: Sampler) -> None:
    loop = ScriptedLoop(scripts={0: forever()})
    for number in range(1, 3):
        await run_scripted(loop, sampler)
        assert (loop.running, loop.pauses) == (0, number)
        await sampler.buffer.delete({"status": "completed"})


async def hang(stubborn: bool, over: asyncio.Event) -> None:
    """Return when it is cancelled, or only when all is over."""
    while not over.is_set():
        try:
            await over.wait()
        except asyncio.CancelledError:
            if not stubborn:
                raise


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_pause_that_hangs_is_given_up(sampler: Sampler, stubborn: bool) -> None:
    """Also if it suppresses that it is cancelled."""
    over = asyncio.Event()

    class Hanging(ScriptedLoop):
        async def pause(self) -> None:
            await hang(stubborn, over)

    loop = Hanging(scripts={0: forever()})
    async with asyncio.timeout(30):
        summary = await run_scripted(loop, sampler)
    assert summary.seconds >= 0.2
    assert loop.running == 0
    await assert_accounted(sampler)
    over.set()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_resume_that_hangs_ends_the_batch(sampler: Sampler, stubborn: bool) -> None:
    over = asyncio.Event()

    class Hanging(ScriptedLoop):
        async def resume(self) -> None:
            await hang(stubborn, over)

    sentence = r"after 0.2 s: resume\(\) of the agent loop \(Hanging\) has not returned"
    async with asyncio.timeout(30):
        with pytest.raises(NotReadyError, match=sentence):
            await run_scripted(Hanging(), sampler)
    assert (await sampler.counts()).drawn == 0
    over.set()
    await asyncio.sleep(0.01)
