"""Draws and puts that take one statement from what a process remembers of lanes (PostgreSQL)."""

from __future__ import annotations

import pytest

from replaybuf.errors import FencedError
from tests.postgres import execute
from tests.stores import TASK, build, group, take_all


async def test_the_id_of_a_lane_that_is_gone_is_of_no_use(postgres_database: str) -> None:
    """A server that took over may lack the last transactions, and gives their lanes' ids again."""
    async with build(postgres_database) as buffer, build(postgres_database, name="other") as other:
        for number in range(3):  # so that both puts and takes know the lane
            await buffer.put(group(number), TASK)
        assert len(await buffer.get(1, TASK)) == 1
        execute(postgres_database, "TRUNCATE rb_lane, rb_group, rb_payload, rb_tally, rb_garbage RESTART IDENTITY")
        await other.put(group(10), "code")
        await buffer.put(group(4), TASK)
        assert await take_all(buffer) == [4]
        assert await take_all(other, "code") == [10]


async def test_a_draw_of_nothing_is_fenced_off_as_any_other(shared_url: str) -> None:
    async with build(shared_url) as buffer, build(shared_url) as other:
        await buffer.put(group(1), TASK)
        await buffer.checkpoint(1)
        assert await other.get(0, TASK) == []
        await buffer.restore(1)
        with pytest.raises(FencedError):
            await other.get(0, TASK)
