"""A worker, a trainer that takes, one that leases: processes on hosts of their own. They say what they were told.

`python -m tests.hosts.roles ROLE URL AHEAD NUMBER`: the wall clock of the host is so many seconds ahead. Their input
ends when they are to end: a worker puts no more, a trainer takes until nothing is left.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from replaybuf import LeaseLostError, ReplayBuffer
from tests.stores import TASK, build, group, numbers_of

LEASE_SECONDS = 8.0
BATCH = 4
#: A worker's numbers begin at a multiple of this.
EACH = 1_000_000


def say(what: str, *numbers: int) -> None:
    print(what, *numbers, flush=True)


async def put(buffer: ReplayBuffer, ending: asyncio.Task[str], first: int) -> None:
    number = first
    while not ending.done():
        await buffer.put(group(number), TASK)
        say("put", number)
        number += 1
        await asyncio.sleep(0.002)


async def take(buffer: ReplayBuffer, ending: asyncio.Task[str], _: int) -> None:
    while True:
        last = ending.done()
        found = numbers_of(await buffer.get(BATCH, TASK))
        say("taken", *found)
        if last and not found:
            return
        await asyncio.sleep(0 if found else 0.02)


async def lease(buffer: ReplayBuffer, ending: asyncio.Task[str], _: int) -> None:
    while True:
        last = ending.done()
        held = await buffer.lease_batch({TASK: BATCH}, seconds=LEASE_SECONDS)
        found = numbers_of(held.batch[TASK])
        await asyncio.sleep(0.02)
        try:
            await held.acknowledge()
            say("taken", *found)
        except LeaseLostError:
            say("late", *found)
        if last and not found and not await _leased(buffer):
            return


async def _leased(buffer: ReplayBuffer) -> int:
    return int((await buffer.metrics(distributions=False))["tasks"][TASK]["leased"])


ROLES = {"put": put, "take": take, "lease": lease}


async def main(role: str, url: str, ahead: float, number: int) -> None:
    right = time.time
    time.time = lambda: right() + ahead
    async with build(url, worker=f"{role}-{number}") as buffer:
        await buffer.count(TASK, "completed")
        say("ready")
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await ROLES[role](buffer, ending, number * EACH)


def run(arguments: Sequence[str]) -> None:
    role, url, ahead, number = arguments
    asyncio.run(main(role, url, float(ahead), int(number)))


if __name__ == "__main__":
    run(sys.argv[1:])
