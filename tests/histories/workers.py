"""Processes that call one buffer as chance has it, and record what they call."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from replaybuf import FencedError, Lease, LeaseLostError, ReplayBuffer
from tests.faults.ledger import Ledger
from tests.histories.history import Recorder
from tests.stores import build, group, numbers_of

TAKEN, LEASED = "taken", "leased"
LEASE_SECONDS = 1.0


def opened(url: str) -> ReplayBuffer:
    return build(url, max_deliveries=0)


class Worker:
    """Puts groups of its own numbers, and takes and leases any."""

    def __init__(self, buffer: ReplayBuffer, recorder: Recorder, numbers: list[int], chance: random.Random) -> None:
        self._buffer, self._recorder = buffer, recorder
        self._numbers, self._chance = numbers, chance

    async def put(self) -> None:
        puts = []
        for _ in range(self._chance.randint(1, 6)):
            number = self._numbers[0] = self._numbers[0] + 1
            put = self._buffer.put(group(number), (TAKEN, LEASED)[number % 2])
            puts.append(self._recorder.call("put", put, groups=[number]))
        await asyncio.gather(*puts)

    async def take(self) -> None:
        size = self._chance.randint(1, 6)
        await self._recorder.call("take", self._buffer.get(size, TAKEN), numbers_of, asked=size)

    async def take_and_be_cancelled(self) -> None:
        try:
            async with asyncio.timeout(0.01 * self._chance.random()):
                await self.take()
        except TimeoutError:
            pass

    async def lease(self) -> None:
        drawn = self._buffer.lease_batch({LEASED: self._chance.randint(1, 4)}, seconds=LEASE_SECONDS)
        lease = await self._recorder.call(
            "lease", drawn, lambda one: numbers_of(one.batch[LEASED]), seconds=LEASE_SECONDS
        )
        groups = numbers_of(lease.batch[LEASED])
        try:
            if self._chance.random() < 0.8:
                await self._recorder.call("acknowledge", lease.acknowledge(), groups=groups)
            else:
                await self._recorder.call("give back", lease.give_back(), groups=groups)
        except LeaseLostError:  # on a machine that stood still for so long
            pass


def _leased(lease: Lease[Any]) -> list[int]:
    return numbers_of(lease.batch[LEASED])


CALLS = ("put", "put", "take", "lease")


async def work(_: Ledger, url: str, path: Path, first: int, seed: int, seconds: float, cancels: bool) -> None:
    """Call for so many seconds, numbering groups from `first` on; a buffer from before a restore is opened again.

    With `cancels` some calls of the first third are cancelled: those after them have nothing to be excused by.
    """
    recorder, chance, numbers, ends = Recorder(path), random.Random(seed), [first], time.monotonic() + seconds
    quiet = ends - 2 * seconds / 3
    while time.monotonic() < ends:
        try:
            async with opened(url) as buffer:
                worker = Worker(buffer, recorder, numbers, chance)
                while time.monotonic() < ends:
                    cancelled = cancels and time.monotonic() < quiet and chance.random() < 0.2
                    await (worker.take_and_be_cancelled if cancelled else getattr(worker, chance.choice(CALLS)))()
        except FencedError:
            continue


async def drain(_: Ledger, url: str, path: Path) -> None:
    """Take and acknowledge all that is left, after the leases of the dead have ended."""
    recorder = Recorder(path)
    async with opened(url) as buffer:
        while await _left(buffer):
            await recorder.call("take", buffer.get(50, TAKEN), numbers_of, asked=50)
            drawn = buffer.lease_batch({LEASED: 50}, seconds=60)
            lease = await recorder.call("lease", drawn, _leased, seconds=60)
            await recorder.call("acknowledge", lease.acknowledge(), groups=_leased(lease))
            await asyncio.sleep(0.05)


async def _left(buffer: ReplayBuffer) -> int:
    tasks = (await buffer.metrics(distributions=False))["tasks"]
    return sum(sum(one["buffered"].values()) + one["leased"] for one in tasks.values())


async def go_back(_: Ledger, url: str, path: Path, seconds: float) -> None:
    """Make a checkpoint after a third of the time, and restore it after two thirds."""
    recorder = Recorder(path)
    async with opened(url) as buffer:
        await asyncio.sleep(seconds / 3)
        await recorder.call("checkpoint", buffer.checkpoint(1), step=1)
        await asyncio.sleep(seconds / 3)
        await recorder.call("restore", buffer.restore(1), step=1)
