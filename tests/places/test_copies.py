"""Snapshots and states of a buffer whose payloads are kept apart, and the ways back from them."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import PayloadStoreError, SnapshotError
from replaybuf.storage.places import store as place_store
from replaybuf.storage.places.store import FILES
from replaybuf.storage.sql.copies import snapshot
from tests.cli.conftest import run
from tests.contract.harness import everything, plain
from tests.places.arrays import apart, heavy, payload_rows
from tests.stores import TASK, build, set_by, sweep_now

COUNT = 6


@asynccontextmanager
async def filled(url: str, folder: Path) -> AsyncIterator[ReplayBuffer]:
    """A buffer with groups, of which every third has a small array, which isn't kept apart."""
    folder.mkdir()  # noqa: ASYNC240
    async with apart(url, folder) as buffer:
        for number in range(COUNT):
            small = {"nbytes": 400} if number % 3 == 0 else {}
            await buffer.put(heavy(number, **small), TASK, tags={"n": number}, key=f"key {number}")
        yield buffer


def rows(file: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(statement).fetchall()


async def test_a_snapshot_has_all_payloads_in_it(shared_url: str, tmp_path: Path) -> None:
    """It needs the folder no more, and neither does what is resumed from it."""
    async with filled(shared_url, tmp_path / "payloads") as buffer:
        assert await payload_rows(shared_url) == 4
        before = await everything(buffer)
        file = await buffer.save(tmp_path / "snapshot")
    shutil.rmtree(tmp_path / "payloads")
    assert rows(file, "SELECT count(*), count(file), count(size) FROM rb_payload") == [(COUNT, 0, 0)]
    assert rows(file, "SELECT count(*) FROM rb_place") == [(0,)]
    query = "SELECT p.uid FROM rb_payload p JOIN rb_group g ON g.uid = p.uid WHERE length(p.data) != g.bytes"
    assert rows(file, query) == []
    async with build(f"sqlite:///{tmp_path}/other.db") as other:
        await other.resume(tmp_path / "snapshot")
        assert await everything(other) == before


async def test_what_is_resumed_is_in_the_database_and_new_payloads_are_apart(shared_url: str, tmp_path: Path) -> None:
    async with filled(f"sqlite:///{tmp_path}/first.db", tmp_path / "payloads") as buffer:
        before = await everything(buffer)
        await buffer.save(tmp_path / "snapshot")
    (tmp_path / "others").mkdir()
    async with apart(shared_url, tmp_path / "others") as other:
        await other.resume(tmp_path / "snapshot")
        assert await payload_rows(shared_url) == 0
        shutil.rmtree(tmp_path / "payloads")
        assert await everything(other) == before
        await other.put(heavy(100), TASK)
        assert await payload_rows(shared_url) == 1
        groups = await other.get(COUNT + 1, TASK)
        assert plain(groups[-1]) == plain(heavy(100))


async def test_damage_where_a_payload_is_kept_is_as_damage_in_the_database(shared_url: str, tmp_path: Path) -> None:
    """The others are copied, and the damaged one is set aside by the first draw."""
    async with filled(shared_url, tmp_path / "payloads") as buffer:
        [first, *_] = (tmp_path / "payloads" / FILES).iterdir()
        first.write_bytes(first.read_bytes()[: first.stat().st_size * 9 // 10])
        await buffer.save(tmp_path / "snapshot")
    async with build(f"sqlite:///{tmp_path}/other.db") as other:
        await other.resume(tmp_path / "snapshot")
        assert len(await other.get(COUNT, TASK)) == COUNT - 1
        [failed] = [item async for item in other.find({"status": "failed"})]
        assert "arrays" in str(failed.error)


async def test_a_place_that_is_gone_ends_a_copy(shared_url: str, tmp_path: Path) -> None:
    async with filled(shared_url, tmp_path / "payloads") as buffer:
        (tmp_path / "payloads").rename(tmp_path / "gone")
        with pytest.raises(PayloadStoreError, match="mount it"):
            await buffer.save(tmp_path / "snapshot")
        (tmp_path / "gone").rename(tmp_path / "payloads")
        assert not list((tmp_path / "snapshot").iterdir())
        await buffer.save(tmp_path / "snapshot")


async def test_files_stay_while_they_are_copied(
    shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups leave in the middle of a copy."""
    reading, going_on = asyncio.Event(), asyncio.Event()
    original = snapshot.read_tails
    loop = asyncio.get_running_loop()

    async def slow(*args: Any) -> Any:
        if not reading.is_set():
            loop.call_soon_threadsafe(reading.set)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(going_on.wait(), loop))
        return await original(*args)

    monkeypatch.setattr(snapshot, "read_tails", slow)
    monkeypatch.setattr(snapshot, "_RENEW_SECONDS", 0.05)
    monkeypatch.setattr(place_store, "FILE_BYTES", 100_000)
    async with filled(shared_url, tmp_path / "payloads") as buffer:
        before = await everything(buffer)
        saving = asyncio.create_task(buffer.save(tmp_path / "snapshot"))
        await set_by(reading, saving)
        assert len(await buffer.get(COUNT, TASK)) == COUNT
        await buffer.storage._write(sweep_now)
        for number in range(COUNT):
            await buffer.put(heavy(number + 1), TASK)
            await buffer.storage.thread.run(lambda: buffer.storage.files.maintain(True))
        going_on.set()
        await saving
    async with build(f"sqlite:///{tmp_path}/other.db") as other:
        await other.resume(tmp_path / "snapshot")
        assert await everything(other) == before


async def test_a_copy_whose_files_were_not_kept_all_the_time_fails(
    shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that is noticed at its end only."""
    original = snapshot.read_tails
    async with filled(shared_url, tmp_path / "payloads") as buffer:
        loop = asyncio.get_running_loop()

        async def stalled(*args: Any) -> Any:
            lapse = buffer.storage._write(lambda tx: tx.change("UPDATE rb_place SET kept_until = 0"))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(lapse, loop))
            return await original(*args)

        monkeypatch.setattr(snapshot, "read_tails", stalled)
        with pytest.raises(SnapshotError, match="copy again"):
            await buffer.save(tmp_path / "snapshot")
        assert not list((tmp_path / "snapshot").iterdir())


async def test_who_only_reads_a_database_copies_what_is_kept_apart(shared_url: str, tmp_path: Path) -> None:
    async with filled(shared_url, tmp_path / "payloads") as buffer:
        before = await everything(buffer)
    await asyncio.to_thread(run, "checkpoint", "save", shared_url, tmp_path / "snapshot")
    async with build(f"sqlite:///{tmp_path}/other.db") as other:
        await other.resume(tmp_path / "snapshot")
        assert await everything(other) == before
