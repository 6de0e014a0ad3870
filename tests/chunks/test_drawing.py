"""Fetches, and the selections that every rank reads."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from replaybuf import NotReadyError
from replaybuf.errors import InputError
from tests.chunks.stores import Stores, same, send


@pytest.mark.parametrize("reuse", [1, 3])
async def test_fetch__each_chunk_is_drawn_as_often_as_allowed(stores: Stores, reuse: int) -> None:
    chunks = stores.open(1, max_times_sampled=reuse, seed=1)
    await send(chunks, range(4))
    drawn: Counter[int] = Counter()
    for _ in range(4 * reuse):
        [chunk] = await chunks.fetch(1, timeout=0)
        drawn[chunk.start] += 1
        assert chunk.times_sampled == drawn[chunk.start]
    assert drawn == dict.fromkeys(range(4), reuse)
    with pytest.raises(NotReadyError):
        await chunks.fetch(1, timeout=0)


async def test_fetch__waits_for_chunks_of_others(stores: Stores) -> None:
    trainer, worker = stores.open(2), stores.open(2)
    fetching = asyncio.create_task(trainer.fetch(2, timeout=20))
    await send(worker, range(3))
    await asyncio.sleep(0.05)
    assert not fetching.done()
    await send(worker, [3])
    assert sorted(chunk.start for chunk in await fetching) == [0, 2]


async def test_fetch__says_what_was_missing_and_draws_nothing(stores: Stores) -> None:
    chunks = stores.open(2)
    await send(chunks, range(3))
    with pytest.raises(NotReadyError, match=r"after 0.05 s: .* has 1 of 2 chunks, and 1 fragments wait") as caught:
        await chunks.fetch(2, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert len(chunks) == 1
    assert (await chunks.fetch(1, timeout=0)).chunks[0].times_sampled == 1


async def test_fetch__is_bounded_by_its_arguments(stores: Stores) -> None:
    chunks = stores.open()
    for n in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="n must be"):
            await chunks.fetch(n, timeout=0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="timeout"):
        await chunks.fetch(1, timeout=-1)


async def test_prepared__is_the_last_selection_for_every_rank(stores: Stores) -> None:
    rank0, rank1 = stores.open(2), stores.open(2)
    await send(rank0, range(8))
    for _ in range(2):
        selection = await rank0.fetch(2, timeout=5)
        assert same(await rank0.prepared(), selection)
        assert same(await rank1.prepared(), selection)
        assert same(await rank1.prepared(), selection)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"], indirect=True)
async def test_prepared__survives_a_restart(stores: Stores) -> None:
    first = stores.open(1)
    await send(first, range(2))
    selection = await first.fetch(2, timeout=5)
    await first.close()
    assert same(await stores.open(1).prepared(), selection)


async def test_prepared__waits_for_a_selection_after_the_one_seen(stores: Stores) -> None:
    rank0, rank1 = stores.open(1), stores.open(1)
    await send(rank0, range(3))
    waiting = asyncio.create_task(rank1.prepared(timeout=20))
    first = await rank0.fetch(1, timeout=5)
    assert same(await waiting, first)
    waiting = asyncio.create_task(rank1.prepared(after=first.number, timeout=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    second = await rank0.fetch(1, timeout=5)
    assert same(await waiting, second)
    assert second.number > first.number


async def test_prepared__says_that_there_is_none(stores: Stores) -> None:
    chunks = stores.open(1)
    with pytest.raises(NotReadyError, match="after 0 s: nothing was fetched yet"):
        await chunks.prepared()
    await send(chunks, [0])
    number = (await chunks.fetch(1, timeout=5)).number
    with pytest.raises(NotReadyError, match=f"after 0.03 s: nothing was fetched after selection {number}"):
        await chunks.prepared(after=number, timeout=0.03)
