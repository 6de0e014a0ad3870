"""Processes that call one buffer as chance has it, and record what they call."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from replaybuf import FencedError, Lease, LeaseLostError, ReplayBuffer, RolloutState
from tests.faults.processes import Ledger
from tests.histories.history import Recorder
from tests.stores import build, group, numbers_of

TAKEN, LEASED = "taken", "leased"
LEASE_SECONDS = 1.0


def opened(url: str) -> ReplayBuffer:
    """Whoever comes by ends leases, by its own rules: no group is set aside however often its trainer dies."""
    return build(url, max_deliveries=0)


class Worker:
    """Puts groups whose numbers follow `first`, every other one in each task, and takes and leases any."""

    def __init__(
        self, buffer: ReplayBuffer, recorder: Recorder, first: int, seed: int = 0, *, seconds: float = LEASE_SECONDS
    ) -> None:
        self._buffer, self._recorder, self._seconds = buffer, recorder, seconds
        self._number, self._chance = first, random.Random(seed)

    @property
    def number(self) -> int:
        """The last group that it has put, or tried to."""
        return self._number

    def made(self, number: int) -> list[RolloutState]:
        """Return a group of this number."""
        return group(number, 2, text="x" * self._chance.choice((10, 1000, 30_000)))

    def numbers(self, groups: Iterable[list[Any]]) -> list[int]:
        """Return the numbers of groups."""
        return numbers_of(groups)

    async def call(self) -> None:
        """Do any of these."""
        await getattr(self, self._chance.choice(("put", "put", "take", "lease")))()

    async def put(self) -> None:
        puts = []
        for _ in range(self._chance.randint(1, 6)):
            self._number += 1
            putting = self._buffer.put(self.made(self._number), (TAKEN, LEASED)[self._number % 2])
            puts.append(self._recorder.call("put", putting, groups=[self._number]))
        await asyncio.gather(*puts)

    async def take(self) -> None:
        size = self._chance.randint(1, 6)
        await self._recorder.call("take", self._buffer.get(size, TAKEN), self.numbers, asked=size)

    async def take_and_be_cancelled(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01 * self._chance.random()):
                await self.take()

    async def lease(self) -> None:
        """Lease groups; acknowledge most, give back some, and leave others to the end of the lease."""
        leasing = self._buffer.lease_batch({LEASED: self._chance.randint(1, 4)}, seconds=self._seconds)
        lease = await self._recorder.call("lease", leasing, self._leased, seconds=self._seconds)
        groups, fate = self._leased(lease), self._chance.random()
        with suppress(LeaseLostError):  # on a machine that stood still for so long
            if fate < 0.85:
                await self._recorder.call("acknowledge", lease.acknowledge(), groups=groups)
            elif fate < 0.95:
                await self._recorder.call("give back", lease.give_back(failed="bad luck"), groups=groups)
            else:
                lease.stop()

    def _leased(self, lease: Lease[Any]) -> list[int]:
        return self.numbers(lease.batch[LEASED])


async def work(ledger: Ledger, url: str, stop: str, first: int, seed: int, cancelling: float) -> None:
    """Call until the file `stop` exists, numbering groups from `first` on; a buffer from before a restore is reopened.

    In the first seconds, `cancelling`, some takes are cancelled: those after them have nothing to be excused by.
    """
    recorder, chance, quiet = Recorder(ledger), random.Random(seed), time.monotonic() + cancelling
    while not os.path.exists(stop):  # noqa: ASYNC240
        with suppress(FencedError):
            async with opened(url) as buffer:
                worker = Worker(buffer, recorder, first, seed)
                try:
                    while not os.path.exists(stop):  # noqa: ASYNC240
                        cancelled = time.monotonic() < quiet and chance.random() < 0.2
                        await (worker.take_and_be_cancelled if cancelled else worker.call)()
                finally:
                    first = worker.number


async def drain(ledger: Ledger, url: str) -> None:
    async with opened(url) as buffer:
        await take_all_left(buffer, Recorder(ledger))


async def take_all_left(buffer: ReplayBuffer, recorder: Recorder) -> None:
    """Take and acknowledge all that is left, after the leases of the dead have ended."""
    while await left_in(buffer):
        await recorder.call("take", buffer.get(50, TAKEN), numbers_of, asked=50)
        await recorder.call("acknowledge", buffer.get(50, LEASED), numbers_of)
        await asyncio.sleep(0.05)


async def left_in(buffer: ReplayBuffer) -> int:
    """Return how many groups there are, whatever their status, leased ones too."""
    tasks = (await buffer.metrics(distributions=False))["tasks"]
    return sum(sum(task["buffered"].values()) + task["leased"] for task in tasks.values())


async def go_back(ledger: Ledger, url: str, stop: str, seconds: float) -> None:
    """Make a checkpoint after a third of the time, restore it after two thirds, and let the others stop at the end."""
    recorder = Recorder(ledger)
    async with opened(url) as buffer:
        await asyncio.sleep(seconds / 3)
        await recorder.call("checkpoint", buffer.checkpoint(1), step=1)
        await asyncio.sleep(seconds / 3)
        await recorder.call("restore", buffer.restore(1), step=1)
        await asyncio.sleep(seconds / 3)
    open(stop, "w").close()  # noqa: ASYNC230
