"""What the processes of a long life do, slowly: put, take, lease, and keep the buffer. They record what they call."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from replaybuf import FencedError, LeaseLostError, ReplayBuffer
from tests.faults.processes import Ledger
from tests.histories.history import Recorder
from tests.places.arrays import NBYTES, apart, heavy, numbers_in
from tests.stores import group, number_of

TAKEN, LEASED = "taken", "leased"
#: Groups of each task that takes leave in the buffer.
STOCK = 100
CHECKPOINT_SECONDS, RESTORE_SECONDS, CLOCK_SECONDS = 60.0, 600.0, 45.0
LEASE_SECONDS = 5.0


def opened(url: str, place: str) -> ReplayBuffer:
    return apart(url, place, archive=STOCK, max_deliveries=0, keep_checkpoints=2, reconnect_timeout=60.0)


def numbers_of(groups: Sequence[Any]) -> list[int]:
    """Return the numbers of groups, after a look at every byte of the arrays that some have."""
    return [(numbers_in([members]) if members[0].extra_fields else [number_of(members)])[0] for members in groups]


async def ticks(period: float, ends: float) -> AsyncIterator[None]:
    """Yield at a steady rate until then; what was missed is left out."""
    next_time = time.monotonic()
    while (now := time.monotonic()) < ends:
        await asyncio.sleep(max(next_time - now, 0))
        next_time = max(next_time + period, time.monotonic() - period)
        yield


async def jumping_clocks(chance: random.Random) -> None:
    """Set this process's wall clock forward or back, by up to two hours, now and then."""
    right = time.time
    while True:
        ahead = chance.choice((0.0, chance.uniform(-7200, 7200)))
        time.time = lambda ahead=ahead: right() + ahead  # type: ignore[misc]
        await asyncio.sleep(CLOCK_SECONDS * chance.uniform(0.5, 1.5))


class Role:
    """One process: its buffer, which is opened again after each restore, and its record."""

    def __init__(self, url: str, place: str, record: Path, ends: float) -> None:
        self._url, self._place, self._ends = url, place, ends
        self._recorder = Recorder(Ledger(record))
        self._chance = random.Random(record.name)
        self._number = 0

    async def run(self, name: str) -> None:
        clocks = asyncio.create_task(jumping_clocks(self._chance))
        while time.monotonic() < self._ends:
            with suppress(FencedError):
                async with opened(self._url, self._place) as buffer:
                    await getattr(self, name)(buffer)
        clocks.cancel()

    async def put(self, buffer: ReplayBuffer) -> None:
        """Five groups of 100 KB a second, half of them with an array that is kept apart."""
        async for _ in ticks(0.2, self._ends):
            self._number += 1
            number, task = self._number, (TAKEN, LEASED)[self._number % 2]
            rollouts = heavy(number) if number // 2 % 2 else group(number, text="x" * NBYTES)
            call = buffer.put(rollouts, task, model_step=number // 100, current_train_step=number // 100)
            await self._recorder.call("put", call, groups=[number])

    async def take(self, buffer: ReplayBuffer) -> None:
        async for _ in ticks(0.4, self._ends):
            if await buffer.count(TAKEN, "completed") > STOCK:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02 if self._chance.random() < 0.05 else None):
                        await self._recorder.call("take", buffer.get(2, TAKEN), numbers_of, asked=2)

    async def lease(self, buffer: ReplayBuffer) -> None:
        """Acknowledge most leases, give some back, and leave others to their end."""
        async for _ in ticks(0.4, self._ends):
            if await buffer.count(LEASED, "completed") > STOCK:
                fate = self._chance.random()
                lent = buffer.lease_batch({LEASED: 2}, seconds=LEASE_SECONDS, heartbeat=fate > 0.05)
                lease = await self._recorder.call(
                    "lease", lent, lambda own: numbers_of(own.batch[LEASED]), seconds=LEASE_SECONDS
                )
                groups = numbers_of(lease.batch[LEASED])
                with suppress(LeaseLostError):
                    if fate > 0.1:
                        await self._recorder.call("acknowledge", lease.acknowledge(), groups=groups)
                    elif fate > 0.05:
                        await self._recorder.call("give back", lease.give_back(), groups=groups)

    async def keep(self, buffer: ReplayBuffer) -> None:
        """Checkpoints, a restore of each tenth, refreshes, and a look at all groups."""
        step = max([checkpoint.step for checkpoint in await buffer.checkpoints()], default=0)
        cycle = round(RESTORE_SECONDS / CHECKPOINT_SECONDS)
        async for _ in ticks(CHECKPOINT_SECONDS / 2, self._ends):
            step += 1
            await self._recorder.call("checkpoint", buffer.checkpoint(step), step=step)
            await asyncio.sleep(min(CHECKPOINT_SECONDS / 2, max(self._ends - time.monotonic(), 0)))
            await buffer.refresh_staleness(task_stale_thresholds={TAKEN: 1 << 20}, current_train_step=step)
            async for item in buffer.find({"status": "completed"}):
                numbers_of([item.item])
            if step % cycle == 0:
                await self._recorder.call("restore", buffer.restore(step), step=step)

    async def drain(self, buffer: ReplayBuffer) -> None:
        """Take all that is left, and end then."""
        while remaining := await _left(buffer):
            await self._recorder.call("take", buffer.get(remaining, TAKEN), numbers_of, asked=remaining)
            lent = buffer.lease_batch({LEASED: remaining}, seconds=60)
            lease = await self._recorder.call("lease", lent, lambda own: numbers_of(own.batch[LEASED]), seconds=60)
            groups = numbers_of(lease.batch[LEASED])
            await self._recorder.call("acknowledge", lease.acknowledge(), groups=groups)
            await asyncio.sleep(0.1)
        self._ends = 0.0


async def _left(buffer: ReplayBuffer) -> int:
    tasks = (await buffer.metrics(distributions=False))["tasks"]
    return sum(task["buffered"].get("completed", 0) + task["leased"] for task in tasks.values())


async def play(_: Ledger, name: str, url: str, place: str, record: Path, ends: float) -> None:
    await Role(url, place, record, ends).run(name)
