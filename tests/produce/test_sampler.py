"""Samplers: groups of independent rollouts with ids of their own, in an order that a seed says, over restarts."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import InputError
from replaybuf.produce import Sampler, SyncProduceStrategy, batch_sizes
from tests.produce.laws import drawn, ids, questions
from tests.produce.scripted import ScriptedLoop, prompts
from tests.stores import TASK, build


async def test_a_prompt_becomes_a_group_of_k_rollouts_with_ids_of_their_own(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(10), TASK, prompt_repeat_k=3)
    for number, prompt in enumerate(await drawn(sampler, 4)):
        assert [rollout.group_id for rollout in prompt.group] == [number] * 3
        assert [rollout.rollout_id for rollout in prompt.group] == [3 * number, 3 * number + 1, 3 * number + 2]
        assert {rollout.task_name for rollout in prompt.group} == {TASK}
        assert {rollout.status for rollout in prompt.group} == {Status.INIT}


async def test_the_rollouts_of_a_group_share_nothing(buffer: ReplayBuffer) -> None:
    """Neither with each other nor with the dataset."""
    record = {"message": [{"role": "user", "content": "2 + 2"}], "extra_fields": {"seen": []}, "prompt_ids": [1]}
    (prompt,) = await Sampler(buffer, [record], TASK, prompt_repeat_k=2).draw()
    first, second = prompt.group
    first.message[0]["content"] = "3 + 3"
    first.extra_fields["seen"].append(1)
    first.prompt_ids.append(2)
    assert second.message == [{"role": "user", "content": "2 + 2"}]
    assert (second.extra_fields, second.prompt_ids) == ({"seen": []}, [1])
    assert record == {
        "message": [{"role": "user", "content": "2 + 2"}],
        "extra_fields": {"seen": []},
        "prompt_ids": [1],
    }


async def test_ids_are_unique_over_epochs(buffer: ReplayBuffer) -> None:
    found = await drawn(Sampler(buffer, prompts(3), TASK, prompt_repeat_k=2, epochs=3), 99)
    assert ids(found) == list(range(9))
    assert [rollout.rollout_id for one in found for rollout in one.group] == list(range(18))
    assert questions(found) == ["0", "1", "2"] * 3


async def test_ids_are_unique_over_samplers_that_draw_at_once(url: str) -> None:
    async with build(url) as buffer, build(url) as other:
        buffers = [buffer, buffer if url == "memory://" else other]
        samplers = [Sampler(one, prompts(10), TASK, epochs=3) for one in (*buffers, *buffers)]
        found = [one for part in await asyncio.gather(*(drawn(one, 99) for one in samplers)) for one in part]
        assert sorted(ids(found)) == list(range(30))


async def test_another_size_of_groups_after_a_restart(shared_url: str) -> None:
    """Their ids are theirs: those of prompts that come back stay."""
    async with build(shared_url) as buffer:
        (prompt,) = await Sampler(buffer, prompts(4), TASK, prompt_repeat_k=2).draw()
        await prompt.give_back()
        again, new = await drawn(Sampler(buffer, prompts(4), TASK, prompt_repeat_k=4), 2)
        assert [rollout.rollout_id for rollout in again.group] == [0, 1]
        assert [rollout.rollout_id for rollout in new.group] == [4, 5, 6, 7]


async def test_nothing_is_read_before_it_is_drawn(buffer: ReplayBuffer) -> None:
    read: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, number: int) -> dict[str, str]:
            read.append(number)
            return {"prompt": "x"}

    sampler = Sampler(buffer, Lazy(), TASK)
    assert read == []
    await sampler.draw(3)
    assert read == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        *({"prompt_repeat_k": repeat} for repeat in (0, 1.5)),
        *({"epochs": -1}, {"epochs": 1.5}, {"shuffle": -1}, {"seconds": 0}, {"name": ""}, {"again": ["no such"]}),
    ],
)
async def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="status" if "again" in options else next(iter(options))):
        Sampler(build("memory://"), prompts(2), TASK, **options)


async def leave(sampler: Sampler, status: Status) -> None:
    """The next prompt of the dataset comes to wait in the buffer."""
    (prompt,) = await sampler.draw(again=[])
    for rollout in prompt.group:
        rollout.status, rollout.response, rollout.response_ids = status, "so far", [5, 6]
    await prompt.finish(model_step=1)


async def test_interrupted_prompts_come_first_then_expired_ones_then_new_ones(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(9), TASK)
    for status in (Status.EXPIRED, Status.ABORTED, Status.EXPIRED, Status.ABORTED, Status.COMPLETED):
        await leave(sampler, status)
    found = await drawn(sampler, 6)
    assert questions(found) == ["1", "3", "0", "2", "5", "6"]
    assert [one.group[0].response for one in found[:2]] == ["so far"] * 2
    assert found[0].group[0].response_model_steps == [1, 1]
    assert found[0].status == Status.ABORTED


async def test_the_order_of_statuses_is_that_which_was_asked_for(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(9), TASK, again=["expired", "aborted"])
    for status in (Status.ABORTED, Status.EXPIRED):
        await leave(sampler, status)
    assert questions(await drawn(sampler, 3)) == ["1", "0", "2"]


async def test_a_sampler_of_new_prompts_leaves_what_waits_in_the_buffer(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(3), TASK, epochs=1, again=[])
    await leave(sampler, Status.ABORTED)
    assert questions(await drawn(sampler, 9)) == ["1", "2"]
    counts = await sampler.counts()
    assert (counts.drawn, counts.in_flight, counts.waiting, counts.finished) == (3, 2, 0, 1)


async def test_a_dataset_that_fails_ends_the_batch(buffer: ReplayBuffer) -> None:
    class Broken:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> dict[str, str]:
            if number == 2:
                raise OSError("the disk is gone")
            return {"prompt": "x"}

    sampler = Sampler(buffer, Broken(), TASK)
    with pytest.raises(OSError, match="the disk is gone"):
        await SyncProduceStrategy(max_concurrency=1).produce_batch(
            ScriptedLoop(), sampler, 4, train_step=1, model_step=0, timeout=30
        )
    assert await buffer.count(TASK, Status.COMPLETED) == 2


# A batch is divided among tasks by their weights

WEIGHTS = st.dictionaries(st.text("abc", min_size=1), st.floats(0, 1e308), min_size=1).filter(
    lambda one: any(one.values())
)


@given(WEIGHTS, st.integers(0, 5000))
def test_the_sizes_add_up_and_are_within_one_of_the_shares(weights: dict[str, float], size: int) -> None:
    sizes = batch_sizes(weights, size)
    total = math.fsum(weight / max(weights.values()) for weight in weights.values())
    assert sum(sizes.values()) == size
    for task, weight in weights.items():
        assert abs(sizes[task] - size * (weight / max(weights.values()) / total)) < 1 + 1e-6


def test_what_rounding_leaves_goes_to_those_that_lost_most_the_first_of_equal_ones() -> None:
    assert batch_sizes({"a": 1, "b": 1, "c": 1}, 8) == {"a": 3, "b": 3, "c": 2}
    assert batch_sizes({"a": 0.2, "b": 0.8, "c": 0}, 8) == {"a": 2, "b": 6, "c": 0}
    assert batch_sizes({"a": 3, "b": 1}, 0) == {"a": 0, "b": 0}


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1, "b": 2}, {"a": math.inf}, {"a": math.nan}, {"a": "1"}, 3])
def test_weights_that_mean_nothing_are_refused(weights: Any) -> None:
    with pytest.raises(InputError):
        batch_sizes(weights, 4)
