"""What the processes of these tests do.

Every number is in the ledger, as `did N ...`, after the call that it stands for has returned.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from replaybuf import NotReadyError
from tests.faults.processes import Ledger
from tests.stores import TASK, build, group, numbers_of

BOUNDED = {"capacity": 40, "max_deliveries": 0}


async def produce_beyond_capacity(log: Ledger, url: str, first: int, count: int) -> None:
    """Put groups of older and older models into a buffer that holds 40."""
    async with build(url, **BOUNDED) as buffer:
        for number in range(first, first + count):
            await buffer.put(group(number), TASK, model_step=number % 7, current_train_step=8)
            log.write("did", number)


async def lease(log: Ledger, url: str, until: Path, size: int) -> None:
    """Lease groups and acknowledge them, until the file `until` exists and nothing is left; some leases fail."""
    turn = 0
    async with build(url, **BOUNDED) as buffer:
        while True:
            last = until.exists()  # noqa: ASYNC240
            turn += 1
            try:
                async with buffer.lease_batch({TASK: size}, seconds=1) as batch:
                    await asyncio.sleep(0.01)
                    if turn % 5 == 0:
                        raise OSError("the consumer fails")
                    found = numbers_of(batch.batch[TASK])
            except OSError:
                continue
            if found:
                log.write("did", *found)
            elif last and not (await buffer.metrics())["tasks"][TASK]["leased"]:
                return


async def drop_old_groups(log: Ledger, url: str, until: Path) -> None:
    """Refresh again and again, to steps at which some groups are too old, and drop those."""
    async with build(url, **BOUNDED) as buffer:
        while not os.path.exists(until):  # noqa: ASYNC240
            await buffer.refresh_staleness(
                task_stale_thresholds={TASK: 7},
                current_train_step=8,
                expired_groups_retryable_by_task={TASK: False},
            )
            await asyncio.sleep(0.02)


async def wait(log: Ledger, url: str, size: int) -> None:
    """Wait for a batch, and write down when it came."""
    async with build(url) as buffer:
        await buffer.count_where({})
        log.write("waiting")
        try:
            await buffer.take_batch({TASK: size}, timeout=20)
        except NotReadyError:
            log.write("did", "nothing")
        else:
            log.write("did", time.time())


async def create_many(log: Ledger, url: str, start: float, count: int) -> None:
    """Open new databases, one every 100 ms, each at the same time as others do."""
    for number in range(count):
        await asyncio.sleep(max(0.0, start + number / 10 - time.time()))
        async with build(f"{url}.{number}") as buffer:
            await buffer.put(group(number), TASK)
        log.write("did", number)
