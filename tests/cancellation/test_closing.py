"""Closing a buffer while calls run, or cancelled itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import pytest

from replaybuf.errors import ClosedError
from tests.cancellation.ways import by_cancel, locked
from tests.stores import TASK, build, fill, group, numbers_of, take_all


async def test_a_cancelled_close_still_closes(url: str) -> None:
    chance = random.Random(10)
    for _ in range(10):
        buffer = build(url)
        put = await buffer.put(group(1), TASK)
        assert put is not None
        await by_cancel(buffer.close(), chance.random() * 0.01)
        await buffer.close()
        assert not buffer.storage.thread._thread.is_alive()
        with pytest.raises(ClosedError):
            await buffer.get(1, TASK)


async def test_every_call_that_runs_into_a_close_ends(url: str) -> None:
    """With its result or with ClosedError; what was delivered and what is left make up the whole."""
    chance = random.Random(11)
    durable = ":memory:" not in url
    expected: list[int] = []
    delivered: list[int] = []
    for round_ in range(6):
        buffer = build(url)
        await fill(buffer, 5, 5 * round_)
        expected += range(5 * round_, 5 * round_ + 5)
        takes = [asyncio.create_task(buffer.get(1, TASK)) for _ in range(3)]
        others = [
            asyncio.create_task(buffer.put(group(10_000 + 3 * round_ + i), "other"), name="put") for i in range(3)
        ]
        others += [
            asyncio.create_task(buffer.wait_ready({TASK: 10_000}, timeout=30)),
            asyncio.create_task(buffer.take_batch({TASK: 10_000}, timeout=30)),
            asyncio.create_task(buffer.count_where({})),
        ]
        await asyncio.sleep(chance.random() * 0.01)
        async with asyncio.timeout(10):
            await asyncio.gather(buffer.close(), buffer.close())
            results = await asyncio.gather(*takes, *others, return_exceptions=True)
        for result in results[:3]:
            if isinstance(result, BaseException):
                assert isinstance(result, ClosedError)
            else:
                delivered += numbers_of(result)
        assert all(isinstance(r, (ClosedError, int)) for r in results[3:])
    if durable:
        async with build(url) as buffer:
            delivered += await take_all(buffer)
        assert sorted(delivered) == expected


async def test_close_waits_for_calls_that_wait_for_a_lock(shared_url: str) -> None:
    buffer = build(shared_url)
    await fill(buffer, 3)
    async with locked(shared_url):
        take = asyncio.create_task(buffer.get(1, TASK))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(buffer.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
    await closing
    assert numbers_of(await take) == [0]


async def test_a_result_that_nobody_received_at_close_goes_back(shared_url: str) -> None:
    """A loop that is busy, in another thread, when the buffer is closed, and cancels its take afterwards."""
    buffer = build(shared_url)
    await fill(buffer, 3)
    started, go_on = threading.Event(), threading.Event()
    taken: list[int] = []

    async def consume() -> None:
        task = asyncio.create_task(buffer.get(3, TASK))
        await asyncio.sleep(0)
        started.set()
        assert go_on.wait(10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ClosedError):
            taken.extend(numbers_of(await task))

    thread = threading.Thread(target=lambda: asyncio.run(consume()))
    thread.start()
    await asyncio.to_thread(started.wait, 10)
    await asyncio.sleep(0.1)
    await buffer.close()
    go_on.set()
    await asyncio.to_thread(thread.join)
    async with build(shared_url) as again:
        assert sorted(taken + await take_all(again)) == [0, 1, 2]
