"""Files of payloads: each is deleted when its last group has gone, and none that somebody needs; none is left over."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from replaybuf import FullError, ReplayBuffer, Status
from replaybuf.errors import PayloadStoreError
from replaybuf.storage.places import store as place_store
from replaybuf.storage.places.store import FILES, file_name
from replaybuf.storage.sql.statements import files as statements
from replaybuf.storage.sql.tasks import delivery
from replaybuf.storage.sql.tasks import payload_files as tasks
from replaybuf.storage.sql.tasks.delivery import Drawing
from replaybuf.storage.values import Cursor, NewGroup
from tests.cli.doctored import examine, wrong
from tests.faults.processes import end, numbers, start, wait_for_lines
from tests.places import roles
from tests.places.arrays import (
    NBYTES,
    apart,
    ask,
    files,
    heavy,
    listed,
    named,
    numbers_in,
    payload_rows,
    put,
    rename,
    take_all,
    until_no_files,
    until_rows,
)
from tests.stores import TASK, build, set_by, until, until_equal

pytestmark = pytest.mark.usefixtures("soon_swept")

DAYS = 2 * 86_400


async def list_place(buffer: ReplayBuffer) -> None:
    """Do what is done once an hour."""
    await buffer.storage.thread.run(buffer.storage.files._delete_orphans)


def made_old(folder: Path) -> None:
    for name in files(folder):
        os.utime(folder / FILES / name, (time.time() - DAYS,) * 2)


async def until_listed(place: str, names: list[str]) -> None:
    await until_equal(sorted(names), lambda: listed(place))


async def test_space_comes_back(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place) as buffer:
        for first in range(0, 60, 10):
            await put(buffer, *range(first, first + 10))
            assert len(await take_all(buffer)) == 10
        await until_no_files(url)
        await until_listed(place, [])


async def test_a_file_stays_until_its_last_group_has_gone(url: str, folder: Path) -> None:
    async with apart(url, folder, policy="fifo") as buffer:
        await buffer.put_many([heavy(number) for number in (1, 2, 3)], TASK)
        [(name, count)] = (await named(url)).items()
        assert (count, files(folder)) == (3, {name: 3 * (NBYTES + -NBYTES % 64)})
        assert numbers_in(await buffer.get(2, TASK)) == [1, 2]
        await until_rows(url, 1)
        assert await named(url) == {name: 1}
        assert list(files(folder)) == [name]
        await take_all(buffer)
        await until_no_files(url)
        await until_listed(str(folder), [])


@pytest.mark.parametrize(("name", "most"), [("FILE_BYTES", 250_000), ("FILE_GROUPS", 2)])
async def test_a_file_has_some_groups_at_most(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(place_store, "FILE_BYTES", 1 << 30)
    monkeypatch.setattr(place_store, name, most)
    async with apart(url, folder) as buffer:
        await buffer.put_many([heavy(number) for number in range(5)], TASK)
        assert sorted((await named(url)).values()) == [1, 2, 2]
        assert sorted(await take_all(buffer)) == [0, 1, 2, 3, 4]


# What somebody needs


async def test_nothing_is_deleted_while_somebody_keeps_files(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, *range(4))
        await buffer.storage._write(statements.keep_files)
        before = await listed(place)
        await take_all(buffer)
        await until_rows(url, 0)
        await asyncio.sleep(0.3)
        assert await listed(place) == before
        assert await buffer.storage._write(statements.keep_files)  # it was kept in between
        await ask(url, "UPDATE rb_place SET kept_until = 0")
        await until_no_files(url)
        assert not await buffer.storage._write(statements.keep_files)


async def test_payloads_stay_until_their_taker_has_read_them(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes, while others put and sweep."""
    url, place = where
    async with apart(url, place) as buffer, apart(url, place) as other:
        await put(buffer, *range(4))
        [store] = buffer.storage.files._stores.values()
        real, reading, go_on = store.read, asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slowly(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(reading.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(120)
            return real(*arguments)

        monkeypatch.setattr(store, "read", slowly)
        taking = asyncio.create_task(buffer.get(4, TASK))
        await set_by(reading, taking)
        await put(other, *range(10, 20))
        await take_all(other)
        await until_rows(url, 4)
        go_on.set()
        assert sorted(numbers_in(await taking)) == [0, 1, 2, 3]
        await until_no_files(url)


async def test_a_file_that_somebody_deleted_is_lost_and_puts_go_on(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
        for name in files(folder):
            (folder / FILES / name).unlink()
        await put(buffer, 2, 3)
        assert sorted(await take_all(buffer)) == [2, 3]
        [failed] = [item async for item in buffer.find({"status": "failed"})]
        assert "isn't there any more: somebody deleted it" in str(failed.error)


# What nobody names


async def test_a_put_that_is_refused_leaves_no_file(where: tuple[str, str]) -> None:
    """For lack of room, or because others have moved its cursor."""
    url, place = where
    async with apart(url, place, capacity=2, on_full="block") as buffer:
        await put(buffer, 1)
        before = await listed(place)
        new_group = NewGroup(TASK, Status.COMPLETED, 0, heavy(9), 1.0)
        assert not await buffer.storage.put_with_cursor([new_group], Cursor("data", version=9))
        await until_listed(place, before)
        await put(buffer, 2)
        before = await listed(place)
        with pytest.raises(FullError):
            await buffer.put(heavy(9), TASK, timeout=0.3)
        await until_listed(place, before)
        assert sorted(await take_all(buffer)) == [1, 2]


async def test_a_put_that_is_cancelled_leaves_no_file(where: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the write of its arrays and the commit."""
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, 1)
        before, write, ended = await listed(place), tasks.PayloadFiles.write, threading.Event()

        async def cancelled_meanwhile(own: tasks.PayloadFiles, batch: Any) -> None:
            await write(own, batch)
            putting.get_loop().call_soon_threadsafe(putting.cancel)
            await asyncio.to_thread(ended.wait, 10)

        with monkeypatch.context() as patch:
            patch.setattr(tasks.PayloadFiles, "write", cancelled_meanwhile)
            putting = asyncio.create_task(buffer.put(heavy(2), TASK))
            putting.add_done_callback(lambda _: ended.set())
            await asyncio.wait([putting])
        assert putting.cancelled()
        await until_listed(place, before)
        assert await take_all(buffer) == [1]


async def test_files_that_no_commit_named_are_deleted_a_day_later(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of several processes; one that is younger may yet be named, and other files are nobody's business."""
    url, place = where
    async with apart(url, place) as buffer, apart(url, place) as other:
        await put(buffer, 1)
        own_files = await listed(place)
        store = buffer.storage.files._stores[next(iter(buffer.storage.files._stores))]
        await asyncio.to_thread(store.write, [(name, [b"left"]) for name in (file_name(7), "notes.txt")], sync=False)
        await list_place(buffer)
        assert await listed(place) == sorted([*own_files, file_name(7), "notes.txt"])
        monkeypatch.setattr(tasks, "YOUNG_SECONDS", -DAYS)
        await list_place(other)  # it was listed a moment ago
        assert file_name(7) in await listed(place)
        await ask(url, "UPDATE rb_place SET listed_at = 0")
        await list_place(other)
        assert await listed(place) == sorted([*own_files, "notes.txt"])
        assert await ask(url, "SELECT groups FROM rb_file WHERE id = 7") == [(-1,)]
        assert await take_all(other) == [1]


async def test_a_writer_that_was_stopped_and_wakes_after_its_file_was_deleted_is_refused(
    where: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the write of the file and its commit."""
    url, place = where
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    ledger = tmp_path / "ledger"
    async with apart(url, place, **roles.PATIENT) as buffer:
        await put(buffer, 1)
        before = await listed(place)
        process = start(roles.stall, ledger, url, place, variables)
        await asyncio.to_thread(wait_for_lines, ledger, 1)
        assert process.pid is not None
        await until(lambda: _is_stopped(process.pid))
        [orphan] = set(await listed(place)) - set(before)
        monkeypatch.setattr(tasks, "YOUNG_SECONDS", -DAYS)
        await list_place(buffer)
        assert await listed(place) == before
        os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.to_thread(end, process, ledger) == 0
        assert numbers(ledger, "put") == [2, 3]
        assert orphan not in await listed(place)
        assert sorted(await take_all(buffer)) == [1, 2, 3]
        assert await buffer.count(TASK, "failed") == 0
        await until_listed(place, [])


async def _is_stopped(pid: int | None) -> bool:
    stat = await asyncio.to_thread(Path(f"/proc/{pid}/stat").read_text)
    return stat.rpartition(")")[2].split()[0] == "T"


async def test_a_backup_that_is_put_back_keeps_the_files_of_the_newer_state_for_a_day(
    tmp_path: Path, folder: Path
) -> None:
    """Its own are deleted as ever, and groups whose files were deleted meanwhile are set aside."""
    path = tmp_path / "b.db"
    async with apart(f"sqlite:///{path}", folder) as buffer:
        await put(buffer, 1)
    shutil.copy(path, tmp_path / "backup.db")
    async with apart(f"sqlite:///{path}", folder) as buffer:
        await put(buffer, 2)
        [newer] = set(files(folder)) - set(await named(f"sqlite:///{tmp_path}/backup.db"))
    shutil.copy(tmp_path / "backup.db", path)
    async with apart(f"sqlite:///{path}", folder) as buffer:
        await put(buffer, 3)
        await list_place(buffer)
        assert newer in files(folder)
        made_old(folder)
        await ask(f"sqlite:///{path}", "UPDATE rb_place SET listed_at = 0")
        await list_place(buffer)
        assert newer not in files(folder)
        assert sorted(await take_all(buffer)) == [1, 3]


# Draws that are undone after the payloads that they had taken were swept: no group comes back without its arrays


#: How many of two groups in a file are taken, and how many are there again.
WAYS = {"another group is in it": (1, 2), "it was deleted": (2, 0)}


@pytest.mark.parametrize(
    ("shared_url", "way"),
    [
        ("sqlite", "another group is in it"),
        ("postgresql", "it was deleted"),
        pytest.param("sqlite", "it was deleted", marks=pytest.mark.long),
        pytest.param("postgresql", "another group is in it", marks=pytest.mark.long),
    ],
    indirect=["shared_url"],
)
async def test_a_draw_that_could_not_be_read_is_undone_late(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Groups whose arrays are there are drawn again, byte for byte; the others are set aside, and say why."""
    taken_count, back_count = WAYS[way]
    may_undo, undo = threading.Event(), Drawing._give_back

    async def undo_late(drawing: Drawing, *arguments: Any) -> None:
        assert await asyncio.to_thread(may_undo.wait, 20)
        await undo(drawing, *arguments)

    monkeypatch.setattr(Drawing, "_give_back", undo_late)
    monkeypatch.setattr(delivery, "READING_SECONDS", 0.0)  # payloads that were taken are swept, whether or not read
    async with apart(url, folder) as buffer, build(url) as other:
        await buffer.put_many([heavy(1), heavy(2)], TASK)
        rename(folder, away := folder.with_name("away"))
        taking = asyncio.create_task(buffer.get(taken_count, TASK))
        await until_rows(url, 2 - taken_count)
        rename(away, folder)
        if back_count == 0:
            await until_no_files(url)
            assert files(folder) == {}
        may_undo.set()
        with pytest.raises(PayloadStoreError):
            await taking
        assert await buffer.count(TASK, "completed") == back_count
        failed = await ask(url, "SELECT error FROM rb_group WHERE error IS NOT NULL")
        assert len(failed) == await buffer.count(TASK, "failed") == 2 - back_count
        assert all("its arrays were deleted" in error for (error,) in failed)
        assert await payload_rows(url) == back_count
        assert [*(await named(url)).values()] == [back_count] * (back_count > 0)
        monkeypatch.setattr(delivery, "READING_SECONDS", 60.0)  # or the sweep may be faster than the read
        assert sorted(await take_all(other)) == [1, 2][:back_count]
    assert set(wrong(await asyncio.to_thread(examine, url))) <= {"payloads"}
    async with build(url) as other:
        await other.delete({})
        await until_no_files(url)
    assert files(folder) == {}
