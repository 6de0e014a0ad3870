"""What the processes of these tests do: `python -m tests.processes.worker ROLE URL FILE ...`.

Every number is written to the file, and synced, after the call that it stands for has returned.
"""

from __future__ import annotations

import asyncio
import os
import time

from replaybuf import NotReadyError
from tests.stores import TASK, build, fill, group, numbers_of


class Log:
    """A file of numbers that survives the death of its writer."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *numbers: object) -> None:
        os.write(self._file, "".join(f"{number}\n" for number in numbers).encode())
        os.fsync(self._file)


async def produce(url: str, log: Log, first: str, count: str, width: str = "4") -> None:
    """Put groups, several at a time, and write down those that are acknowledged."""
    numbers = iter(range(int(first), int(first) + int(count)))

    async def put_one_by_one() -> None:
        for number in numbers:
            await buffer.put(group(number, 3, text="x" * 2000), TASK, key=str(number))
            log.write(number)

    async with build(url) as buffer:
        await asyncio.gather(*(put_one_by_one() for _ in range(int(width))))


async def consume(url: str, log: Log, until: str, size: str) -> None:
    """Take groups until the file `until` exists and nothing is left."""
    async with build(url) as buffer:
        while True:
            last = os.path.exists(until)  # noqa: ASYNC240
            groups = await buffer.get(int(size), TASK)
            assert all(len(rollouts) == 3 for rollouts in groups)
            log.write(*numbers_of(groups))
            if last and not groups:
                return
            if not groups:
                await asyncio.sleep(0.005)


BOUNDED = {"capacity": 40, "max_deliveries": 0}


async def produce_beyond_capacity(url: str, log: Log, first: str, count: str) -> None:
    """Put groups of older and older models into a buffer that holds 40."""
    async with build(url, **BOUNDED) as buffer:
        for number in range(int(first), int(first) + int(count)):
            await buffer.put(group(number), TASK, model_step=number % 7, current_train_step=8)
            log.write(number)


async def lease(url: str, log: Log, until: str, size: str) -> None:
    """Lease groups and acknowledge them, until the file `until` exists and nothing is left; some leases fail."""
    turn = 0
    async with build(url, **BOUNDED) as buffer:
        while True:
            last = os.path.exists(until)  # noqa: ASYNC240
            turn += 1
            try:
                async with buffer.lease_batch({TASK: int(size)}, seconds=1) as batch:
                    await asyncio.sleep(0.01)
                    if turn % 5 == 0:
                        raise OSError("the consumer fails")
                    found = numbers_of(batch.batch[TASK])
            except OSError:
                continue
            log.write(*found)
            if last and not found and not (await buffer.metrics())["tasks"][TASK]["leased"]:
                return


async def drop_old_groups(url: str, log: Log, until: str) -> None:
    """Refresh again and again, to steps at which some groups are too old, and drop those."""
    async with build(url, **BOUNDED) as buffer:
        while not os.path.exists(until):  # noqa: ASYNC240
            await buffer.refresh_staleness(
                task_stale_thresholds={TASK: 7},
                current_train_step=8,
                expired_groups_retryable_by_task={TASK: False},
            )
            await asyncio.sleep(0.02)


async def wait(url: str, log: Log, size: str) -> None:
    """Wait for a batch, and write down when it came."""
    async with build(url) as buffer:
        await buffer.count_where({})
        log.write("waiting")
        try:
            await buffer.take_batch({TASK: int(size)}, timeout=20)
        except NotReadyError:
            log.write("nothing")
        else:
            log.write(time.time())


async def create_many(url: str, log: Log, start: str, count: str) -> None:
    """Open new databases, one every 100 ms, each at the same time as others do."""
    for number in range(int(count)):
        await asyncio.sleep(max(0.0, float(start) + number / 10 - time.time()))
        async with build(f"{url}.{number}") as buffer:
            await buffer.put(group(number), TASK)
        log.write(number)


async def open_and_stay(url: str, log: Log) -> None:
    async with build(url) as buffer:
        await fill(buffer, 3)
        log.write("open")
        await asyncio.sleep(60)


def work(role: str, target: str, path: str, *rest: str) -> None:
    asyncio.run(globals()[role](target, Log(path), *rest))
