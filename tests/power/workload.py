"""What the recorded process does: calls in turn, each with a mark before it and one after it, with what is there then.

python -m tests.power.workload FOLDER SEED CALLS DURABILITY
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from replaybuf import Lease, ReplayBufError, ReplayBuffer
from replaybuf.errors import FencedError, LeaseLostError
from tests.places.arrays import NBYTES, apart, heavy, number_in
from tests.stores import TASK, group, number_of

MARKS, DATABASE, PLACE, SAVED = "marks", "run.db", "payloads", "saved"


def buffer_in(folder: Path, durability: str) -> ReplayBuffer:
    return apart(f"sqlite:///{folder / DATABASE}", folder / PLACE, durability=durability)


async def state_of(buffer: ReplayBuffer, folder: Path, *, may_lose_arrays: bool = False) -> list[Any]:
    """Return the groups that are there, leased ones too, and the steps of the checkpoints; every byte is looked at.

    With `may_lose_arrays` a group may have lost those that are kept apart, if it says so.
    """
    async for item in buffer.find({}):
        assert may_lose_arrays or item.error is None, item.error
        for rollouts in [item.item] if item.item else []:
            number = number_in(rollouts) if rollouts[0].extra_fields else number_of(rollouts)
            assert number == (item.tags or {})["number"]
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        groups = database.execute(
            "SELECT tags ->> '$.number', status, leased_until > 0, deliveries FROM groups ORDER BY 1"
        )
        return [[list(row) for row in groups], [checkpoint.step for checkpoint in await buffer.checkpoints()]]


#: What is done once more after each error, with the same effect.
Call = Callable[[], Awaitable[object]]


class Workload:
    """Calls of a buffer, chosen by a seed. With `faults` the disk fails now and then, and failed calls are repeated."""

    def __init__(self, folder: Path, seed: int, durability: str, *, faults: bool) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self._durability, self._faults = durability, faults
        self._number = self._step = 0
        self._leases: list[Lease[Any]] = []
        self._taken: set[int] = set()
        self._marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _mark(self, *mark: Any) -> None:
        os.write(self._marks, json.dumps(mark).encode() + b"\n")

    async def run(self, calls: int) -> None:
        async with buffer_in(self._folder, self._durability) as buffer:
            before = await state_of(buffer, self._folder)
            for _ in range(calls):
                name = self._chance.choice(_CALLS)
                call = await getattr(self, name)(buffer)
                self._mark("begin", name, self._step)
                await self._done(call)
                self._mark("done")
                before = await self._state_after(name, buffer, before)
                self._mark("end", before)

    async def _done(self, call: Call) -> None:
        self._taken.clear()
        while True:
            try:
                await call()
            except ReplayBufError:
                if not self._faults:
                    raise
                await asyncio.sleep(0.01)
            else:
                return

    async def _state_after(self, name: str, buffer: ReplayBuffer, before: Any) -> Any:
        """Return the state after a call. What was taken or leased by calls that failed comes back before long."""
        async with asyncio.timeout(60):
            while True:
                after = await state_of(buffer, self._folder)
                removed = {number for number, *_ in before[0]} - {number for number, *_ in after[0]}
                leased = sum(bool(row[2]) for row in after[0]) - sum(bool(row[2]) for row in before[0])
                has_removed = name in ("delete", "restore", "acknowledge") or removed == self._taken
                if has_removed and leased <= (name in ("lease", "restore")):
                    return after
                await asyncio.sleep(0.05)

    async def put(self, buffer: ReplayBuffer) -> Call:
        self._number += 1
        return partial(buffer.put, group(self._number), TASK, **self._known())

    async def put_heavy(self, buffer: ReplayBuffer) -> Call:
        self._number += 1
        rollouts = heavy(self._number, self._chance.choice((NBYTES, 4 * NBYTES)))
        return partial(buffer.put, rollouts, TASK, **self._known())

    def _known(self) -> dict[str, Any]:
        return {"tags": {"number": self._number}, "key": str(self._number)}

    async def take(self, buffer: ReplayBuffer) -> Call:
        size = self._chance.randint(1, 2)

        async def take() -> None:
            for rollouts in await buffer.get(size, TASK):
                self._taken.add(number_in(rollouts) if rollouts[0].extra_fields else number_of(rollouts))

        return take

    async def lease(self, buffer: ReplayBuffer) -> Call:
        async def lease() -> None:
            self._leases.append(await buffer.lease_batch({TASK: 1}, seconds=3600))

        return lease

    async def acknowledge(self, buffer: ReplayBuffer) -> Call:
        lease = self._leases.pop() if self._leases else None

        async def acknowledge() -> None:
            if lease is not None:
                with suppress(LeaseLostError, FencedError):  # after a restore, or a failed call that was committed
                    await lease.acknowledge()

        return acknowledge

    async def update(self, buffer: ReplayBuffer) -> Call:
        query = {"uid": {"$gt": self._number // 2}, "status": "completed"}
        return partial(buffer.update, query, status="aborted")

    async def delete(self, buffer: ReplayBuffer) -> Call:
        return partial(buffer.delete, {"status": "aborted"})

    async def checkpoint(self, buffer: ReplayBuffer) -> Call:
        self._step += 1
        return partial(buffer.checkpoint, self._step)

    async def restore(self, buffer: ReplayBuffer) -> Call:
        checkpoints = await buffer.checkpoints()
        step = self._chance.choice(checkpoints).step if checkpoints else None

        async def restore() -> None:
            if step is not None:
                await buffer.restore(step)

        return restore

    async def save(self, buffer: ReplayBuffer) -> Call:
        self._step += 1
        return partial(buffer.save, self._folder / f"{SAVED}{self._step}")


_CALLS = ("put", "put", "put_heavy", "put_heavy", "take", "lease", "acknowledge", "update", "delete")
_CALLS += ("checkpoint", "restore", "save")


if __name__ == "__main__":
    folder, seed, calls, durability = sys.argv[1:]
    faults = "POWER_FAULTS" in os.environ
    asyncio.run(Workload(Path(folder), int(seed), durability, faults=faults).run(int(calls)))
