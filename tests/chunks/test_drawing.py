"""Chunks: drawn, leaving, as the model has them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replaybuf import NotReadyError
from replaybuf.errors import InputError
from tests.chunks.conftest import Stores, numbers, same, send, starts, stored


@pytest.mark.parametrize("reuse", [1, 3])
async def test_fetch__each_chunk_is_drawn_as_often_as_allowed(stores: Stores, reuse: int) -> None:
    chunks = stores.open(1, max_times_sampled=reuse, seed=1)
    await send(chunks, range(4))
    draws: Counter[int] = Counter()
    for _ in range(4 * reuse):
        [chunk] = await chunks.fetch(1, timeout=0)
        draws[chunk.start] += 1
        assert chunk.times_sampled == draws[chunk.start]
    assert draws == dict.fromkeys(range(4), reuse)
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
    with pytest.raises(NotReadyError, match="task chunks: 1 completed group there, 2 needed; nothing was") as caught:
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


async def test_advance__chunks_too_stale_leave(stores: Stores) -> None:
    chunks = stores.open(1, max_staleness=2)
    for index in range(6):
        await send(chunks, [index], version=index)
    assert await chunks.advance(5) == 3
    assert [chunk.version for chunk in await stored(chunks)] == [3, 4, 5]
    assert await chunks.advance(6) == 1
    assert await chunks.advance(5) == 0  # a rank that is late
    assert await chunks.buffer.dropped("chunks") == 4
    assert {chunk.version for chunk in await chunks.fetch(2, timeout=5)} == {4, 5}


async def test_advance__a_chunk_with_a_stale_fragment_is_not_drawn(stores: Stores) -> None:
    chunks = stores.open(2, max_staleness=1)
    await send(chunks, [0], version=3)
    await chunks.advance(5)
    await send(chunks, [1, 2, 3], version=5)
    with pytest.raises(NotReadyError):
        await chunks.fetch(2, timeout=0)
    assert [(chunk.start, numbers(chunk)) for chunk in await chunks.fetch(1, timeout=0)] == [(2, [2, 3])]
    assert await chunks.buffer.dropped("chunks") == 1


async def test_advance__needs_a_session_that_is_not_over(stores: Stores) -> None:
    chunks = stores.open(1)
    with pytest.raises(InputError, match="session="):
        await chunks.advance(1)
    assert await chunks.advance(1, session=3) == 0
    with pytest.raises(InputError, match="session 2 is over"):
        await chunks.advance(1, session=2)
    await send(chunks, [0], session=3)
    assert await chunks.advance(0, session=4) == 1


async def test_advance__a_chunk_that_was_drawn_meanwhile_is_not_drawn_again(stores: Stores) -> None:
    chunks = stores.open(1, max_staleness=1, max_times_sampled=2)
    await send(chunks, [0])
    lease = await chunks.buffer.lease_batch({chunks.name: 1})
    await chunks.advance(2)
    await lease.acknowledge()
    assert len(chunks) == 1
    with pytest.raises(NotReadyError):
        await chunks.fetch(1, timeout=0)
    assert len(chunks) == 0


async def test_staleness__is_what_people_see_in_the_store(stores: Stores) -> None:
    chunks = stores.open(1)
    await send(chunks, [0], version=3)
    await chunks.advance(5)
    await send(chunks, [1], version=4)
    items = [item async for item in chunks.buffer.find({"task_name": "chunks"})]
    assert [(item.staleness, item.priority) for item in items] == [(2, 3.0), (1, 4.0)]


# Capacity


async def test_capacity__the_lowest_version_leaves_then_the_oldest(stores: Stores) -> None:
    chunks = stores.open(1, capacity=3)
    for index, version in enumerate([5, 3, 5, 3, 5, 6]):
        await send(chunks, [index], version=version)
    assert await starts(chunks) == [2, 4, 5]


async def test_capacity__a_put_waits_for_room_if_it_is_to(stores: Stores) -> None:
    limits: dict[str, Any] = {"capacity": 1, "on_full": "block"}
    worker, trainer = stores.open(2, **limits), stores.open(2, **limits)
    await send(worker, range(3))
    putting = asyncio.create_task(send(worker, [3]))
    await asyncio.wait([putting], timeout=0.1)
    assert not putting.done()
    assert [chunk.start for chunk in await trainer.fetch(1, timeout=20)] == [0]
    assert await putting
    assert await starts(worker) == [2]


async def test_capacity__a_stale_newcomer_displaces_nothing_when_its_process_is_behind(stores: Stores) -> None:
    trainer, worker = stores.open(2, capacity=2, max_staleness=9), stores.open(2, capacity=2, max_staleness=9)
    await send(worker, [0], worker="late", version=1)
    for index, version in ((0, 6), (2, 5)):
        await send(trainer, [index, index + 1], version=version)
    await trainer.advance(8)
    await send(worker, [1], worker="late", version=2)
    assert [chunk.version for chunk in await stored(trainer)] == [6, 5]


async def test_capacity__unfinished_fragments_of_many_workers_are_no_chunks(stores: Stores) -> None:
    chunks = stores.open(3, capacity=1)
    for index in range(3):
        for worker in "abcdef":
            await send(chunks, [index], worker=worker)
    [chunk] = await stored(chunks)
    assert chunk.worker == "f"
    assert await chunks.expected("a") == 3


async def test_capacity__a_fetch_that_could_never_be_ready_is_refused(stores: Stores) -> None:
    with pytest.raises(InputError, match="capacity is 3"):
        await stores.open(1, capacity=3).fetch(4, timeout=None)


def usage_query() -> str:
    """The query of the page for the means of reuse and staleness."""
    page = Path("docs/chunks.md").read_text("utf-8")
    [query] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    return str(query)


async def test_the_page_has_the_means_of_reuse_and_staleness_of_chunks_that_left(stores: Stores) -> None:
    chunks = stores.open(1, max_times_sampled=2, max_staleness=9)
    await send(chunks, [0], version=0)
    await chunks.fetch(1, timeout=5)
    await chunks.advance(4)
    await chunks.fetch(1, timeout=5)  # its last use, four versions behind
    await send(chunks, [1], version=4)
    await chunks.fetch(1, timeout=5)  # it stays for another draw
    [(reuse, staleness)] = await chunks.buffer.storage._read(lambda tx: tx.run(usage_query()))
    assert (float(reuse), float(staleness)) == (2, 4)
