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
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from replaybuf import Lease, ReplayBufError, ReplayBuffer
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
        return [[list(row) for row in groups], [one.step for one in await buffer.checkpoints()]]


class Workload:
    """Calls of a buffer, chosen by a seed."""

    def __init__(self, folder: Path, seed: int, durability: str) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self._durability = durability
        self._number = self._step = 0
        self._leases: list[Lease[Any]] = []
        self._marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _mark(self, *mark: Any) -> None:
        os.write(self._marks, json.dumps(mark).encode() + b"\n")

    async def run(self, calls: int) -> None:
        async with buffer_in(self._folder, self._durability) as buffer:
            for _ in range(calls):
                name = self._chance.choice(_CALLS)
                self._mark("begin", name, self._step + 1)
                await getattr(self, name)(buffer)
                self._mark("end", await state_of(buffer, self._folder))

    async def put(self, buffer: ReplayBuffer) -> None:
        self._number += 1
        await buffer.put(group(self._number), TASK, tags={"number": self._number})

    async def put_heavy(self, buffer: ReplayBuffer) -> None:
        self._number += 1
        rollouts = heavy(self._number, self._chance.choice((NBYTES, 4 * NBYTES)))
        await buffer.put(rollouts, TASK, tags={"number": self._number})

    async def take(self, buffer: ReplayBuffer) -> None:
        await buffer.get(self._chance.randint(1, 2), TASK)

    async def lease(self, buffer: ReplayBuffer) -> None:
        self._leases.append(await buffer.lease_batch({TASK: 1}, seconds=3600))

    async def acknowledge(self, _: ReplayBuffer) -> None:
        if self._leases:
            with suppress(ReplayBufError):  # after a restore it is lost
                await self._leases.pop().acknowledge()

    async def update(self, buffer: ReplayBuffer) -> None:
        await buffer.update({"uid": {"$gt": self._number // 2}, "status": "completed"}, status="aborted")

    async def delete(self, buffer: ReplayBuffer) -> None:
        await buffer.delete({"status": "aborted"})

    async def checkpoint(self, buffer: ReplayBuffer) -> None:
        self._step += 1
        await buffer.checkpoint(self._step)

    async def restore(self, buffer: ReplayBuffer) -> None:
        if kept := await buffer.checkpoints():
            await buffer.restore(self._chance.choice(kept).step)

    async def save(self, buffer: ReplayBuffer) -> None:
        self._step += 1
        await buffer.save(self._folder / f"{SAVED}{self._step}")


_CALLS = ("put", "put", "put_heavy", "put_heavy", "take", "lease", "acknowledge", "update", "delete")
_CALLS += ("checkpoint", "restore", "save")


if __name__ == "__main__":
    asyncio.run(Workload(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4]).run(int(sys.argv[3])))
