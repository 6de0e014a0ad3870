"""Statements, round trips and function calls: numbers that no other work on the machine changes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import FrameType
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, fill, new_database, open_buffer, stop_sweeping
from benchmarks.million import refresh
from benchmarks.round_trips import Count, counting_round_trips, counting_statements
from replaybuf import ReplayBuffer

BATCH = 64
REPEATS = 6
#: After a call, until what it left to the background is over, too.
SETTLED_SECONDS = 0.03

Call = Callable[[], Awaitable[Any]]


def _calls(buffer: ReplayBuffer) -> dict[str, Call]:
    step = groups.TRAIN_STEP

    async def put() -> None:
        await buffer.put(groups.small(), TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)

    async def lease() -> None:
        async with buffer.lease_batch({TASK: BATCH}) as leased:
            assert leased.counts == {TASK: BATCH}

    async def next_step() -> None:
        nonlocal step
        step += 1
        await refresh(buffer, step)

    return {
        "put": put,
        "get(64)": lambda: buffer.get(BATCH, TASK),
        "take_batch of 64, with a timeout": lambda: buffer.take_batch({TASK: BATCH}, timeout=60),
        "lease of 64 and its acknowledgement": lease,
        "refresh_staleness": next_step,
        "count": lambda: buffer.count(TASK, "completed"),
        "is_ready": lambda: buffer.is_ready({TASK: BATCH}),
    }


async def statements_and_round_trips(kind: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the statements and the round trips of each call, by connections that have run it before.

    SQLite has no round trips.
    """
    async with AsyncExitStack() as stack:
        url, trips = await stack.enter_async_context(new_database(kind)), Count()
        if kind == "postgresql":
            url, trips = await stack.enter_async_context(counting_round_trips(url))
        statements = stack.enter_context(counting_statements())
        buffer = await stack.enter_async_context(open_buffer(url))
        await stop_sweeping(buffer)
        lowest: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for name, call in _calls(buffer).items():
            await fill(buffer, groups.small, 2 * REPEATS * BATCH)
            repeats = [await _count(call, (statements, trips)) for _ in range(2 * REPEATS)]
            for unit in (0, 1):  # the first half of the repeats warms up: statements are prepared once per connection
                lowest[unit][name] = min(numbers[unit] for numbers in repeats[REPEATS:])
        return lowest


async def _count(call: Call, counts: tuple[Count, ...]) -> list[int]:
    await asyncio.sleep(SETTLED_SECONDS)
    before = [count.value for count in counts]
    await call()
    return [count.value - value for count, value in zip(counts, before, strict=True)]


@contextmanager
def counting_calls() -> Iterator[Count]:
    """Count the calls of Python and C functions by this thread, and by those that are started meanwhile."""
    count = Count()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            count.value += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
