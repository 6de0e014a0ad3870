"""Several processes at once, and calls that are cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from replaybuf import NotReadyError, ReplayBuffer
from replaybuf.buffer.lease import Cursors
from replaybuf.errors import FragmentError
from replaybuf.integrations.chunks import Chunk, ChunkBuffer
from tests.chunks.conftest import Stores, W, numbers, problem, send, starts, stored


def unhurried(seed: int) -> type[ReplayBuffer]:
    """Buffers whose calls leave time for others before and after, also where the store itself takes none."""
    chance = random.Random(seed)

    async def let_others_run() -> None:
        for _ in range(chance.choice((0, 0, 1, 2, 3, 10, 30))):
            await asyncio.sleep(0)

    def slowed(name: str, owner: type) -> Any:
        async def call(self: Any, *args: Any, **options: Any) -> Any:
            await let_others_run()
            result = await getattr(owner, name)(self, *args, **options)
            await let_others_run()
            return result

        return call

    class UnhurriedCursors(Cursors):
        read, move, put = (slowed(name, Cursors) for name in ("read", "move", "put"))

    class Unhurried(ReplayBuffer):
        put, delete = slowed("put", ReplayBuffer), slowed("delete", ReplayBuffer)
        refresh_staleness = slowed("refresh_staleness", ReplayBuffer)

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.cursors = UnhurriedCursors(self.putting)

        async def find(self, *args: Any, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            await let_others_run()
            async for item in super().find(*args, **options):
                yield item
                await let_others_run()

    return Unhurried


async def test_race__a_chunk_is_made_once_by_those_who_complete_it_together(stores: Stores) -> None:
    for seed in range(2):
        for size in (1, 2):
            stores.renew()
            both = [stores.open(size, buffer_type=unhurried(seed + n)) for n in range(2)]
            await send(both[0], range(size - 1))
            results = await asyncio.gather(*(send(chunks, [size - 1]) for chunks in both), return_exceptions=True)
            assert [result for result in results if result is not True and not isinstance(result, FragmentError)] == []
            assert True in results
            assert await starts(both[0]) == [0]
            assert [await chunks.expected(W) for chunks in both] == [size, size]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_race__fetches_against_workers_against_the_model(stores: Stores, seed: int) -> None:
    """Nothing is drawn twice, or when it was too stale, and what is neither drawn nor too stale is there."""
    size, workers, count, model = 2, "abc", 12, 0
    options: dict[str, Any] = {"max_staleness": 2, "max_times_sampled": 1}
    buffers = [stores.open(size, buffer_type=unhurried(seed * 9 + n), **options) for n in range(5)]
    await buffers[3].advance(0, session=1)
    drawn_chunks: list[Chunk] = []

    async def work(chunks: ChunkBuffer, worker: str) -> None:
        for index in range(count):
            await send(chunks, [index], worker=worker, version=index // 2)

    async def draw(chunks: ChunkBuffer) -> None:
        for _ in range(20):
            with suppress(NotReadyError):
                before = model
                selection = await chunks.fetch(1, timeout=0.001)
                drawn_chunks.extend(selection)
                assert all(chunk.version >= before - 2 for chunk in selection)

    async def advance(chunks: ChunkBuffer) -> None:
        nonlocal model
        for version in range(1, 5):
            await asyncio.sleep(0.002)
            await chunks.advance(version)
            model = version

    works = [work(chunks, worker) for chunks, worker in zip(buffers, workers, strict=False)]
    await asyncio.gather(*works, advance(buffers[3]), draw(buffers[4]), draw(buffers[3]))
    await buffers[3].advance(4)
    chunks = [(chunk.worker, chunk.start) for chunk in (*drawn_chunks, *await stored(buffers[0]))]
    assert len(set(chunks)) == len(chunks)
    fresh = {(worker, start) for worker in workers for start in range(4, count, size)}
    assert fresh <= set(chunks)
    stale = await buffers[0].buffer.dropped("chunks")
    assert len(chunks) + stale == len(workers) * count // size


async def test_race__a_chunk_of_a_session_that_has_just_ended_is_not_made(stores: Stores) -> None:
    chunks = stores.open(2, capacity=1)
    await send(chunks, [0], version=9)
    # Somebody begins a session, and gets no further.
    await chunks._advance(2, 0)
    assert (await problem(chunks.put(1, worker=W, index=1, session=1, version=9))).reason == "session"
    assert await stored(chunks) == []
    assert await chunks.buffer.count_where({"tags.session": 1}) == 0


async def test_race__a_chunk_that_is_stored_as_its_session_ends_is_never_drawn(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = stores.open(1)
    await send(chunks, [0])
    make = chunks._prepare_chunk

    async def late(*arguments: Any) -> Any:
        chunk_made = await make(*arguments)
        assert await chunks.advance(0, session=2) == 1
        return chunk_made

    monkeypatch.setattr(chunks, "_prepare_chunk", late)
    await send(chunks, [1])
    with pytest.raises(NotReadyError):
        await chunks.fetch(1, timeout=0)
    assert await stored(chunks) == []


async def test_race__a_fragment_that_another_has_put_meanwhile_is_a_duplicate(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it completes a chunk or not: who comes second is told, and nothing of its own is stored."""
    first, second = stores.open(3), stores.open(3)
    move = first._move
    for index in range(3):

        async def late(*arguments: Any, index: int = index) -> bool:
            monkeypatch.undo()
            await send(second, [index])
            return await move(*arguments)

        monkeypatch.setattr(first, "_move", late)
        error = await problem(first.put({"n": -1}, worker=W, index=index, session=1, version=0))
        assert (error.reason, error.expected) == ("duplicate", index + 1)
    assert [numbers(chunk) for chunk in await stored(first)] == [[0, 1, 2]]


async def test_race__a_new_session_against_the_old_one(stores: Stores) -> None:
    async def old(chunks: ChunkBuffer) -> None:
        with suppress(FragmentError):
            for index in range(40):
                await send(chunks, [index], worker="old", version=99)
                await asyncio.sleep(0)

    async def new(chunks: ChunkBuffer) -> None:
        await asyncio.sleep(0.005)
        await chunks.advance(0, session=2)
        await send(chunks, range(6), worker="new", session=2)

    for seed in range(3):
        stores.renew()
        first, second = (stores.open(2, buffer_type=unhurried(seed + n), capacity=3) for n in range(2))
        await asyncio.gather(old(first), new(second))
        assert sorted(chunk.start for chunk in await second.fetch(3, timeout=5)) == [0, 2, 4]
        assert {chunk.session for chunk in await second.prepared()} == {2}
        assert len(first) == 0


# Cancellation


async def cancelled_after(call: Any, turns: int) -> Any:
    """Cancel a call after so many turns of the loop; what it came to, or None."""
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def test_cancellation__a_put_that_is_repeated_is_there_once(stores: Stores) -> None:
    chance = random.Random(3)
    for size in (1, 3):
        stores.renew()
        chunks = stores.open(size, buffer_type=unhurried(1))
        for index in range(12):
            for _ in range(3):
                with suppress(FragmentError):
                    await cancelled_after(send(chunks, [index]), chance.randrange(150))
            with suppress(FragmentError):
                await send(chunks, [index])
        assert [numbers(chunk) for chunk in await stored(chunks)] == [
            list(range(n, n + size)) for n in range(0, 12, size)
        ]


async def test_cancellation__a_fetch_loses_nothing(stores: Stores) -> None:
    chance = random.Random(4)
    chunks = stores.open(1, buffer_type=unhurried(2))
    await send(chunks, range(20))
    remaining, cancelled = set(range(20)), 0
    while remaining and cancelled < 15:
        selection = await cancelled_after(chunks.fetch(1, timeout=5), chance.randrange(200))
        if selection is None:
            cancelled += 1
            with suppress(NotReadyError):
                selection = await chunks.prepared()
        stored_starts = set(await starts(chunks))
        assert remaining - stored_starts <= {chunk.start for chunk in selection or ()}
        remaining = stored_starts
    while remaining:
        remaining -= {chunk.start for chunk in await chunks.fetch(1, timeout=5)}


async def test_cancellation__of_waits_is_prompt(stores: Stores) -> None:
    chunks = stores.open()
    for call in (chunks.fetch(1, timeout=None), chunks.prepared(timeout=None)):
        async with asyncio.timeout(5):
            assert await cancelled_after(call, 50) is None
