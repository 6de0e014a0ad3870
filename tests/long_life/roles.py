"""What the processes of a long life do, slowly: put, take, lease, and keep the buffer. They record what they call."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from replaybuf import FencedError, ReplayBuffer, RolloutState
from tests.faults.processes import Ledger
from tests.histories.history import Recorder
from tests.histories.workers import LEASED, TAKEN, Worker, take_all_left
from tests.places.arrays import NBYTES, apart, heavy, number_in
from tests.stores import group, number_of

#: Groups of each task that takes leave in the buffer.
STOCK = 100
CHECKPOINT_SECONDS, RESTORE_SECONDS, CLOCK_SECONDS = 60.0, 600.0, 45.0
LEASE_SECONDS = 5.0
#: A put is of three or four groups: five come a second.
PUT_SECONDS, DRAW_SECONDS = 0.7, 0.4


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


class Role(Worker):
    """What one process does of a buffer until a time, with groups of 100 KB, every byte of which is looked at."""

    def __init__(self, buffer: ReplayBuffer, recorder: Recorder, first: int, seed: int, ends: float) -> None:
        super().__init__(buffer, recorder, first, seed, seconds=LEASE_SECONDS)
        self.ends = ends

    def made(self, number: int) -> list[RolloutState]:
        """Half of them have an array that is kept apart."""
        rollouts = heavy(number) if number // 2 % 2 else group(number, text="x" * NBYTES)
        rollouts[0].response_model_steps = [number // 100] * 2
        return rollouts

    def numbers(self, groups: Iterable[list[Any]]) -> list[int]:
        return [number_in(members) if members[0].extra_fields else number_of(members) for members in groups]

    async def put_slowly(self) -> None:
        async for _ in ticks(PUT_SECONDS, self.ends):
            await self.put()

    async def take_slowly(self) -> None:
        async for _ in ticks(DRAW_SECONDS, self.ends):
            if await self._buffer.count(TAKEN, "completed") > STOCK:
                await (self.take_and_be_cancelled if self._chance.random() < 0.05 else self.take)()

    async def lease_slowly(self) -> None:
        async for _ in ticks(DRAW_SECONDS, self.ends):
            if await self._buffer.count(LEASED, "completed") > STOCK:
                await self.lease()

    async def keep_slowly(self) -> None:
        """Checkpoints, a restore of each tenth, refreshes, and a look at all groups."""
        step = max([checkpoint.step for checkpoint in await self._buffer.checkpoints()], default=0)
        cycle = round(RESTORE_SECONDS / CHECKPOINT_SECONDS)
        async for _ in ticks(CHECKPOINT_SECONDS / 2, self.ends):
            step += 1
            await self._recorder.call("checkpoint", self._buffer.checkpoint(step), step=step)
            await asyncio.sleep(min(CHECKPOINT_SECONDS / 2, max(self.ends - time.monotonic(), 0)))
            await self._buffer.refresh_staleness(task_stale_thresholds={TAKEN: 1 << 20}, current_train_step=step)
            async for item in self._buffer.find({"status": "completed"}):
                self.numbers([item.item])
            if step % cycle == 0:
                await self._recorder.call("restore", self._buffer.restore(step), step=step)

    async def drain_slowly(self) -> None:
        await take_all_left(self._buffer, self._recorder)
        self.ends = 0.0


async def play(_: Ledger, name: str, url: str, place: str, record: Path, ends: float) -> None:
    """Play a role in a buffer that is opened again after each restore."""
    options: dict[str, Any] = {"archive": STOCK, "max_deliveries": 0, "keep_checkpoints": 2, "reconnect_timeout": 60.0}
    recorder, chance, number = Recorder(Ledger(record)), random.Random(record.name), 0
    clocks = asyncio.create_task(jumping_clocks(chance))
    while time.monotonic() < ends:
        with suppress(FencedError):
            async with apart(url, place, **options) as buffer:
                role = Role(buffer, recorder, number, chance.randrange(1 << 30), ends)
                try:
                    await getattr(role, f"{name}_slowly")()
                finally:
                    number, ends = role.number, role.ends
    clocks.cancel()
