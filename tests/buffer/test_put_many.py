"""Many groups in one call: their order, their options, and who of them is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaybuf import FullError, ReplayBuffer, Status
from replaybuf.errors import ConflictError, InputError, PartlyStoredError, RolloutError
from tests.stores import TASK, build, group


@pytest.fixture
async def buffer(url: str) -> Any:
    async with build(url, policy="fifo") as new_buffer:
        yield new_buffer


async def test_the_uids_are_in_the_order_of_the_groups(buffer: ReplayBuffer) -> None:
    uids = await buffer.put_many([group(n) for n in range(600)], TASK)
    assert uids == sorted(set(uids))
    first = await buffer.get(2, TASK)
    assert [rollouts[0].rollout_id for rollouts in first] == [0, 1]


async def test_each_group_may_have_a_task_and_options_of_its_own(buffer: ReplayBuffer) -> None:
    options: list[Any] = [{"priority": 2.0}, {"tags": {"a": 1}}, {}]
    uids = await buffer.put_many([group(0), group(1), []], ["math", "code", "math"], each=options, priority=0.5)
    assert uids[2] is None
    items = {item.uid: item async for item in buffer.find({})}
    assert [(items[uid].task_name, items[uid].priority, items[uid].tags) for uid in uids[:2]] == [
        ("math", 2.0, None),
        ("code", 0.5, {"a": 1}),
    ]


async def test_a_group_that_is_refused_leaves_the_others_stored(buffer: ReplayBuffer) -> None:
    refused = group(1)
    refused[0].extra_fields["x"] = object()
    with pytest.raises(PartlyStoredError, match=r"2 of 4 groups were not stored.*groups\[1\]") as caught:
        await buffer.put_many([group(0), refused, group(2), group(3)], TASK, each=[{}, {}, {"replaces": [10**6]}, {}])
    results = caught.value.results
    assert isinstance(results[1], RolloutError)
    assert isinstance(results[2], ConflictError)
    assert sorted([item.uid async for item in buffer.find({})]) == [results[0], results[3]]


async def test_what_refuses_all_groups_is_raised_as_it_is(buffer: ReplayBuffer) -> None:
    with pytest.raises(RolloutError):
        await buffer.put_many([[{"no": "rollout"}], [{"no": "rollout"}]], TASK)
    assert await buffer.put_many([], TASK) == []
    assert len(buffer) == 0


async def test_groups_without_room_wait_for_it(url: str) -> None:
    async with build(url, policy="fifo", capacity=2, on_full="block", put_timeout=20) as buffer:
        putting = asyncio.create_task(buffer.put_many([group(n) for n in range(5)], TASK))
        groups: list[Any] = []
        while len(groups) < 5:
            batch, _ = await buffer.take_batch({TASK: 1}, timeout=20)
            groups += batch[TASK]
        assert len(set(await putting)) == 5
        assert sorted(rollouts[0].rollout_id for rollouts in groups) == [0, 1, 2, 3, 4]


async def test_groups_without_room_are_refused_one_by_one(url: str) -> None:
    async with build(url, capacity=2, on_full="reject") as buffer:
        with pytest.raises(PartlyStoredError) as caught:
            await buffer.put_many([group(n) for n in range(3)], TASK)
        assert [isinstance(result, FullError) for result in caught.value.results] == [False, False, True]


async def test_groups_that_expire_are_dropped_and_counted(buffer: ReplayBuffer) -> None:
    options: Any = {"model_step": 1, "current_train_step": 9, "stale_threshold": 2, "expired_groups_retryable": False}
    assert await buffer.put_many([group(0), group(1)], TASK, **options) == [None, None]
    assert (await buffer.metrics())["tasks"][TASK]["dropped"] == 2


async def test_lists_of_another_length_store_nothing(buffer: ReplayBuffer) -> None:
    for arguments, options in ((["math"], {}), ("math", {"each": [{}]})):
        with pytest.raises(InputError, match="for 2 groups: give one for each"):
            await buffer.put_many([group(0), group(1)], arguments, **options)
    assert await buffer.count(TASK, Status.COMPLETED) == 0


async def test_cancelled_each_group_is_stored_wholly_or_not_at_all(buffer: ReplayBuffer) -> None:
    for turn in range(10):
        putting = asyncio.create_task(buffer.put_many([group(n) for n in range(100)], TASK))
        await asyncio.sleep(0.002 * turn)
        putting.cancel()
        await asyncio.wait([putting])
    items = [item async for item in buffer.find({})]
    assert all(len(item.item) == len(group(0)) for item in items)
    assert await buffer.count(TASK, Status.COMPLETED) == len(items)


@pytest.mark.parametrize("expires", [False, True])
async def test_cancelled_the_list_of_what_is_dropped_is_complete(url: str, expires: bool) -> None:
    """Whatever moment it is cancelled at: of groups that leave for the new ones, and of new ones that aren't stored."""
    stale: Any = {"model_step": 1, "current_train_step": 9, "stale_threshold": 2, "expired_groups_retryable": False}
    async with build(url, capacity=2) as buffer:
        await buffer.put_many([group(0), group(1)], TASK)
        for turn in range(20):
            dropped: list[Any] = []
            options: Any = (stale if expires else {}) | {"dropped": dropped}
            putting = asyncio.create_task(buffer.put_many([group(2), group(3)], TASK, **options))
            for _ in range(turn):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait([putting])
            at_the_end = len(dropped)
            await buffer.put_many([group(4)], TASK)  # comes after what is still to be done for the first
            assert len(dropped) == at_the_end
