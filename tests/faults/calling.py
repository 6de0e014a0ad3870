"""Workers of one process that call buffers all the while, and record it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from replaybuf import ReplayBuffer
from tests.histories.history import Recorder
from tests.histories.workers import Worker
from tests.stores import until


@asynccontextmanager
async def calling(recorder: Recorder, buffers: Iterable[ReplayBuffer]) -> AsyncIterator[asyncio.Event]:
    """A block in which workers call these buffers, one each. It yields what is set at the end."""
    over = asyncio.Event()

    async def work(buffer: ReplayBuffer, number: int) -> None:
        worker = Worker(buffer, recorder, 1_000_000 * number, number, seconds=2)
        while not over.is_set():
            await worker.call()

    async with asyncio.TaskGroup() as tasks:
        for number, buffer in enumerate(buffers):
            tasks.create_task(work(buffer, number))
        yield over
        over.set()


async def goes_on(recorder: Recorder, *kinds: str, more: int = 5, seconds: float = 30) -> None:
    """Wait until calls of each of these kinds have returned with so many more groups."""
    before = {kind: recorder.done[kind] for kind in kinds}
    await until(lambda: all(recorder.done[kind] > count + more for kind, count in before.items()), seconds)
