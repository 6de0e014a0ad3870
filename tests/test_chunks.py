"""Chunks of worker fragments: what the layer promises, over every backend."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaybuf import (
    Chunk,
    ChunkBuffer,
    ChunkBufferConfig,
    ConfigError,
    EncodeError,
    FragmentError,
    InputError,
    Lease,
    NotReadyError,
    ReplayBufError,
    ReplayBuffer,
    RolloutType,
    Selection,
)

ROOT = Path(__file__).resolve().parents[1]
W = "w"


class Stores:
    """Chunk buffers over one store: `open` gives another one, as another process or a later run would have it."""

    def __init__(self, kind: str, lend: Callable[[], str]) -> None:
        self._kind = kind
        self._lend = lend
        self._opened: list[ChunkBuffer] = []
        self.renew()

    @property
    def patience(self) -> int:
        """By how much shorter the long tests are here."""
        return 1 if self._kind == "memory" else 4

    def renew(self) -> None:
        """From now on another, empty store."""
        self._url = self._lend()
        self._shared: Any = None

    def open(
        self, fragments_per_chunk: int = 3, *, buffer_type: type[ReplayBuffer] = ReplayBuffer, **options: Any
    ) -> ChunkBuffer:
        config = ChunkBufferConfig(url=self._url, fragments_per_chunk=fragments_per_chunk, **options)
        storage = config.store().build().storage
        if self._kind in ("memory", "pandas"):
            storage = self._shared = storage if self._shared is None else self._shared
        chunks = ChunkBuffer(
            buffer_type(storage, RolloutType(dict)),
            name=config.name,
            fragments_per_chunk=config.fragments_per_chunk,
            max_staleness=config.max_staleness,
            on_problem=config.on_problem,
            lease_seconds=config.lease_seconds,
        )
        self._opened.append(chunks)
        return chunks

    async def close(self) -> None:
        for chunks in self._opened:
            await chunks.close()
        self._opened.clear()


@pytest.fixture(params=["memory", "pandas", "sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lend(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A function that gives the URL of another empty store at each call."""
    numbers = iter(range(10**6))
    if kind == "postgresql":
        with request.getfixturevalue("postgres_databases").lent() as lend_one:
            yield lend_one
    elif kind == "sqlite":
        yield lambda: f"sqlite:///{tmp_path}/chunks-{next(numbers)}.db"
    else:
        yield lambda: f"{kind}://"


@pytest.fixture
async def stores(kind: str, lend: Callable[[], str]) -> AsyncIterator[Stores]:
    stores = Stores(kind, lend)
    yield stores
    await stores.close()


async def send(chunks: ChunkBuffer, indices: Any, *, worker: str = W, session: int = 1, version: int = 0) -> list[bool]:
    return [
        await chunks.put({"n": index}, worker=worker, index=index, session=session, version=version)
        for index in indices
    ]


async def stored(chunks: ChunkBuffer) -> list[Chunk]:
    """The chunks that there are, in the order in which they were made."""
    return [Chunk.of(item) async for item in chunks.buffer.find({"task_name": chunks.name, "status": "completed"})]


async def starts(chunks: ChunkBuffer) -> list[int]:
    return [chunk.start for chunk in await stored(chunks)]


def numbers(chunk: Chunk) -> list[int]:
    return [fragment["n"] for fragment in chunk.fragments]


def same(first: Selection, second: Selection) -> bool:
    return first.number == second.number and list(map(repr, first)) == list(map(repr, second))


async def problem(call: Awaitable[Any]) -> FragmentError:
    with pytest.raises(FragmentError) as caught:
        await call
    return caught.value


# Joining


async def test_put__consecutive_fragments_of_a_worker_are_joined(stores: Stores) -> None:
    chunks = stores.open()
    assert await send(chunks, range(4, 12)) == [True] * 8
    assert [(chunk.start, numbers(chunk)) for chunk in await stored(chunks)] == [(4, [4, 5, 6]), (7, [7, 8, 9])]
    assert await chunks.expected(W) == 12


async def test_put__workers_do_not_mix(stores: Stores) -> None:
    chunks = stores.open(2)
    for index in range(4):
        for worker in ("a", "b/1", "b"):
            await send(chunks, [index], worker=worker)
    found = [(chunk.worker, numbers(chunk)) for chunk in await stored(chunks)]
    assert sorted(found) == sorted((worker, pair) for worker in ("a", "b/1", "b") for pair in ([0, 1], [2, 3]))


async def test_put__a_chunk_may_be_one_fragment(stores: Stores) -> None:
    chunks = stores.open(1)
    await send(chunks, range(3))
    assert await starts(chunks) == [0, 1, 2]
    assert (await problem(chunks.put(0, worker=W, index=2, session=1, version=0))).kind == "duplicate"


async def test_put__data_comes_back_as_it_was(stores: Stores) -> None:
    chunks = stores.open(2)
    data = {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "action": (1, "jump"), "status": "mine"}
    await chunks.put(data, worker=W, index=0, session=1, version=5)
    await chunks.put([b"x", None], worker=W, index=1, session=1, version=4)
    [chunk] = await chunks.fetch(1, timeout=5)
    first, second = chunk.fragments
    assert (first["image"] == data["image"]).all()
    assert first["image"].dtype == np.uint8
    assert (first["action"], first["status"], second) == ((1, "jump"), "mine", [b"x", None])
    assert (chunk.version, chunk.versions, chunk.session, chunk.times_sampled) == (4, (5, 4), 1, 1)


async def test_put__only_chunks_are_counted_by_len(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(5))
    assert len(chunks) == 1


async def test_put__what_can_not_be_stored_is_refused_and_may_be_put_again(stores: Stores) -> None:
    chunks = stores.open(2)
    await send(chunks, [0])
    with pytest.raises(EncodeError):
        await chunks.put(object(), worker=W, index=1, session=1, version=0)
    await send(chunks, [1])
    assert await starts(chunks) == [0]


WRONG: list[tuple[str, Any]] = [
    *(("worker", value) for value in ("", 3, "x" * 151, "nul\0")),
    *((name, value) for name in ("index", "session", "version") for value in (-1, 1.0, True, None, 2**53)),
]


async def test_put__arguments_are_checked(stores: Stores) -> None:
    good: dict[str, Any] = {"worker": W, "index": 0, "session": 1, "version": 0}
    for name, value in WRONG:
        with pytest.raises(InputError, match=name):
            await stores.open().put(1, **(good | {name: value}))


# Problems


async def test_put__numbers_may_be_those_of_numpy(stores: Stores) -> None:
    chunks = stores.open(2)
    for index in np.arange(4):
        assert await chunks.put(int(index), worker=W, index=index, session=np.int64(0), version=np.int32(0))
    await chunks.advance(np.int64(1), session=np.uint8(0))
    selection = await chunks.fetch(np.int64(2), timeout=np.float32(5))
    prepared = await chunks.prepared(after=np.int64(selection.number - 1))
    assert (prepared.number, len(prepared)) == (selection.number, 2)


async def test_gap__is_an_error_that_says_what_to_do(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(2))
    error = await problem(chunks.put(1, worker=W, index=3, session=1, version=0))
    assert (error.kind, error.expected, error.index, error.worker, error.session) == ("gap", 2, 3, W, 1)
    assert "the next one is 2" in str(error)
    assert isinstance(error, ReplayBufError)
    await send(chunks, [2])
    assert await starts(chunks) == [0]


async def test_gap__dropped_the_unfinished_leave_and_the_next_chunk_starts_there(stores: Stores) -> None:
    chunks = stores.open(on_problem="drop")
    assert await send(chunks, [0, 1, 5, 6, 7]) == [True] * 5
    assert await starts(chunks) == [5]
    assert (await chunks.dropped())["gap"] == 1


async def test_duplicate__is_an_error_also_when_its_chunk_has_left(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(4))
    await chunks.fetch(1, timeout=5)
    assert len(chunks) == 0
    for index in range(4):
        error = await problem(chunks.put(1, worker=W, index=index, session=1, version=0))
        assert (error.kind, error.expected) == ("duplicate", 4)


async def test_duplicate__dropped_is_counted_and_changes_nothing(stores: Stores) -> None:
    chunks = stores.open(on_problem="drop")
    assert await send(chunks, [0, 1, 1, 0, 2, 2]) == [True, True, False, False, True, False]
    assert await starts(chunks) == [0]
    assert (await chunks.dropped())["duplicate"] == 3


async def test_duplicate__is_an_error_also_when_another_process_has_put_it(stores: Stores) -> None:
    """Though this one was the last to put, and knows what comes next."""
    chunks, other = stores.open(2), stores.open(2)
    await send(chunks, [0, 1])
    await send(other, [2])
    error = await problem(chunks.put(1, worker=W, index=2, session=1, version=0))
    assert (error.kind, error.expected) == ("duplicate", 3)


async def test_session__an_older_one_is_an_error(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, [0], session=4)
    error = await problem(chunks.put(1, worker="other", index=0, session=3, version=9))
    assert (error.kind, error.expected, error.session) == ("session", 4, 3)


async def test_session__an_older_one_dropped_is_counted(stores: Stores) -> None:
    chunks = stores.open(on_problem="drop")
    await send(chunks, [0], session=4)
    assert await send(chunks, [0, 1], session=3) == [False, False]
    assert (await chunks.dropped())["session"] == 2


async def test_session__a_newer_one_begins_and_all_of_the_older_leaves(stores: Stores) -> None:
    chunks = stores.open(2, max_reuse=0)
    await send(chunks, range(3), version=9)
    await chunks.fetch(1, timeout=5)
    await send(chunks, [7, 8], session=2)
    assert [(chunk.session, chunk.start) for chunk in await stored(chunks)] == [(2, 7)]
    with pytest.raises(NotReadyError):
        await chunks.prepared()
    assert await chunks.buffer.count_where({"tags.session": 1}) == 0


async def test_session__others_notice_that_it_is_over(stores: Stores) -> None:
    old, new = stores.open(), stores.open()
    await send(old, range(2))
    await send(new, [0], session=2)
    assert (await problem(old.put(1, worker=W, index=2, session=1, version=0))).kind == "session"


async def test_dropped__is_the_same_for_all_and_after_a_restart(stores: Stores) -> None:
    await send(stores.open(on_problem="drop"), [0, 0, 7, 7])
    again = stores.open()
    assert await again.dropped() == {"gap": 1, "duplicate": 2, "session": 0, "stale": 0, "damaged": 0}


async def test_forget__a_worker_may_start_anew(stores: Stores) -> None:
    chunks = stores.open(2)
    await send(chunks, range(3))
    assert await chunks.forget(W) == 1
    assert await chunks.expected(W) is None
    await send(chunks, range(2))
    assert sorted(await starts(chunks)) == [0]  # the same chunk once more takes the place of the first
    assert await chunks.forget("unknown") == 0


async def test_damage__a_fragment_that_can_not_be_read_takes_its_chunk_with_it(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(2))
    find = chunks.buffer.find

    async def damaged(*args: Any, **options: Any) -> AsyncIterator[Any]:
        async for item in find(*args, **options):
            if (item.tags or {}).get("index") == 1:
                item.item, item.error = [], "bit rot"
            yield item

    chunks.buffer.find = damaged  # type: ignore[method-assign]
    await send(chunks, range(2, 6))
    assert await starts(chunks) == [3]
    assert (await chunks.dropped())["damaged"] == 1


# Staleness


async def test_advance__chunks_too_stale_leave(stores: Stores) -> None:
    chunks = stores.open(1, max_staleness=2)
    for index in range(6):
        await send(chunks, [index], version=index)
    assert await chunks.advance(5) == 3
    assert [chunk.version for chunk in await stored(chunks)] == [3, 4, 5]
    assert await chunks.advance(6) == 1
    assert await chunks.advance(5) == 0  # a rank that is late
    assert (await chunks.dropped())["stale"] == 4


async def test_advance__a_chunk_is_as_old_as_its_oldest_fragment(stores: Stores) -> None:
    chunks = stores.open(2, max_staleness=1)
    await send(chunks, [0], version=3)
    await send(chunks, [1], version=7)
    assert await chunks.advance(4) == 0
    assert await chunks.advance(5) == 1


async def test_advance__a_chunk_that_is_too_stale_when_it_is_made_is_counted_and_not_stored(stores: Stores) -> None:
    chunks = stores.open(2, max_staleness=1)
    await send(chunks, [0], version=3)
    await chunks.advance(5)
    await send(chunks, [1, 2, 3], version=5)
    assert await starts(chunks) == [2]
    assert (await chunks.dropped())["stale"] == 1


async def test_advance__without_a_bound_all_stay(stores: Stores) -> None:
    chunks = stores.open(1)
    await send(chunks, range(3))
    assert await chunks.advance(10**6) == 0
    assert len(chunks) == 3


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
    chunks = stores.open(1, max_staleness=1, max_reuse=2)
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
    chunks = stores.open(1, max_chunks=3)
    for index, version in enumerate([5, 3, 5, 3, 5, 6]):
        await send(chunks, [index], version=version)
    assert await starts(chunks) == [2, 4, 5]


async def test_capacity__a_stale_newcomer_displaces_nothing(stores: Stores) -> None:
    chunks = stores.open(1, max_chunks=3)
    for index in range(3):
        await send(chunks, [index], version=5)
    assert await send(chunks, [3, 4], version=4) == [True, True]
    assert await starts(chunks) == [0, 1, 2]


async def test_capacity__a_stale_newcomer_displaces_nothing_when_its_process_is_behind(stores: Stores) -> None:
    trainer, worker = stores.open(2, max_chunks=2, max_staleness=9), stores.open(2, max_chunks=2, max_staleness=9)
    await send(worker, [0], worker="late", version=1)
    for index, version in ((0, 6), (2, 5)):
        await send(trainer, [index, index + 1], version=version)
    await trainer.advance(8)
    await send(worker, [1], worker="late", version=2)
    assert [chunk.version for chunk in await stored(trainer)] == [6, 5]


async def test_capacity__unfinished_fragments_of_many_workers_are_no_chunks(stores: Stores) -> None:
    chunks = stores.open(3, max_chunks=1)
    for index in range(3):
        for worker in "abcdef":
            await send(chunks, [index], worker=worker)
    [chunk] = await stored(chunks)
    assert chunk.worker == "f"
    assert await chunks.expected("a") == 3


async def test_capacity__a_fetch_that_could_never_be_ready_is_refused(stores: Stores) -> None:
    with pytest.raises(InputError, match="capacity is 3"):
        await stores.open(1, max_chunks=3).fetch(4, timeout=None)


# Drawing


@pytest.mark.parametrize("reuse", [1, 3])
async def test_fetch__each_chunk_is_drawn_max_reuse_times(stores: Stores, reuse: int) -> None:
    chunks = stores.open(1, max_reuse=reuse, seed=1)
    await send(chunks, range(4))
    drawn: Counter[int] = Counter()
    for _ in range(4 * reuse):
        [chunk] = await chunks.fetch(1, timeout=0)
        drawn[chunk.start] += 1
        assert chunk.times_sampled == drawn[chunk.start]
    assert drawn == dict.fromkeys(range(4), reuse)
    with pytest.raises(NotReadyError):
        await chunks.fetch(1, timeout=0)


async def test_fetch__is_uniform(stores: Stores) -> None:
    chunks = stores.open(1, max_reuse=0, seed=7)
    await send(chunks, range(8))
    rounds, size = 150, 2
    drawn: Counter[int] = Counter()
    pairs: Counter[frozenset[int]] = Counter()
    for _ in range(rounds):
        starts_drawn = [chunk.start for chunk in await chunks.fetch(size, timeout=5)]
        drawn.update(starts_drawn)
        pairs[frozenset(starts_drawn)] += 1
    p = size / 8
    sigma = math.sqrt(rounds * p * (1 - p))
    assert all(abs(drawn[start] - rounds * p) < 4 * sigma for start in range(8))
    expected = rounds / 28
    # Chi-squared with 27 degrees of freedom: 55.5 is exceeded once in a thousand times.
    assert sum((pairs[frozenset((i, j))] - expected) ** 2 / expected for i in range(8) for j in range(i)) < 55.5


async def test_fetch__draws_different_chunks(stores: Stores) -> None:
    chunks = stores.open(1, max_reuse=5)
    await send(chunks, range(6))
    assert sorted(chunk.start for chunk in await chunks.fetch(6, timeout=5)) == list(range(6))


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
    with pytest.raises(NotReadyError, match=r"after 0.05 s: 1 of 2 chunks .* and 1 fragments wait") as caught:
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


async def test_fetch__each_draw_goes_to_one_taker(stores: Stores) -> None:
    takers = [stores.open(1) for _ in range(4)]
    await send(takers[0], range(24))
    taken = await asyncio.gather(*(taker.fetch(2, timeout=20) for taker in takers for _ in range(3)))
    assert sorted(chunk.start for selection in taken for chunk in selection) == list(range(24))


async def test_prepared__is_the_last_selection_for_every_rank(stores: Stores) -> None:
    rank0, rank1 = stores.open(2), stores.open(2)
    await send(rank0, range(8))
    for _ in range(2):
        selection = await rank0.fetch(2, timeout=5)
        assert same(await rank0.prepared(), selection)
        assert same(await rank1.prepared(), selection)
        assert same(await rank1.prepared(), selection)


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


# Restarts and other processes


async def test_restart__unfinished_chunks_go_on(stores: Stores) -> None:
    for index in range(7):
        chunks = stores.open()
        await send(chunks, [index])
        await chunks.close()
    assert [numbers(chunk) for chunk in await stored(stores.open())] == [[0, 1, 2], [3, 4, 5]]


async def test_restart__what_is_expected_is_known(stores: Stores) -> None:
    first = stores.open()
    await send(first, range(3))
    await first.fetch(1, timeout=5)
    await first.close()
    again = stores.open()
    assert await again.expected(W) == 3
    assert (await problem(again.put(1, worker=W, index=4, session=1, version=0))).kind == "gap"
    assert (await problem(again.put(1, worker=W, index=2, session=1, version=0))).kind == "duplicate"


async def test_restart__with_another_size_a_begun_chunk_keeps_its_own(stores: Stores) -> None:
    await send(stores.open(4), range(3))
    await send(stores.open(2), range(3, 6))
    assert [numbers(chunk) for chunk in await stored(stores.open())] == [[0, 1, 2, 3], [4, 5]]


class Died(BaseException):
    """The process was killed."""


def dying(fatal: int, *, before: bool) -> type[ReplayBuffer]:
    """Buffers that can do so many writes; the next one is the last thing that their process does, or doesn't."""
    writes = 0

    class Dying(ReplayBuffer):
        async def put(self, *args: Any, **options: Any) -> int | None:
            nonlocal writes
            writes += 1
            if writes > fatal or (before and writes == fatal):
                raise Died
            uid = await super().put(*args, **options)
            if writes == fatal:
                raise Died
            return uid

    return Dying


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_death__at_any_write_costs_nothing(stores: Stores, size: int, before: bool) -> None:
    for fatal in range(1, 13, min(3, stores.patience)):
        stores.renew()
        mortal = stores.open(size, buffer_type=dying(fatal, before=before))
        index = 0
        with suppress(Died):
            for index in range(7):
                await send(mortal, [index])
        again = stores.open(size)
        with suppress(FragmentError):  # a duplicate: it was stored
            await send(again, [index])
        await send(again, range(index + 1, 7))
        found = [numbers(chunk) for chunk in await stored(again)]
        assert found == [list(range(n, n + size)) for n in range(0, 7 - size + 1, size)]
        assert await again.expected(W) == 7


@pytest.mark.parametrize("fatal", [1, 2, 3, 4, 5])
async def test_death__a_complete_chunk_is_made_by_the_next_fetch(stores: Stores, fatal: int) -> None:
    mortal = stores.open(2, buffer_type=dying(fatal, before=False))
    with suppress(Died):
        await send(mortal, range(2))
    again = stores.open(2)
    if await again.buffer.count_where({"tags.last": True}) or await stored(again):
        assert [numbers(chunk) for chunk in await again.fetch(1, timeout=5)] == [[0, 1]]
        assert await again.expected(W) == 2
    else:
        assert fatal < 4


async def test_death__between_the_selection_and_its_end_gives_the_chunks_back(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = stores.open(1)
    await send(again, [0])
    mortal = stores.open(1, buffer_type=dying(1, before=False), lease_seconds=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "give_back", AsyncMock(side_effect=Died))  # the dead give nothing back
        with pytest.raises(Died):
            await mortal.fetch(1, timeout=5)
    with pytest.raises(NotReadyError):
        await again.fetch(1, timeout=0)
    prepared = await again.prepared()
    assert [chunk.start for chunk in prepared] == [0]
    selection = await again.fetch(1, timeout=5)
    assert [(chunk.start, chunk.times_sampled) for chunk in selection] == [(0, 1)]
    assert selection.number > prepared.number


def unhurried(seed: int) -> type[ReplayBuffer]:
    """Buffers whose calls leave time for others before and after, also where the store itself takes none."""
    chance = random.Random(seed)

    async def others() -> None:
        for _ in range(chance.choice((0, 0, 1, 2, 3, 10, 30))):
            await asyncio.sleep(0)

    class Unhurried(ReplayBuffer):
        async def put(self, *args: Any, **options: Any) -> int | None:
            await others()
            uid = await super().put(*args, **options)
            await others()
            return uid

        async def delete(self, *args: Any, **options: Any) -> int:
            await others()
            count = await super().delete(*args, **options)
            await others()
            return count

        async def count_where(self, *args: Any, **options: Any) -> int:
            await others()
            count = await super().count_where(*args, **options)
            await others()
            return count

        async def refresh_staleness(self, **options: Any) -> dict[str, int]:
            await others()
            counts = await super().refresh_staleness(**options)
            await others()
            return counts

        async def find(self, *args: Any, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            await others()
            async for item in super().find(*args, **options):
                yield item
                await others()

    return Unhurried


async def test_race__a_chunk_is_made_once_by_those_who_complete_it_together(stores: Stores) -> None:
    for seed in range(12 // stores.patience):
        for size in (1, 2):
            stores.renew()
            both = [stores.open(size, buffer_type=unhurried(seed + n)) for n in range(2)]
            await send(both[0], range(size - 1))
            results = await asyncio.gather(*(send(chunks, [size - 1]) for chunks in both), return_exceptions=True)
            assert all(result == [True] or isinstance(result, FragmentError) for result in results)
            assert [True] in results
            assert await starts(both[0]) == [0]
            assert [await chunks.expected(W) for chunks in both] == [size, size]


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_race__several_senders_of_the_same_fragments(stores: Stores, size: int) -> None:
    problems: set[str] = set()

    async def sender(chunks: ChunkBuffer) -> None:
        for index in range(1, 12):
            try:
                await send(chunks, [index])
            except FragmentError as error:
                problems.add(error.kind)

    for seed in range(8 // stores.patience):
        stores.renew()
        senders = [stores.open(size, buffer_type=unhurried(seed + n)) for n in range(3)]
        await send(senders[0], [0])
        await asyncio.gather(*map(sender, senders))
        found = [numbers(chunk) for chunk in await stored(senders[0])]
        assert found == [list(range(n, n + size)) for n in range(0, 12, size)]
        assert await senders[1].expected(W) == 12
    assert problems <= {"duplicate"}  # everyone sends in order


@pytest.mark.parametrize("seed", range(3))
async def test_race__fetches_against_workers_against_the_model(stores: Stores, seed: int) -> None:
    """Nothing is drawn twice, or when it was too stale, and what is neither drawn nor too stale is there."""
    size, workers, count, model = 2, "abc", 12, 0
    options: dict[str, Any] = {"max_staleness": 2, "max_reuse": 1}
    buffers = [stores.open(size, buffer_type=unhurried(seed * 9 + n), **options) for n in range(5)]
    await buffers[3].advance(0, session=1)
    drawn: list[Chunk] = []

    async def work(chunks: ChunkBuffer, worker: str) -> None:
        for index in range(count):
            await send(chunks, [index], worker=worker, version=index // 2)

    async def draw(chunks: ChunkBuffer) -> None:
        for _ in range(20):
            with suppress(NotReadyError):
                before = model
                selection = await chunks.fetch(1, timeout=0.001)
                drawn.extend(selection)
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
    chunks = [(chunk.worker, chunk.start) for chunk in (*drawn, *await stored(buffers[0]))]
    assert len(set(chunks)) == len(chunks)
    fresh = {(worker, start) for worker in workers for start in range(4, count, size)}
    assert fresh <= set(chunks)
    stale = (await buffers[0].dropped())["stale"]
    assert len(chunks) + stale == len(workers) * count // size


async def test_race__what_a_delayed_put_leaves_behind_is_passed_over(stores: Stores) -> None:
    chunks = stores.open()
    await send(chunks, range(4))
    tags: dict[str, Any] = {"worker": W, "session": 1}
    late = {"status": "archived", "index": 2, "version": 0, "data": {"n": 2}}
    late_tags = tags | {"index": 2, "version": 0, "last": True}
    await chunks.buffer.put([late], "chunks.fragments", tags=late_tags, key=f"1/2/{W}")
    await chunks.buffer.put([{"status": "archived"}], "chunks.cursors", tags=tags | {"start": 0, "size": 3})
    again = stores.open()
    assert await again.expected(W) == 4
    await send(again, range(4, 6))
    assert [numbers(chunk) for chunk in await stored(again)] == [[0, 1, 2], [3, 4, 5]]
    assert await again.buffer.count_where({"task_name": "chunks.fragments"}) == 0
    assert await again.expected(W) == 6


async def test_race__a_chunk_of_a_session_that_has_just_ended_is_not_made(stores: Stores) -> None:
    chunks = stores.open(2, max_chunks=1)
    await send(chunks, [0], version=9)
    # Somebody begins a session, and gets no further.
    await chunks.buffer.put([{"status": "archived"}], "chunks.state", tags={"session": 2, "version": 0})
    await send(chunks, [1], version=9)
    assert await stored(chunks) == []
    assert await chunks.buffer.count_where({"tags.session": 1, "task_name": {"$ne": "chunks.state"}}) == 0
    assert (await problem(chunks.put(1, worker=W, index=2, session=1, version=9))).kind == "session"


async def test_race__a_new_session_against_the_old_one(stores: Stores) -> None:
    async def old(chunks: ChunkBuffer) -> None:
        with suppress(FragmentError):
            for index in range(40):
                await send(chunks, [index], worker="old", version=99)
                await asyncio.sleep(0)

    async def new(chunks: ChunkBuffer) -> None:
        await asyncio.sleep(0.005)
        await send(chunks, range(6), worker="new", session=2)

    for seed in range(8 // stores.patience):
        stores.renew()
        first, second = (stores.open(2, buffer_type=unhurried(seed + n), max_chunks=3) for n in range(2))
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
    await send(chunks, range(40))
    left, cancelled = set(range(40)), 0
    while left and cancelled < 30:
        selection = await cancelled_after(chunks.fetch(1, timeout=5), chance.randrange(200))
        if selection is None:
            cancelled += 1
            with suppress(NotReadyError):
                selection = await chunks.prepared()
        there = set(await starts(chunks))
        assert left - there <= {chunk.start for chunk in selection or ()}
        left = there
    while left:
        left -= {chunk.start for chunk in await chunks.fetch(1, timeout=5)}


async def test_cancellation__of_waits_is_prompt(stores: Stores) -> None:
    chunks = stores.open()
    for call in (chunks.fetch(1, timeout=None), chunks.prepared(timeout=None)):
        async with asyncio.timeout(5):
            assert await cancelled_after(call, 50) is None


# Configs


def test_config__is_checked() -> None:
    for wrong in (
        {},
        {"fragments_per_chunk": 0},
        {"fragments_per_chunk": 2, "max_chunks": 0},
        {"fragmentsperchunk": 2},
    ):
        with pytest.raises(ConfigError, match="ChunkBufferConfig"):
            ChunkBufferConfig.from_mapping({"url": "memory://"} | wrong)


def test_config__hides_passwords() -> None:
    config = ChunkBufferConfig(url="postgresql://me:secret@host/rl", fragments_per_chunk=2)
    assert "secret" not in repr(config)


def test_docs__the_example_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/chunks.md").read_text("utf-8")
    code, _, output = text.split("```python\n")[1].partition("```\n\n```\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == (output.partition("```")[0], "")


# Against a model


@dataclass
class Model:
    """What a chunk buffer does, in the plainest way."""

    size: int
    drop: bool
    max_chunks: int | None
    max_staleness: int | None
    session: int = field(default=-1, init=False)
    version: int = field(default=-1, init=False)
    begun: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    next: dict[str, int] = field(default_factory=dict, init=False)
    chunks: list[tuple[str, int, int]] = field(default_factory=list, init=False)  # worker, start, version
    dropped: Counter[str] = field(default_factory=Counter, init=False)

    def put(self, worker: str, index: int, session: int, version: int) -> str | bool:
        if session < self.session:
            return self._refuse("session")
        if session > self.session:
            self.session, self.version = session, version
            self.begun, self.next, self.chunks = {}, {}, []
        expected = self.next.get(worker, index)
        if index < expected:
            return self._refuse("duplicate")
        if index > expected:
            if not self.drop:
                return "gap"
            self.dropped["gap"] += 1
            self.begun[worker] = []
        self.next[worker] = index + 1
        fragments = self.begun.setdefault(worker, [])
        fragments.append((index, version))
        if len(fragments) == self.size:
            self.begun[worker] = []
            self._make(worker, fragments)
        return True

    def _refuse(self, kind: str) -> str | bool:
        if not self.drop:
            return kind
        self.dropped[kind] += 1
        return False

    def _make(self, worker: str, fragments: list[tuple[int, int]]) -> None:
        version = min(version for _, version in fragments)
        self.chunks.append((worker, fragments[0][0], version))
        self._leave_stale()
        if self.max_chunks is not None and len(self.chunks) > self.max_chunks:
            self.chunks.remove(min(self.chunks, key=lambda chunk: chunk[2]))

    def _leave_stale(self) -> None:
        if self.max_staleness is not None:
            good = [chunk for chunk in self.chunks if chunk[2] >= self.version - self.max_staleness]
            self.dropped["stale"] += len(self.chunks) - len(good)
            self.chunks = good

    def advance(self, version: int) -> None:
        self.version = max(self.version, version)
        self._leave_stale()


PUTS = st.tuples(
    st.just("put"),
    st.sampled_from(["a", "b"]),
    st.sampled_from([0, 0, 0, 0, 0, 0, -1, -2, 1, 3]),
    st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, -1, 1]),
    st.integers(0, 6),
)
ADVANCES = st.tuples(st.just("advance"), st.integers(0, 8))
OPENS = st.tuples(st.just("open"))


MODELS = st.builds(
    Model,
    size=st.integers(1, 3),
    drop=st.booleans(),
    max_chunks=st.one_of(st.none(), st.integers(1, 3)),
    max_staleness=st.one_of(st.none(), st.integers(0, 3)),
)
STEPS = st.lists(st.one_of(PUTS, PUTS, PUTS, PUTS, ADVANCES, OPENS), max_size=30)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("kind", ["memory"], indirect=True)
@settings(max_examples=100, suppress_health_check=FIXTURES)
@given(model=MODELS, steps=STEPS)
def test_model__random_interleavings_agree(kind: str, lend: Callable[[], str], model: Model, steps: list[Any]) -> None:
    agree_with_model(kind, lend, model, steps)


@pytest.mark.parametrize("kind", ["pandas", "sqlite", "postgresql"], indirect=True)
@settings(max_examples=8, suppress_health_check=FIXTURES)
@given(model=MODELS, steps=STEPS)
def test_model__random_interleavings_agree_elsewhere(
    kind: str, lend: Callable[[], str], model: Model, steps: list[Any]
) -> None:
    agree_with_model(kind, lend, model, steps)


def agree_with_model(kind: str, lend: Callable[[], str], model: Model, steps: list[Any]) -> None:
    on_problem = "drop" if model.drop else "error"
    options = {"max_chunks": model.max_chunks, "max_staleness": model.max_staleness, "on_problem": on_problem}
    asyncio.run(agree(Stores(kind, lend), model, options, steps))


async def agree(stores: Stores, model: Model, options: dict[str, Any], steps: list[Any]) -> None:
    try:
        buffers = [stores.open(model.size, **options), stores.open(model.size, **options)]
        for number, (what, *args) in enumerate(steps):
            chunks = buffers[number % 2]
            if what == "open":
                buffers[number % 2] = stores.open(model.size, **options)
            elif what == "put":
                worker, by, sessions, version = args
                session = max(0, model.session + sessions) if model.session >= 0 else 1
                index = max(0, model.next.get(worker, 2) + by)
                try:
                    came: str | bool = await chunks.put(0, worker=worker, index=index, session=session, version=version)
                except FragmentError as error:
                    came = error.kind
                assert came == model.put(worker, index, session, version)
            elif model.session >= 0:
                await chunks.advance(*args)
                model.advance(*args)
            found = [(chunk.worker, chunk.start, chunk.version) for chunk in await stored(chunks)]
            assert found == model.chunks
        chunks = buffers[0]
        assert {worker: await chunks.expected(worker) for worker in model.next} == model.next
        assert {kind: n for kind, n in (await chunks.dropped()).items() if n} == +model.dropped
    finally:
        await stores.close()
