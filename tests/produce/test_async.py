"""Asynchronous production: runs ahead, never idle, never more than allowed; what is left over is interrupted."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf import ConfigError, Status
from replaybuf.errors import ProduceError
from replaybuf.produce import AsyncProduceStrategy, Sampler
from tests.produce.clock import Clock, ClockedLoop
from tests.produce.laws import ids, items_of, produce, take
from tests.produce.scripted import Script, ScriptedLoop, forever, prompts
from tests.stores import TASK, build


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
    assert not set(ids(await take(sampler.buffer, 4))) & {0, 2}
    assert loop.most == 6


@pytest.mark.parametrize(("most", "expected"), [(None, 12), (5, 5), (1, 1), (100, 12)])
async def test_concurrency_is_full_and_never_over_the_limit(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, most: int | None, expected: int
) -> None:
    clock = Clock()
    clock.governs(monkeypatch)
    loop = ClockedLoop(clock)
    await produce(AsyncProduceStrategy(over_sample=0.5, max_concurrency=most), loop, sampler, 8)
    assert loop.most == expected


@pytest.mark.parametrize("most", [1, 3, 4])
async def test_it_is_never_idle_while_work_is_there(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Whenever a group is done, the next one begins, before any other is done: at each moment as many are generated as
    are allowed, or as the batch still needs."""
    clock, idle = Clock(), []
    clock.governs(monkeypatch)

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        needed = 12 - await sampler.buffer.count(TASK, Status.COMPLETED)
        idle.append(min(most, needed) - loop.running)

    chance = [7, 1, 3, 12, 2, 5, 1, 1, 4, 9]
    scripts = {number: Script(tokens=chance[number % 10], seconds=1) for number in range(60)}
    scripts[5] = Script(tokens=2, failures=2, seconds=1)
    scripts[8] = Script(tokens=2, status=Status.FILTERED, seconds=1)
    loop = ClockedLoop(clock, scripts=scripts)
    loop.sleep = sleep
    await produce(AsyncProduceStrategy(max_concurrency=most), loop, sampler, 12)
    assert set(idle) == {0}
    assert loop.most == most


async def test_what_was_produced_ahead_is_there_for_the_next_batch(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(over_sample=1.0), ScriptedLoop(Script(deaf=True))
    first = await produce(strategy, loop, sampler, 3)
    assert first.produced == 6  # those in flight were completed before they noticed the pause
    await take(sampler.buffer, 3)
    second = await produce(strategy, loop, sampler, 3)
    assert (second.produced, second.reused) == (0, 3)


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


@pytest.mark.parametrize("partial", [True, False])
async def test_completed_rollouts_of_an_interrupted_group_stay(sampler: Sampler, partial: bool) -> None:
    """Only the others are generated again."""

    class SecondHangs(ScriptedLoop):
        async def _generate(self, group: Any, script: Script, call: int, partial: bool) -> None:
            if group[0].group_id == 1 and call == 1:
                await super()._generate(group[:1], script, call, partial)
                await super()._generate(group[1:], forever(), call, partial)
            else:
                await super()._generate(group, script, call, partial)

    loop = SecondHangs()
    strategy = AsyncProduceStrategy(over_sample=0.5, enable_partial_rollout=partial)
    await produce(strategy, loop, sampler, 2)
    (item,) = await items_of(sampler.buffer, Status.ABORTED)
    assert [rollout.status for rollout in item.item] == [Status.COMPLETED, Status.ABORTED]
    assert item.item[0].response == "012"
    await take(sampler.buffer, await sampler.buffer.count(TASK, Status.COMPLETED))
    await produce(strategy, loop, sampler, 2, train_step=8, model_step=7)
    (item,) = [item for item in await items_of(sampler.buffer, Status.COMPLETED) if ids([item]) == [1]]
    assert item.item[0].response_model_steps == [0, 0, 0]
    assert set(item.item[1].response_model_steps) <= ({0, 7} if partial else {7})


async def test_leftovers_are_produced_at_the_end_of_the_dataset(url: str) -> None:
    """Also those that would wait for a tail batch."""
    async with build(url) as buffer:
        sampler = Sampler(buffer, prompts(7), TASK, epochs=1)
        strategy = AsyncProduceStrategy(
            over_sample=0.5, enable_partial_rollout=True, tail_batch_trigger_size=5, tail_batch_max_tries=1
        )
        loop = ScriptedLoop(scripts={number: Script(tokens=30, seconds=0.005) for number in (0, 1)})
        trained: list[int] = []
        for size in (3, 3, 1):
            await produce(strategy, loop, sampler, size)
            trained += ids(await take(buffer, size))
        assert sorted(trained) == list(range(7))
        with pytest.raises(ProduceError, match="no prompt is left in the dataset"):
            await produce(strategy, loop, sampler, 1)
