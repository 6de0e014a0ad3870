"""Groups that come back from a draw that nobody received, or that move while it waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from replaybuf import ReplayBuffer, Status
from tests.cancellation.conftest import ended, hold_decoding, take, taken_from
from tests.postgres import meanwhile
from tests.stores import TASK, build, fill, group, sweep_now, take_all


@pytest.mark.parametrize("followed", [False, True])
async def test_an_undone_draw_trained_nothing(url: str, followed: bool) -> None:
    """The group has the train step of its draw before, or of one that has followed."""
    async with build(url, max_times_sampled=0) as buffer:
        await fill(buffer, 1)
        await buffer.get(1, TASK, current_train_step=4)
        undo = await take(buffer, 1, train_step=5)
        if followed:
            await buffer.get(1, TASK, current_train_step=6)
        await undo()
        assert [item.trained_step async for item in buffer.find({})] == [6 if followed else 4]


@pytest.mark.parametrize("times", [1, 0])
async def test_an_undone_draw_joins_a_race_that_began_in_the_meantime(shared_url: str, times: int) -> None:
    async with (
        build(shared_url, max_times_sampled=times) as buffer,
        build(shared_url, policy="uniform", max_times_sampled=times) as other,
    ):
        await fill(buffer, 2)
        undo = await take(buffer, 1)
        assert len(await other.get(1, TASK)) == 1
        await undo()
        assert len(await other.get(2, TASK)) == (1 if times else 2)


@pytest.mark.parametrize("change", ["priority", "key", "replaces"])
async def test_a_group_that_moves_while_its_lock_is_waited_for_is_found(lent_database: str, change: str) -> None:
    async with build(lent_database) as buffer:
        await buffer.put(group(1, status=Status.FAILED), TASK)
        uid = await buffer.put(group(2), TASK, key="a")
        assert uid is not None
        moved = f"UPDATE rb_group SET lane = (SELECT id FROM rb_lane WHERE status = 'failed') WHERE uid = {uid}"
        calls = {
            "priority": lambda: buffer.update_priorities({uid: 2.0}),
            "key": lambda: buffer.put(group(3), TASK, key="a"),
            "replaces": lambda: buffer.put(group(3), TASK, replaces=[uid]),
        }
        async with meanwhile(lent_database, moved, calls[change]()) as [call]:
            assert await call == (1 if change == "priority" else 3)
        assert [item.priority async for item in buffer.find({})] == [1.0, 2.0 if change == "priority" else 1.0]


async def test_groups_that_come_back_after_their_payloads_were_swept_are_whole(buffer: ReplayBuffer) -> None:
    await fill(buffer, 3)
    release = threading.Event()
    hold_decoding(buffer, release)
    task = asyncio.create_task(buffer.get(3, TASK))
    await taken_from(buffer)
    state = buffer.storage
    sweeping = state.engine.write(lambda tx: sweep_now(tx, time.time() + 60))
    assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sweeping, state.thread.loop)) == 3
    task.cancel()
    release.set()
    assert await ended(task) is None
    assert await take_all(buffer) == [0, 1, 2]
