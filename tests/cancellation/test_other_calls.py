"""Puts and other calls that are cancelled are whole or absent. At each of their awaits: `faults/test_cancelled.py`."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest

from replaybuf import NotReadyError, ReplayBuffer
from replaybuf.rules.transitions import Tally
from tests.cancellation.ways import ENDINGS, by_cancel, no_connection_out
from tests.stores import TASK, build, fill, group, number_of, numbers_of, set_by, take_all

ROUNDS = 20


async def test_a_put_that_was_cancelled_is_settled_before_the_next_call(buffer: ReplayBuffer) -> None:
    chance = random.Random(5)
    for number in range(ROUNDS):
        await by_cancel(buffer.put(group(number), TASK), chance.random() * 0.002)
        count = await buffer.count_where({})
        await asyncio.sleep(0.002)
        assert await buffer.count_where({}) == count


async def test_a_cancelled_save_leaves_a_snapshot_that_is_whole_or_none(buffer: ReplayBuffer, tmp_path: Path) -> None:
    chance = random.Random(9)
    await fill(buffer, 30)
    whole = 0
    for number in range(4):
        folder = tmp_path / str(number)
        await by_cancel(buffer.save(folder), chance.random() * 0.06)
        await buffer.count_where({})
        if (folder / "replaybuf.sqlite").exists():
            async with build("sqlite:///:memory:") as copy:
                await copy.resume(folder)
                assert sorted(await take_all(copy)) == list(range(30))
            whole += 1
    await buffer.save(tmp_path / "last")
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == ["replaybuf.sqlite"]


async def cancelled_at_every_turn(task: asyncio.Task[None]) -> None:
    """Cancel a task again and again until it has ended, as anyio's cancel scopes do."""
    async with asyncio.timeout(30):
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_lease_block_settles_its_groups_however_often_it_is_cancelled(
    buffer: ReplayBuffer, is_done: bool
) -> None:
    """Given back, uncounted, when it was cancelled; acknowledged when its work was done."""
    await fill(buffer, 4)
    for left in (2, 0) if is_done else (4, 4):
        inside = asyncio.Event()

        async def work(inside: asyncio.Event = inside) -> None:
            async with buffer.lease_batch({TASK: 2}):
                inside.set()
                if not is_done:
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await set_by(inside, task)
        await cancelled_at_every_turn(task)
        await buffer.count_where({})
        found = [item async for item in buffer.find({})]
        assert (len(found), sum(item.deliveries for item in found)) == (left, 0)
        assert sum(n for (*_, name), n in (await buffer.tallies()).items() if name == Tally.LEASED) == 0


async def test_a_find_that_is_left_in_the_middle_holds_nothing(buffer: ReplayBuffer) -> None:
    await fill(buffer, 10)
    finding = buffer.find({})
    assert number_of((await anext(finding)).item) == 0
    await no_connection_out(buffer)
    assert len(await take_all(buffer)) == 10
    await finding.aclose()  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_of_cancellations_loses_nothing(url: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(seed)
    caplog.set_level(logging.INFO)
    taken: list[int] = []
    put: set[int] = set()
    async with build(url) as buffer:

        async def produce(number: int) -> None:
            if await ENDINGS[number % 2](buffer.put(group(number), TASK), chance.random() * 0.01) is not None:
                put.add(number)

        async def consume(number: int) -> None:
            call = buffer.get(2, TASK) if number % 2 else buffer.take_batch({TASK: 2}, timeout=0.01)
            try:
                result = await ENDINGS[number % 2](call, chance.random() * 0.02)
            except NotReadyError:
                return
            groups = result if isinstance(result, list) else result[0][TASK] if result else []
            taken.extend(numbers_of(groups))

        for first in range(0, 600, 30):
            await asyncio.gather(*(f(n) for n in range(first, first + 30) for f in (produce, consume)))
        taken += await take_all(buffer)
    assert len(set(taken)) == len(taken)
    assert put <= set(taken)
    assert [record for record in caplog.records if record.name == "asyncio"] == []
