"""A worker, a trainer that takes, one that leases: processes on hosts of their own. They print what they call.

`python -m tests.hosts.roles ROLE URL AHEAD NUMBER SILENCE`: the wall clock of the host is so many seconds ahead, and a
connection that is silent for so many seconds is given up. The role is put, take or lease, or call for any of these; it
goes on until the input ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from replaybuf.storage.sql.engine import thread
from tests.histories.history import Recorder
from tests.histories.workers import Worker
from tests.stores import TASK, build

LEASE_SECONDS = 8.0
#: A worker's numbers begin at a multiple of this.
EACH = 1_000_000


class Output:
    """A ledger that another process reads."""

    def write(self, event: str, *values: object) -> None:
        print(event, *values, flush=True)


async def main(role: str, url: str, ahead: float, number: int, silence: int) -> None:
    right, thread.SILENCE_SECONDS = time.time, silence
    time.time = lambda: right() + ahead
    async with build(url, worker=f"{role}-{number}", max_deliveries=0) as buffer:
        await buffer.count(TASK, "completed")
        worker = Worker(buffer, Recorder(Output()), number * EACH, number, seconds=LEASE_SECONDS)
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not ending.done():
            await getattr(worker, role)()
            await asyncio.sleep(0.01)


def run(arguments: Sequence[str]) -> None:
    role, url, ahead, number, silence = arguments
    asyncio.run(main(role, url, float(ahead), int(number), int(silence)))


if __name__ == "__main__":
    run(sys.argv[1:])
