"""Commits that wait for a synchronous standby which isn't there: said, given up in time, found again, made once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import ClosedError, UnreachableError
from replaybuf.storage.sql.engine import postgres
from tests.cluster.conftest import Cluster
from tests.faults.conftest import Figures
from tests.stores import TASK, because, build, fill, group, numbers_of, take_all, until

#: What is said.
SAID = r"a commit had no answer for \d+ s: see that the standbys of synchronous_standby_names are connected"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are given up sooner than in earnest."""
    monkeypatch.setattr(postgres, "COMMIT_SECONDS", 0.6)


def given_up(words: str | None = None) -> Any:
    """The error of a commit that was given up."""
    return pytest.raises(UnreachableError, match=words, check=because("commit unanswered"))


@contextlib.asynccontextmanager
async def away(cluster: Cluster) -> AsyncIterator[None]:
    """A block in which the standby isn't there."""
    await asyncio.to_thread(cluster.lose_standby)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.return_standby)


async def was_committed(buffer: ReplayBuffer, error: BaseException) -> bool:
    """What the mark of the call says by now."""
    assert isinstance(error, UnreachableError)
    assert (error.reason, error.in_doubt) == ("commit unanswered", True)
    return bool(await buffer.storage.thread.run(error.was_committed))  # type: ignore[attr-defined]


async def test_a_put_that_was_given_up_is_in_doubt_and_is_found_by_its_mark(synchronous: Cluster) -> None:
    """Others see the group once, and it is there once afterwards."""
    url = synchronous.new_database()
    async with build(url, reconnect_timeout=1) as buffer:
        await fill(buffer, 2)
        async with away(synchronous):
            start = time.monotonic()
            with given_up(SAID + ".* The primary may have it: .*key= can be repeated") as caught:
                await asyncio.wait_for(buffer.put(group(2), TASK), 20)
            assert time.monotonic() - start < 10
            assert caught.value.in_doubt
            assert len(buffer) == 3
        assert await was_committed(buffer, caught.value)
        assert await take_all(buffer) == [0, 1, 2]


async def test_calls_go_on_when_the_standby_is_back_in_time(synchronous: Cluster) -> None:
    async with build(synchronous.new_database()) as buffer:
        await fill(buffer, 2)
        async with away(synchronous):
            putting = asyncio.create_task(buffer.put(group(2), TASK))
            await asyncio.sleep(1.5)
            assert not putting.done()
        await asyncio.wait_for(putting, 20)
        assert await take_all(buffer) == [0, 1, 2]


@pytest.mark.long
async def test_a_take_that_was_given_up_comes_back(synchronous: Cluster) -> None:
    url = synchronous.new_database()
    async with build(url, reconnect_timeout=1) as buffer:
        await fill(buffer, 3)
        async with away(synchronous):
            with given_up():
                await buffer.get(2, TASK)
        await until(lambda: len(buffer) == 3, 30)
        assert await take_all(buffer) == [0, 1, 2]


@pytest.mark.long
async def test_a_buffer_is_not_opened_without_the_standby(synchronous: Cluster) -> None:
    """A new database; nor does it hang. With the tables there, reading goes on."""
    url, opened_url = synchronous.new_database(), synchronous.new_database()
    async with build(opened_url) as buffer:
        await fill(buffer, 1)
    async with away(synchronous):
        start = time.monotonic()
        with given_up(SAID):
            async with build(url, reconnect_timeout=1) as buffer:
                await buffer.put(group(1), TASK)
        async with build(opened_url, reconnect_timeout=1) as buffer:
            assert await buffer.count(TASK, "completed") == 1
            with given_up():
                await buffer.put(group(2), TASK)
        assert time.monotonic() - start < 40


@pytest.mark.long
async def test_what_was_given_up_is_gone_with_the_primary_and_nobody_was_told_of_it(synchronous: Cluster) -> None:
    """It is said of another standby that has taken over: what was told is there, and what wasn't may be repeated."""
    url = synchronous.new_database()
    async with build(url, reconnect_timeout=1) as buffer:
        await fill(buffer, 2)
        synchronous.hold_back()
        with given_up(SAID) as caught:
            await buffer.put(group(2), TASK)
        await asyncio.to_thread(synchronous.fail_over)

        async def can_be_asked() -> bool:
            with contextlib.suppress(UnreachableError):
                return not await was_committed(buffer, caught.value)
            return False

        await until(can_be_asked, 30)
        await buffer.put(group(2), TASK)
        assert await take_all(buffer) == [0, 1, 2]


@pytest.mark.long
async def test_closing_and_cancelling_do_not_wait_for_a_standby(synchronous: Cluster) -> None:
    """The primary has what they leave, once."""
    url = synchronous.new_database()
    buffer = build(url)
    await fill(buffer, 1)
    async with away(synchronous):
        putting = asyncio.create_task(buffer.put(group(1), TASK))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert time.monotonic() - start < 8  # a commit is waited for 10
        other = asyncio.create_task(buffer.get(1, "another"))
        await asyncio.sleep(0.5)
        await buffer.close()
        assert time.monotonic() - start < 15
        with contextlib.suppress(UnreachableError, ClosedError):
            await other
    async with build(url) as buffer:
        assert await take_all(buffer) == [0, 1]


#: How often the standby is ended and started again.
AWAY = int(os.environ.get("REPLAYBUF_TEST_AWAY", "12"))


@pytest.mark.long
async def test_standbys_that_come_and_go_lose_and_double_nothing(synchronous: Cluster, figures: Figures) -> None:
    """For times around those after which calls give up. What is in doubt is asked for, and put again if it isn't there.

    In the end the primary is lost, too.
    """
    url, chance, over = synchronous.new_database(), random.Random(7), asyncio.Event()
    put_numbers: list[int] = []
    received: list[int] = []
    doubts = 0

    async def settled(buffer: ReplayBuffer, error: UnreachableError) -> bool:
        while error.in_doubt:
            with contextlib.suppress(UnreachableError):
                return await was_committed(buffer, error)
            await asyncio.sleep(0.1)
        return False

    async def producer(buffer: ReplayBuffer, number: int) -> None:
        nonlocal doubts
        while not over.is_set():
            try:
                await buffer.put(group(number), TASK)
            except UnreachableError as error:
                doubts += error.in_doubt
                if not await settled(buffer, error):
                    continue
            put_numbers.append(number)
            number += 1

    async def taker(buffer: ReplayBuffer) -> None:
        while not over.is_set():
            with contextlib.suppress(UnreachableError):  # what was taken comes back
                received.extend(numbers_of(await buffer.get(2, TASK)))

    async def goes_on() -> None:
        before = len(put_numbers)
        await until(lambda: len(put_numbers) > before + 10, 60)

    async with build(url, reconnect_timeout=3) as first, build(url, reconnect_timeout=3) as second:
        await fill(first, 1)
        received.extend(await take_all(first))
        tasks = [asyncio.create_task(producer(first, place * 1_000_000 + 1)) for place in range(3)]
        tasks += [asyncio.create_task(taker(buffer)) for buffer in (first, second)]
        for _ in range(AWAY):
            await asyncio.sleep(chance.random())
            async with away(synchronous):
                await asyncio.sleep(6 * chance.random())
            await goes_on()
        await asyncio.to_thread(synchronous.fail_over)
        await goes_on()
        over.set()
        await asyncio.gather(*tasks)

        async def is_complete() -> bool:
            received.extend(await take_all(first))
            return len(received) >= len(put_numbers) + 1

        await until(is_complete, 60)
    figures.compare(AWAY + 1, [0, *put_numbers], received)
    print(f"{AWAY} times without a standby: {len(put_numbers)} groups put, {doubts} puts in doubt")
    assert sorted(received) == sorted([0, *put_numbers])
    assert doubts or AWAY < 12  # few may all be short
