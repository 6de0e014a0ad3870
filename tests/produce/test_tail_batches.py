"""Tail batches: the slowest prompts are gathered, and generated to their end by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.produce import AsyncProduceStrategy, Sampler
from tests.produce.laws import ids, produce, take
from tests.produce.scripted import Script, ScriptedLoop, forever
from tests.stores import TASK, group


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
