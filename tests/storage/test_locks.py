"""What others change while a statement waits for their locks, on PostgreSQL: it is asked again, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from replaybuf import LeaseLostError
from tests.cancellation.conftest import take
from tests.stores import TASK, build, fill, until


@asynccontextmanager
async def meanwhile(url: str, statement: str, *calls: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """The calls, which have waited for a transaction with this statement, and go on after it."""
    other = await asyncpg.connect(url)

    async def all_wait() -> bool:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(await other.fetchval(waiting) == len(calls))

    try:
        async with other.transaction():
            await other.execute(statement)
            waiting = [asyncio.ensure_future(call) for call in calls]
            await until(all_wait)
        yield waiting
    finally:
        await other.close()


async def test_groups_that_do_not_match_any_more_stay(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 3)
        deletion = buffer.delete({"priority": {"$lt": 5}})
        async with meanwhile(postgres_database, "UPDATE rb_group SET priority = 9 WHERE uid = 2", deletion) as [
            deleted
        ]:
            assert await deleted == 2
        assert [item.uid async for item in buffer.find({})] == [2]


async def test_a_lease_that_is_lost_acknowledges_nothing(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 1)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        taken_over = "UPDATE rb_group SET lease = lease + 1"
        async with meanwhile(postgres_database, taken_over, lease.acknowledge()) as [late]:
            with pytest.raises(LeaseLostError):
                await late
        assert await buffer.storage._read(lambda tx: tx.values("SELECT uid FROM rb_group")) == [1]


async def test_a_lease_that_is_renewed_is_not_ended(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 1)
        lease = await buffer.lease_batch({TASK: 1}, seconds=0.001, heartbeat=False)
        renewed = "UPDATE rb_group SET leased_until = leased_until + 600"
        async with meanwhile(postgres_database, renewed, buffer.get(1, TASK)) as [drawn]:
            assert await drawn == []
        await lease.acknowledge()


async def test_parts_of_a_lease_that_are_acknowledged_at_once_are_all_counted(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 3)
        lease = await buffer.lease_batch({TASK: 3}, heartbeat=False)
        parts = [lease.acknowledge([uid]) for uid in sorted(lease.open)[:2]]
        async with meanwhile(postgres_database, "SELECT FROM rb_batch FOR UPDATE", *parts) as acknowledged:
            await asyncio.gather(*acknowledged)
        assert await buffer.storage._read(lambda tx: tx.values("SELECT settled FROM rb_batch")) == [2]


async def test_draws_that_are_undone_at_once_are_all_counted_in_a_checkpoint(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 2)
        undo = [await take(buffer, 1) for _ in range(2)]
        await buffer.checkpoint(1)
        calls = [one() for one in undo]
        async with meanwhile(postgres_database, "SELECT FROM rb_checkpoint FOR UPDATE", *calls) as undone:
            await asyncio.gather(*undone)
        assert [made.groups for made in await buffer.checkpoints()] == [2]
