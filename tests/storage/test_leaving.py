"""Groups that leave are told once, also when a transaction is run again or several callers ask at once."""

from __future__ import annotations

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
            tx.run("SAVEPOINT first")
            function(tx)
            tx.run("ROLLBACK TO SAVEPOINT first")
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
