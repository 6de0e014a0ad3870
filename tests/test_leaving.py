"""Groups that leave are told once, also when a transaction is run again or several callers ask at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import StorageItem
from tests.stores import TASK, build, group, numbers_of


async def test_a_transaction_that_is_run_again_tells_once(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a lost connection: what the first run has read counts for nothing."""
    write = Transactions.write

    async def twice(self: Transactions, function: Any, **options: Any) -> Any:
        def again(tx: Any) -> Any:
            with contextlib.suppress(ZeroDivisionError), tx.savepoint():
                function(tx)
                raise ZeroDivisionError
            return function(tx)

        return await write(self, again, **options)

    async with build(shared_url, capacity=2) as buffer:
        for number in range(2):
            await buffer.put(group(number), TASK, model_step=number, current_train_step=2)
        monkeypatch.setattr(Transactions, "write", twice)
        put: list[StorageItem] = []
        await buffer.put(group(2), TASK, model_step=9, current_train_step=10, dropped=put)
        refreshed: list[StorageItem] = []
        await buffer.refresh_staleness(
            task_stale_thresholds={TASK: 5},
            expired_groups_retryable_by_task={TASK: False},
            current_train_step=10,
            dropped=refreshed,
        )
    assert numbers_of([item.item for item in put]) == [0]
    assert numbers_of([item.item for item in refreshed]) == [1]


async def test_callers_that_ask_at_once_are_each_told_what_left_with_theirs(shared_url: str) -> None:
    """Together they have all that left, once."""
    lists: list[list[StorageItem]] = [[] for _ in range(12)]
    async with build(shared_url, capacity=4) as buffer:
        for number in range(4):
            await buffer.put(group(number), TASK)
        await asyncio.gather(
            *(buffer.put(group(4 + number), TASK, dropped=gone) for number, gone in enumerate(lists)),
            *(buffer.put(group(100 + number), TASK, key="a") for number in range(3)),
        )
        there = {item.item[0].rollout_id async for item in buffer.find({})}
    told = numbers_of([item.item for gone in lists for item in gone])
    assert len(set(told)) == len(told)
    assert set(told) <= {*range(16), 100, 101, 102} - there
    assert {len(gone) for gone in lists} <= {0, 1}
