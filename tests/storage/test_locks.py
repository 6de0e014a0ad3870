"""What others change while a statement waits for their locks, or since a lane was read, on PostgreSQL."""

from __future__ import annotations

import asyncio
import string
from typing import Any

import pytest

from replaybuf import FullError, LeaseLostError, ReplayBuffer
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.statements.past import sweep
from replaybuf.storage.sql.statements.rows import scoped_key
from replaybuf.storage.sql.tasks import group_commit
from tests.cancellation.conftest import end_background_work, take
from tests.postgres import holding, meanwhile, set_default
from tests.stores import TASK, build, fill, group, numbers_of


async def test_groups_that_do_not_match_any_more_stay(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 3)
        deletion = buffer.delete({"priority": {"$lt": 5}})
        async with meanwhile(lent_database, "UPDATE rb_group SET priority = 9 WHERE uid = 2", deletion) as [deleted]:
            assert await deleted == 2
        assert [item.uid async for item in buffer.find({})] == [2]


@pytest.mark.parametrize("name", ["key", "group"])
async def test_batches_with_the_same_keys_in_another_order_never_wait_for_one_another(
    lent_database: str, name: str
) -> None:
    set_default(lent_database, deadlock_timeout="1min")  # none of them is ended in the time of the test
    async with build(lent_database) as first, build(lent_database) as second, asyncio.timeout(50):
        size: dict[str, Any] = {} if name == "key" else {"size": 240}

        async def put(buffer: ReplayBuffer, keys: str) -> None:
            for _ in range(20):
                await buffer.put_many([group(0) for _ in keys], TASK, each=[{name: key, **size} for key in keys])

        await asyncio.gather(put(first, "aabbcc"), put(second, "ccbbaa"))
        assert len(first) + len(await first.filling(TASK)) == 3


async def test_the_last_put_of_a_key_is_the_one_that_stays(lent_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is in another transaction than an earlier one, which waits for a lock."""
    monkeypatch.setattr(group_commit, "MAX_GROUPS", 2)
    monkeypatch.setattr(group_commit, "ENOUGH_BYTES", 0)
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        each: list[Any] = [{"key": key} for key in "azz"]
        key = scoped_key("default", TASK, "a")
        lock = f"SELECT pg_advisory_xact_lock(hashtextextended('{key}', {NamedLock.KEY:d}))"
        async with holding(lent_database, lock):
            puts = asyncio.create_task(buffer.put_many([group(number) for number in (1, 2, 3)], TASK, each=each))
            await asyncio.sleep(0.5)  # in which the second transaction might be over
        await puts
        assert [numbers_of([item.item]) async for item in buffer.find({})] == [[0], [1], [3]]


async def test_puts_that_begin_lanes_and_their_steps_keep_their_order(
    lent_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a transaction of its own: a lane has the first train step of the first one."""
    monkeypatch.setattr(group_commit, "MAX_GROUPS", 1)
    monkeypatch.setattr(group_commit, "ENOUGH_BYTES", 0)
    async with build(lent_database) as buffer:
        each: list[Any] = [{"current_train_step": step} for step in range(8)]
        for first, task in enumerate(string.ascii_lowercase):
            uids = await buffer.put_many([group(number) for number in range(8)], task, each=each)
            assert uids == [8 * first + place for place in range(1, 9)]
        assert {*await buffer.storage._read(lambda tx: tx.values("SELECT step FROM rb_lane WHERE NOT leased"))} == {0}


async def test_a_lease_that_is_lost_acknowledges_nothing(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        taken_over = "UPDATE rb_group SET lease = lease + 1"
        async with meanwhile(lent_database, taken_over, lease.acknowledge()) as [acknowledging]:
            with pytest.raises(LeaseLostError):
                await acknowledging
        assert await buffer.storage._read(lambda tx: tx.values("SELECT uid FROM rb_group")) == [1]


async def test_a_lease_that_is_renewed_is_not_ended(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        await end_background_work(buffer)  # which would end the lease
        lease = await buffer.lease_batch({TASK: 1}, seconds=0.001, heartbeat=False)
        renewed = "UPDATE rb_group SET leased_until = leased_until + 600"
        async with meanwhile(lent_database, renewed, buffer.get(1, TASK)) as [drawing]:
            assert await drawing == []
        await lease.acknowledge()


async def test_parts_of_a_lease_that_are_acknowledged_at_once_are_all_counted(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 3)
        lease = await buffer.lease_batch({TASK: 3}, heartbeat=False)
        parts = [lease.acknowledge([uid]) for uid in sorted(lease.open)[:2]]
        async with meanwhile(lent_database, "SELECT FROM rb_batch FOR UPDATE", *parts) as acknowledged:
            await asyncio.gather(*acknowledged)
        assert await buffer.storage._read(lambda tx: tx.values("SELECT settled FROM rb_batch")) == [2]


async def test_draws_that_are_undone_at_once_are_all_counted_in_a_checkpoint(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 2)
        undo = [await take(buffer, 1) for _ in range(2)]
        await buffer.checkpoint(1)
        calls = [operation() for operation in undo]
        async with meanwhile(lent_database, "SELECT FROM rb_checkpoint FOR UPDATE", *calls) as undone:
            await asyncio.gather(*undone)
        assert [checkpoint.groups for checkpoint in await buffer.checkpoints()] == [2]


async def test_room_that_another_put_takes_is_not_there(lent_database: str) -> None:
    async with build(lent_database, capacity=2, on_full="reject") as buffer:
        await fill(buffer, 1)
        task = f"SELECT pg_advisory_xact_lock(hashtextextended('replaybuf default {TASK}', {NamedLock.TASK:d}))"
        statements = f"{task}; UPDATE rb_tally SET amount = 2 WHERE name = 'size'"
        async with meanwhile(lent_database, statements, buffer.put(group(1), TASK)) as [putting]:
            with pytest.raises(FullError):
                await putting


async def test_one_sweeps_at_a_time(lent_database: str) -> None:
    """Two with versions of one group would each leave its payload to the other."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        await end_background_work(buffer)
        await buffer.get(1, TASK)
        storage = buffer.storage

        async def swept() -> int:
            return await storage.thread.run(lambda: storage.engine.write(lambda tx: sweep(tx, 1e12, 10)))

        async with holding(lent_database, f"SELECT pg_advisory_xact_lock({Lock.SWEEP:d})"):
            assert await swept() == 0
        assert await swept() == 1


async def test_puts_in_one_statement_go_by_the_train_step_as_it_is(lent_database: str) -> None:
    async with build(lent_database) as worker, build(lent_database) as trainer:
        for number in range(2):
            await worker.put(group(number), TASK, model_step=4, current_train_step=5)
        await trainer.refresh_staleness(task_stale_thresholds={TASK: 9}, current_train_step=9)
        await worker.put(group(2), TASK, model_step=4, current_train_step=5)
        assert [item.staleness async for item in trainer.find({})] == [4, 4, 0]
