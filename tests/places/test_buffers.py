"""The contract of a buffer that keeps arrays apart: all that it promises with them in the database."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import PartlyStoredError, PayloadStoreError, StorageError
from replaybuf.storage.places import folder as folders
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.new_rows import EncodedGroup
from replaybuf.storage.sql.tasks import group_commit
from tests.places.arrays import (
    NBYTES,
    apart,
    files,
    heavy,
    listed,
    named,
    number_in,
    numbers_in,
    payload_rows,
    put,
    take_all,
)
from tests.stores import TASK, group, until

pytestmark = pytest.mark.usefixtures("soon_swept")


async def test_every_byte_comes_back(where: tuple[str, str]) -> None:
    """Of groups of all sizes, those in the database among them, in the order of their puts."""
    url, place = where
    sizes = [8, 19_992, 20_000, NBYTES, 1_000_000]
    async with apart(url, place) as buffer:
        for number, size in enumerate(sizes):
            await buffer.put(heavy(number, size), TASK)
        await buffer.put(group(99), TASK)
        assert await payload_rows(url) == 3
        groups = await buffer.get(9, TASK)
    assert numbers_in(groups[:-1]) == [0, 1, 2, 3, 4]
    groups[3][0].extra_fields["experts"][:] = 0  # it is the reader's own


async def test_a_restore_brings_taken_groups_back_with_their_arrays(where: tuple[str, str]) -> None:
    """However many others have been put and swept since."""
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, *range(6))
        await buffer.checkpoint(1)
        assert len(await take_all(buffer)) == 6
        for first in range(10, 40, 10):
            await put(buffer, *range(first, first + 10))
            await take_all(buffer)
        await asyncio.sleep(0.3)
        await buffer.restore(1)
        assert sorted(await take_all(buffer)) == list(range(6))


async def test_what_makes_room_is_handed_over_with_its_arrays(where: tuple[str, str]) -> None:
    """To a put that asks for what it dropped."""
    url, place = where
    async with apart(url, place, capacity=3, on_full="evict") as buffer:
        dropped: list[Any] = []
        for number in range(6):
            await buffer.put(heavy(number), TASK, dropped=dropped)
        assert sorted(number_in(item.item) for item in dropped) == [0, 1, 2]
        assert sorted(await take_all(buffer)) == [3, 4, 5]


async def test_puts_that_the_database_refuses_are_tried_one_by_one(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arrays of each in a file of its own: that of all of them is deleted."""
    url, place = where
    original_put = group_commit.put_groups

    def refusing(tx: Transaction, groups: Sequence[EncodedGroup], **options: Any) -> list[Any]:
        if any(new_group.group.priority == 2 for new_group in groups):
            raise sqlite3.IntegrityError("a constraint of somebody else's")
        return original_put(tx, groups, **options)

    monkeypatch.setattr(group_commit, "put_groups", refusing)
    async with apart(url, place) as buffer:
        with pytest.raises(PartlyStoredError) as partly:
            await buffer.put_many([heavy(n) for n in range(4)], TASK, each=[{"priority": n} for n in range(4)])
        assert [isinstance(result, StorageError) for result in partly.value.results] == [False, False, True, False]
        assert list((await named(url)).values()) == [1, 1, 1]
        await until(lambda: _only_named_files(url, place))
        assert sorted(await take_all(buffer)) == [0, 1, 3]


async def _only_named_files(url: str, place: str) -> bool:
    return await listed(place) == sorted(await named(url))


# The order of bytes and commits


async def test_bytes_are_on_the_disk_before_the_commit(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durability full, and on PostgreSQL by default; also of several groups that follow one another in a file."""
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(number: int, real: Callable[[int], None] = real) -> None:
            if ".bin" in os.readlink(f"/proc/self/fd/{number}"):
                synced.append(os.fstat(number).st_size)
            real(number)

        monkeypatch.setattr(os, name, sync)
    options = {"durability": "full"} if url.startswith("sqlite") else {}
    async with apart(url, folder, **options) as buffer:
        for count in (1, 2, 5):
            await put(buffer, *range(count))
            assert sorted(synced) == sorted(files(folder).values())


async def test_an_array_that_cannot_be_written_is_not_committed(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group fails with the reason; small ones in the same commit are stored; then it goes on."""
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
        real = folders._write_all

        def failing(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(folders, "_write_all", failing)
        outcomes = await asyncio.gather(buffer.put(heavy(2), TASK), buffer.put(group(3), TASK), return_exceptions=True)
        assert isinstance(outcomes[0], PayloadStoreError)
        assert isinstance(outcomes[1], int)
        monkeypatch.setattr(folders, "_write_all", real)
        await put(buffer, 4)
        groups = await buffer.get(9, TASK)
        assert sorted(int(rollouts[0].rollout_id) for rollouts in groups) == [1, 3, 4]


# Cancellation


@pytest.mark.parametrize("seconds", [0.0, 0.003])
async def test_cancelled_puts_and_takes_leave_all_exact(where: tuple[str, str], seconds: float) -> None:
    """Each group is stored wholly or not at all, and delivered once."""
    url, place = where
    async with apart(url, place) as buffer:
        stored_numbers: set[int] = set()
        tried: set[int] = set()
        received: list[int] = []
        for first in range(0, 24, 4):
            numbers = range(first, first + 4)
            tried |= set(numbers)
            puts = [asyncio.create_task(buffer.put(heavy(number), TASK)) for number in numbers]
            await asyncio.sleep(seconds)
            for task in puts[::2]:
                task.cancel()
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            stored_numbers |= {n for n, uid in zip(numbers, outcomes, strict=True) if isinstance(uid, int)}
            taking = asyncio.create_task(buffer.get(3, TASK))
            await asyncio.sleep(seconds)
            taking.cancel()
            [groups] = await asyncio.gather(taking, return_exceptions=True)
            if isinstance(groups, list):
                received += numbers_in(groups)
        received += await take_all(buffer)
        assert len(received) == len(set(received))
        assert stored_numbers <= set(received) <= tried
        assert await buffer.count(TASK, "failed") == 0
