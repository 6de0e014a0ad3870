"""Strategies: synchronous and asynchronous."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from replaybuf import ConfigError, NotReadyError, ReplayBuffer, Status
from replaybuf.errors import ProduceError
from replaybuf.produce import AsyncProduceStrategy, Sampler, SyncProduceStrategy
from tests.produce.conftest import (
    Clock,
    ClockedLoop,
    Script,
    ScriptedLoop,
    Told,
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
from tests.stores import TASK, because, build, group


async def test_a_batch_has_exactly_its_size(buffer: ReplayBuffer) -> None:
    sampler, loop = sampler_of(buffer), ScriptedLoop()
    for step in range(3):
        summary = await produce(SyncProduceStrategy(), loop, sampler, 4)
        assert (summary.produced, summary.reused) == (4, 0)
        assert await buffer.count(TASK, Status.COMPLETED) == 4
        assert sorted(ids(await take(buffer, 4))) == list(range(4 * step, 4 * step + 4))
    assert loop.order == list(range(12))
    assert await leased(buffer) == 0


async def test_rewards_are_counted_before_groups_are_filtered(sampler: Sampler) -> None:
    strategy = SyncProduceStrategy(is_valid=lambda group: group[0].group_id != 0)
    loop = ScriptedLoop(Script(reward=lambda place: place + 0.5))
    summary = await produce(strategy, loop, sampler, 3)
    assert (summary.produced, summary.filtered) == (3, 1)
    assert (summary.raw_rewards_sum, summary.raw_rewards_count) == (4 * (0.5 + 1.5), 8)


@pytest.mark.parametrize("unfit", [None, 100])
async def test_filtered_groups_leave_room_for_the_others(url: str, unfit: int | None) -> None:
    """With a filter that keeps one in four, a batch as large as the capacity is made."""
    strategy = SyncProduceStrategy(is_valid=lambda group: group[0].group_id % 4 == 0)
    async with build(url, capacity=8, unfit=unfit) as buffer:
        summary = await produce(strategy, ScriptedLoop(), sampler_of(buffer), 8)
        assert summary.produced == 8
        assert await buffer.count(TASK, Status.COMPLETED) == 8
        assert await buffer.count(TASK, Status.FILTERED) == (summary.filtered if unfit else 0)


async def test_groups_that_are_there_count(buffer: ReplayBuffer) -> None:
    await buffer.put(group(100), TASK)
    loop = ScriptedLoop()
    summary = await produce(SyncProduceStrategy(), loop, sampler_of(buffer), 4)
    assert (summary.produced, summary.reused) == (3, 1)
    summary = await produce(SyncProduceStrategy(), loop, sampler_of(buffer), 4)
    assert (summary.produced, summary.reused) == (0, 4)
    assert len(loop.order) == 3


async def test_a_prompt_that_always_fails_is_set_aside(url: str) -> None:
    hook = Told()
    async with build(url, max_deliveries=3) as buffer:
        sampler = sampler_of(buffer)
        loop = ScriptedLoop(scripts={1: Script(failures=99)})
        summary = await produce(SyncProduceStrategy(on_group=hook), loop, sampler, 3)
        assert (summary.produced, summary.retried, summary.failed) == (3, 2, 1)
        (failed,) = await items_of(buffer, Status.FAILED)
        assert ids([failed]) == [1]
        assert "ValueError: no luck" in str(failed.error)
        assert [generated.attempt for generated in hook.groups if generated.error] == [1, 2, 3]
        await assert_accounted(sampler)


@pytest.mark.parametrize(("most", "calls"), [(1, {1}), (0, {33, 34})])  # another may have begun by then
async def test_prompts_are_tried_max_deliveries_times_and_0_is_for_ever(url: str, most: int, calls: set[int]) -> None:
    async with build(url, max_deliveries=most) as buffer:
        sampler = sampler_of(buffer)
        loop = ScriptedLoop(scripts={0: Script(failures=99)})
        strategy = SyncProduceStrategy(max_failures=33)
        if most:
            await produce(strategy, loop, sampler, 2)
        else:
            with pytest.raises(ProduceError, match=r"3[34] groups in a row"):
                await produce(strategy, loop, sampler_of(buffer, 1), 20)
        assert loop.calls[0] in calls
        await assert_accounted(sampler)


async def test_a_loop_that_always_fails_ends_the_batch(buffer: ReplayBuffer) -> None:
    """It is not the prompts: none is set aside, or nearer to it than before."""
    sampler = sampler_of(buffer)
    with pytest.raises(ProduceError, match=r"([89]|1[01]) groups in a row .*ValueError: no luck; their"):
        await produce(SyncProduceStrategy(max_failures=8), ScriptedLoop(Script(failures=99)), sampler, 4)
    await assert_accounted(sampler)
    assert await buffer.count(TASK, Status.INIT) == 4
    assert [prompt.attempt for prompt in await sampler.draw(4)] == [1, 1, 1, 1]


async def test_prompts_that_a_broken_loop_has_used_up_are_prompts_again(url: str) -> None:
    """Those that failed before its last success are not."""
    async with build(url, max_deliveries=2) as buffer:
        sampler, loop = sampler_of(buffer), ScriptedLoop(scripts={0: Script(failures=99)})
        await produce(SyncProduceStrategy(max_concurrency=1), loop, sampler, 2)
        with pytest.raises(ProduceError, match="9 groups in a row"):
            await produce(
                SyncProduceStrategy(max_concurrency=1, max_failures=9), ScriptedLoop(Script(failures=99)), sampler, 4
            )
        assert ids(await items_of(buffer, Status.FAILED)) == [0]
        assert await buffer.count(TASK, Status.INIT) == 5


async def test_a_dataset_that_is_at_its_end_ends_the_batch(buffer: ReplayBuffer) -> None:
    message = r"3 of 4 completed groups, and no prompt is left in the dataset$"
    sampler = Sampler(buffer, prompts(3), TASK, prompt_repeat_k=2, epochs=1)
    with pytest.raises(ProduceError, match=message, check=because("exhausted")) as end:
        await produce(SyncProduceStrategy(), ScriptedLoop(Script(tokens=5)), sampler, 4)
    assert await buffer.count(TASK, Status.COMPLETED) == 3
    summary = end.value.summary
    assert (summary.produced, summary.tokens) == (3, 3 * 2 * 5)
    assert summary.seconds > 0


async def test_prompts_that_are_in_flight_elsewhere_are_waited_for(buffer: ReplayBuffer) -> None:
    sampler = sampler_of(buffer, 4)
    (prompt,) = await sampler.draw()
    with pytest.raises(NotReadyError, match=r"after 0.2 s: task math: 3 of 4 completed groups"):
        await produce(SyncProduceStrategy(), ScriptedLoop(), sampler, 4, timeout=0.2)
    await prompt.give_back()
    assert (await produce(SyncProduceStrategy(), ScriptedLoop(), sampler, 4)).produced == 1


async def test_a_timeout_says_what_is_missing_and_loses_nothing(buffer: ReplayBuffer) -> None:
    sampler, loop = sampler_of(buffer), ScriptedLoop(scripts={2: forever()})
    with pytest.raises(NotReadyError, match=r"after 0.3 s: task math: 3 of 4 completed groups"):
        await produce(SyncProduceStrategy(), loop, sampler, 4, timeout=0.3)
    assert Counter(str(item.status) for item in await items_of(buffer)) == {"completed": 3, "aborted": 1}
    await assert_accounted(sampler)


async def test_what_is_completed_as_the_time_is_over_counts(buffer: ReplayBuffer) -> None:
    """Interrupting the rest takes its time, too."""
    loop = ScriptedLoop(Script(tokens=1, seconds=0.3, deaf=True))
    assert (await produce(SyncProduceStrategy(), loop, sampler_of(buffer), 2, timeout=0.1)).produced == 2


@pytest.mark.parametrize(
    ("ratio", "size", "ahead"),
    [
        (0.0, 8, 0),
        (0.5, 3, 2),
        (0.29, 100, 29),
        (1.1, 10, 11),
        (1e-6, 64, 1),
    ],
)
def test_over_sample_is_rounded_up(ratio: float, size: int, ahead: int) -> None:
    assert AsyncProduceStrategy(over_sample=ratio).ahead(size) == ahead


@pytest.mark.parametrize(
    "options",
    [
        {"over_sample": float("nan")},
        {"tail_batch_trigger_size": -2},
        {"over_sample_threshold": 1},
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncProduceStrategy(**options)


async def test_the_slowest_do_not_hold_up_the_batch(sampler: Sampler) -> None:
    loop = ScriptedLoop(scripts={0: forever(), 2: forever()})
    summary = await produce(AsyncProduceStrategy(over_sample=0.5), loop, sampler, 4)
    assert summary.produced >= 4
    assert summary.interrupted == 2
    aborted = [rollout for item in await items_of(sampler.buffer, Status.ABORTED) for rollout in item.item]
    assert [rollout.response or "" for rollout in aborted] == [""] * 4  # without partial rollouts they begin anew
    assert not set(ids(await take(sampler.buffer, 4))) & {0, 2}
    assert loop.most == 6


@pytest.mark.parametrize("most", [1, 4, None])
async def test_it_is_never_idle_while_work_is_there(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    """Whenever a group is done, the next one begins, before any other is done: at each moment as many are generated as
    are allowed, or as the batch still needs."""
    clock, idle = Clock(), []
    clock.governs(monkeypatch)

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        needed = 12 - await sampler.buffer.count(TASK, Status.COMPLETED)
        idle.append(min(most or 12, needed) - loop.running)

    chance = [7, 1, 3, 12, 2, 5, 1, 1, 4, 9]
    scripts = {number: Script(tokens=chance[number % 10], seconds=1) for number in range(60)}
    scripts[5] = Script(tokens=2, failures=2, seconds=1)
    scripts[8] = Script(tokens=2, status=Status.FILTERED, seconds=1)
    loop = ClockedLoop(clock, scripts=scripts)
    loop.sleep = sleep
    await produce(AsyncProduceStrategy(max_concurrency=most), loop, sampler, 12)
    assert set(idle) == {0}
    assert loop.most == (most or 12)


async def test_interrupted_groups_are_continued_and_each_token_has_its_model_step(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    clock.governs(monkeypatch)

    loop = ClockedLoop(clock, Script(tokens=2, seconds=1), {0: Script(tokens=9, seconds=1)})
    strategy = AsyncProduceStrategy(over_sample=0.5, enable_partial_rollout=True)
    buffer = sampler.buffer
    steps: list[int] = []
    for step in range(20):
        await produce(strategy, loop, sampler, 2, train_step=step + 1, model_step=step)
        for item in await items_of(buffer):
            if ids([item]) == [0] and item.status == Status.COMPLETED:
                steps = [*item.item[0].response_model_steps, *item.item[1].response_model_steps]
                assert item.item[0].response_ids == list(range(9))
                assert item.item[0].response == "012345678"
                assert item.item[0].seq_staleness == step
                assert item.tags == {"interrupted": step}
        if steps:
            break
        await take(buffer, 2)
    assert len(steps) == 18
    assert steps == sorted(steps)
    assert set(steps) == set(range(step + 1))
    assert loop.calls[0] == step + 1


async def test_leftovers_are_produced_at_the_end_of_the_dataset(url: str) -> None:
    """Also those that would wait for a tail batch."""
    async with build(url) as buffer:
        sampler = sampler_of(buffer, 7)
        strategy = AsyncProduceStrategy(
            over_sample=0.5, enable_partial_rollout=True, tail_batch_trigger_size=5, tail_batch_max_tries=1
        )
        loop = ScriptedLoop(scripts={number: Script(tokens=30, seconds=0.005) for number in (0, 1)})
        trained_ids: list[int] = []
        for size in (3, 3, 1):
            await produce(strategy, loop, sampler, size)
            trained_ids += ids(await take(buffer, size))
        assert sorted(trained_ids) == list(range(7))
        with pytest.raises(ProduceError, match="no prompt is left in the dataset"):
            await produce(strategy, loop, sampler, 1)
