"""The space of payloads that are kept apart comes back, and nothing that somebody needs is written over or moved."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replaybuf.storage.sql.statements.segments import begin_use, end_use
from replaybuf.storage.sql.tasks import buffer_segments as tasks
from tests.segments.arrays import (
    apart,
    ask,
    files,
    in_its_thread,
    listed,
    numbers_in,
    payload_rows,
    put,
    segments,
    take_all,
    until_empty,
    until_rows,
)
from tests.stores import TASK, until

pytestmark = pytest.mark.usefixtures("soon_swept")


async def test_space_comes_back(where: tuple[str, str]) -> None:
    """After everything was taken only what is kept for the next puts is there, after the end nothing."""
    url, place = where
    async with apart(url, place) as buffer:
        for first in range(0, 60, 10):
            await put(buffer, *range(first, first + 10))
            assert len(await take_all(buffer)) == 10
        await until_rows(url, 0)
        await until(lambda: _few(url))
    assert await segments(url) == {}
    assert await listed(place) == []


async def _few(url: str) -> bool:
    """Whether no more segments are there than a process keeps."""
    found = await segments(url)
    closed = [one for one in found.values() if one[1] is not None]
    return len(closed) <= tasks._MOST_KEPT


async def test_files_are_written_over_once_nothing_is_in_them(url: str, folder: Path) -> None:
    """A steady run makes no new ones."""
    async with apart(url, folder) as buffer:
        for first in range(0, 40, 8):
            await put(buffer, *range(first, first + 8))
            assert sorted(await take_all(buffer)) == list(range(first, first + 8))
            await until_rows(url, 0)
            await asyncio.sleep(0.15)
        [(anew,)] = await ask(url, "SELECT count(*) FROM rb_segment WHERE file IS NOT NULL")
        assert anew > 0
        assert len(files(folder)) <= 8


async def test_nothing_is_written_over_or_deleted_while_somebody_keeps_segments(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, *range(8))
        write = partial(buffer.storage.engine.write, fenced=False)
        keeping = await in_its_thread(buffer, lambda: write(partial(begin_use, keeps=True)))
        before = set(await listed(place))
        await take_all(buffer)
        await until_rows(url, 0)
        await put(buffer, *range(10, 20))
        await asyncio.sleep(0.3)
        assert before <= set(await listed(place))
        [(written_over,)] = await ask(url, "SELECT count(*) FROM rb_segment WHERE file IS NOT NULL")
        assert written_over == 0
        await in_its_thread(buffer, lambda: write(partial(end_use, user=keeping)))
        await take_all(buffer)
        await until_rows(url, 0)
    assert await segments(url) == {}


async def test_payloads_stay_until_their_taker_has_read_them(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes, while others put and sweep."""
    url, place = where
    async with apart(url, place) as buffer, apart(url, place) as other:
        await put(buffer, *range(4))
        segments_of = buffer.storage.segments
        real, reading, go_on = segments_of.reader._fetch, asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slowly(*arguments: Any) -> None:
            loop.call_soon_threadsafe(reading.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
            real(*arguments)

        monkeypatch.setattr(segments_of.reader, "_fetch", slowly)
        taking = asyncio.create_task(buffer.get(4, TASK))
        await reading.wait()
        for first in range(10, 30, 10):
            await put(other, *range(first, first + 10))
            await take_all(other)
        await asyncio.sleep(0.3)
        assert await payload_rows(url) >= 4
        go_on.set()
        assert sorted(numbers_in(await taking)) == [0, 1, 2, 3]
        monkeypatch.setattr(segments_of.reader, "_fetch", real)
        await until_rows(url, 0)


async def test_the_next_taker_has_as_long_as_the_first(where: tuple[str, str]) -> None:
    """What the first noted, which gave the groups back, doesn't end the time of the second."""
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, 1)
        with pytest.raises(ZeroDivisionError):
            async with buffer.lease_batch({TASK: 1}):
                raise ZeroDivisionError
        assert buffer.storage.segments._read == []


async def test_sparse_segments_are_emptied(where: tuple[str, str]) -> None:
    """What is left in them is moved, and comes out as it was put in."""
    url, place = where
    async with apart(url, place, policy="fifo") as buffer:
        uids = []
        for number in range(16):
            uids += await put(buffer, number)
        keep = uids[::8]
        await buffer.delete({"timestamp_id": {"$nin": keep}})
        await until_rows(url, 2)
        if "://" not in place:  # an object of a group is dense or gone
            await until_empty(url, {1, 3})
        assert sorted(await take_all(buffer)) == [0, 8]


async def test_leased_groups_are_not_moved_and_keep_no_others_from_it(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        uids = []
        for number in range(16):
            uids += await put(buffer, number)
        async with buffer.lease_batch({TASK: 1}, seconds=60) as lease:
            await buffer.delete({"timestamp_id": {"$nin": [uids[0], uids[5]]}})
            await put(buffer, 20)
            await until_empty(url, {2})
            assert 1 in await segments(url)
            assert numbers_in(lease.batch[TASK]) == [0]
        assert sorted(await take_all(buffer)) == [5, 20]


async def test_a_payload_that_is_moved_while_it_is_read_is_read_where_it_is_now(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw that leaves its groups there keeps nobody from moving them."""
    async with apart(url, folder, max_times_sampled=9) as buffer, apart(url, folder) as other:
        uids = []
        for number in range(4):
            uids += await put(buffer, number)
        await put(buffer, 9)
        segments_of = buffer.storage.segments
        real, calls = segments_of.reader._fetch, 0
        loop = asyncio.get_running_loop()

        def moved_first(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                asyncio.run_coroutine_threadsafe(_move(), loop).result(20)
            real(*arguments)

        async def _move() -> None:
            await other.delete({"timestamp_id": {"$in": uids[1:]}})
            await until_empty(url, {1})
            if (folder / "segments" / "1.seg").exists():
                await until(lambda: _not_there(folder / "segments" / "1.seg"))

        monkeypatch.setattr(segments_of.reader, "_fetch", moved_first)
        monkeypatch.setattr(tasks, "_MOST_KEPT", 0)
        assert numbers_in(await buffer.get(1, TASK)) == [0]
        assert calls >= 2
        assert await buffer.count(TASK, "failed") == 0


async def _not_there(path: Path) -> bool:
    return path.name not in files(path.parent.parent)
