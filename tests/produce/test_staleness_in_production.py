"""What is too old for a batch: it expires, is generated again, and weights that are too old generate nothing."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf import Status
from replaybuf.errors import ProduceError
from replaybuf.produce import AsyncProduceStrategy, Sampler
from tests.produce.laws import ids, items_of, produce, take
from tests.produce.scripted import ScriptedLoop, forever
from tests.stores import TASK


@pytest.mark.parametrize(
    ("most", "interval", "threshold"), [(None, 1, None), (0, 1, 1), (2, 1, 3), (0, 4, 4), (1, 4, 8), (3, 2, 8)]
)
def test_staleness_is_counted_in_updates_of_the_weights(most: int | None, interval: int, threshold: int | None) -> None:
    for name, of in (("max_staleness", "stale_threshold"), ("max_token_staleness", "token_stale_threshold")):
        options: dict[str, Any] = {name: most, "sync_weights_interval": interval}
        assert getattr(AsyncProduceStrategy(**options).expiry, of) == threshold


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


async def test_without_a_bound_nothing_expires(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(), ScriptedLoop()
    await produce(strategy, loop, sampler, 3, train_step=1, model_step=0)
    summary = await produce(strategy, loop, sampler, 3, train_step=1000, model_step=0)
    assert (summary.expired, summary.reused) == (0, 3)


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
    (again,) = [item for item in await items_of(sampler.buffer, Status.COMPLETED) if ids([item]) == [0]]
    assert set(again.item[0].response_model_steps) == {2}


async def test_a_trigger_of_minus_1_drops_what_expires_and_new_prompts_take_its_place(sampler: Sampler) -> None:
    strategy, loop = AsyncProduceStrategy(max_staleness=0, tail_batch_trigger_size=-1), ScriptedLoop()
    await produce(strategy, loop, sampler, 3, train_step=1, model_step=0)
    summary = await produce(strategy, loop, sampler, 3, train_step=2, model_step=1)
    assert (summary.expired, summary.produced, summary.continued) == (3, 3, 0)
    assert sorted(ids(await take(sampler.buffer, 3))) == [3, 4, 5]
    assert (len(sampler.buffer), await sampler.buffer.dropped(TASK)) == (0, 3)
