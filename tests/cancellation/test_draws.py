"""Draws that end early: the caller has the groups, or the store has. At each await: `faults/test_cancelled.py`."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import asyncpg
import pytest

from replaybuf import NotReadyError, ReplayBuffer
from tests.cancellation.ways import by_cancel, end_background_work, take
from tests.faults.test_postgres_restarts import is_waiting
from tests.postgres import new_database
from tests.stores import TASK, build, fill, take_all, until


async def test_a_batch_whose_groups_are_locked_times_out(postgres_url: str) -> None:
    """Those that another transaction holds are there, but can't be drawn."""
    with new_database(postgres_url) as url:
        async with build(url) as buffer:
            await fill(buffer, 3)
            other = await asyncpg.connect(url)
            async with other.transaction():
                await other.execute("SELECT FROM rb_group LIMIT 1 FOR UPDATE")
                with pytest.raises(NotReadyError, match="others hold some"):
                    await asyncio.wait_for(buffer.take_batch({TASK: 3}, timeout=0.1), 10)
            await other.close()
            assert (await buffer.take_batch({TASK: 3}, timeout=10))[1] == {TASK: 3}


async def test_a_draw_is_undone_beside_a_sweep_of_its_groups(postgres_url: str) -> None:
    """It waits for the sweep, which goes by the record of the draw: no version of the groups is left behind."""
    with new_database(postgres_url) as url:
        async with build(url) as buffer:
            await end_background_work(buffer)
            await fill(buffer, 2)
            undo = await take(buffer, 2)
            other = await asyncpg.connect(url)
            async with other.transaction():
                await other.execute("UPDATE rb_past SET removed_at = NULL")  # as of a recorded draw
                await other.execute("DELETE FROM rb_payload")
                undoing = asyncio.create_task(undo())
                await until(partial(is_waiting, url))
            await undoing
            assert await other.fetchval("SELECT count(*) FROM rb_past") == 0
            await other.close()
            assert await take_all(buffer) == [0, 1]


async def test_a_take_that_is_cancelled_before_it_began_blocks_no_later_call(buffer: ReplayBuffer) -> None:
    await fill(buffer, 3)
    buffer.storage.thread.post(time.sleep, 0.1)  # so that the call and its end are noticed together
    await by_cancel(buffer.get(3, TASK), 0.02)
    async with asyncio.timeout(5):
        assert await take_all(buffer) == [0, 1, 2]
