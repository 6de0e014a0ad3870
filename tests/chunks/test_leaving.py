"""Chunks leave when they are too stale, or too many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaybuf import NotReadyError
from replaybuf.errors import InputError
from tests.chunks.stores import Stores, numbers, send, starts, stored


async def test_advance__chunks_too_stale_leave(stores: Stores) -> None:
    chunks = stores.open(1, max_staleness=2)
    for index in range(6):
        await send(chunks, [index], version=index)
    assert await chunks.advance(5) == 3
    assert [chunk.version for chunk in await stored(chunks)] == [3, 4, 5]
    assert await chunks.advance(6) == 1
    assert await chunks.advance(5) == 0  # a rank that is late
    assert (await chunks.dropped())["stale"] == 4


async def test_advance__a_chunk_with_a_stale_fragment_is_not_drawn(stores: Stores) -> None:
    chunks = stores.open(2, max_staleness=1)
    await send(chunks, [0], version=3)
    await chunks.advance(5)
    await send(chunks, [1, 2, 3], version=5)
    with pytest.raises(NotReadyError):
        await chunks.fetch(2, timeout=0)
    assert [(chunk.start, numbers(chunk)) for chunk in await chunks.fetch(1, timeout=0)] == [(2, [2, 3])]
    assert await chunks.dropped() == {"stale": 1, "damaged": 0}


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


async def test_capacity__a_stale_newcomer_displaces_nothing(stores: Stores) -> None:
    chunks = stores.open(1, capacity=3)
    for index in range(3):
        await send(chunks, [index], version=5)
    await send(chunks, [3, 4], version=4)
    assert await starts(chunks) == [0, 1, 2]


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
