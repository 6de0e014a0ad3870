"""Puts and takes until its input ends, behind a network that a test cuts; says on its output what it was told."""

from __future__ import annotations

import asyncio
import logging
import sys

from replaybuf.storage.sql.engine import thread
from tests.stores import TASK, build, group, numbers_of


def say(what: str, value: object) -> None:
    print(what, value, flush=True)


class Saying(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.levelname, record.getMessage())


async def main(url: str, silence: int) -> None:
    thread.SILENCE_SECONDS = silence
    logger = logging.getLogger("replaybuf.database")
    logger.addHandler(Saying())
    logger.setLevel(logging.INFO)
    put = taken = 0
    producing = True
    async with build(url) as buffer:
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))

        async def produce() -> None:
            nonlocal put, producing
            while not ending.done():
                await buffer.put(group(put), TASK)
                say("put", put)
                put += 1
            producing = False

        async def consume() -> None:
            nonlocal taken
            while producing or taken < put:
                for number in numbers_of(await buffer.get(3, TASK)):
                    say("taken", number)
                    taken += 1

        await asyncio.gather(produce(), consume())
        say("left", len(buffer))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
