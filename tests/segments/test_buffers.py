"""The contract of a buffer that keeps arrays apart: all that it promises with them in the database, and space."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBuffer, Status
from replaybuf.errors import ConfigError, DecodeError, PayloadStoreError
from replaybuf.segments.store import MARKER
from replaybuf.storage.sql.statements import segments as statements
from replaybuf.storage.sql.statements.segments import begin_use, end_use
from replaybuf.storage.sql.tasks import open_segments, sweeper
from replaybuf.storage.sql.tasks import segments as tasks
from tests.segments.arrays import (
    NBYTES,
    apart,
    ask,
    files,
    heavy,
    number_in,
    numbers_in,
    payload_rows,
    place_of,
    put,
    segments,
    take_all,
)
from tests.segments.relay import Relay
from tests.stores import TASK, build, group, until


@pytest.fixture(autouse=True)
def _soon_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of groups that have left are swept at once, and segments are small."""
    monkeypatch.setattr(sweeper, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(sweeper.Sweeper.__init__, "__defaults__", (0.0,))
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(open_segments, "SEGMENT_BYTES", 450_000)
    monkeypatch.setattr(tasks, "_RENEW_SECONDS", 0.1)


@pytest.fixture(params=["sqlite-folder", "postgresql-folder", "sqlite-objects"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The URL of an empty database, and a place."""
    database, kind = request.param.split("-")
    place = request.getfixturevalue("folder" if kind == "folder" else "bucket")
    url = f"sqlite:///{tmp_path}/buffer.db" if database == "sqlite" else request.getfixturevalue("lent_database")
    return url, str(place)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/buffer.db"
    return str(request.getfixturevalue("lent_database"))


# What goes in comes out


async def test_every_byte_comes_back(where: tuple[str, str]) -> None:
    """Of groups of all sizes, those in the database among them, in the order of their puts."""
    url, place = where
    sizes = [8, 19_992, 20_000, NBYTES, 1_000_000]
    async with apart(url, place) as buffer:
        for number, size in enumerate(sizes):
            await buffer.put(heavy(number, size), TASK)
        await buffer.put(group(99), TASK)
        assert await payload_rows(url) == 3
        got = await buffer.get(9, TASK)
    assert numbers_in(got[:-1]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("threshold", [0, 1])
async def test_a_threshold_of_nothing_leaves_groups_without_arrays_as_they_are(
    tmp_path: Path, folder: Path, threshold: int
) -> None:
    async with apart(f"sqlite:///{tmp_path}/b.db", folder, payload_threshold=threshold) as buffer:
        await buffer.put(group(1), TASK)
        await buffer.put(heavy(2), TASK)
        got = await buffer.get(2, TASK)
    assert [int(one[0].rollout_id) for one in got] == [1, 2]


async def test_other_processes_read_them(where: tuple[str, str]) -> None:
    """Also those that keep their own in the database."""
    url, place = where
    async with apart(url, place) as buffer, build(url) as other:
        await put(buffer, *range(10))
        assert sorted(await take_all(other)) == list(range(10))


async def test_a_draw_that_leaves_groups_there_gives_them_again(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place, max_times_sampled=3) as buffer:
        await put(buffer, 1, 2)
        for _ in range(3):
            assert sorted(numbers_in(await buffer.get(2, TASK))) == [1, 2]
        assert await buffer.get(2, TASK) == []


async def test_leases_give_them_and_take_them_back(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, 1, 2, 3)
        with contextlib.suppress(ZeroDivisionError):
            async with buffer.lease_batch({TASK: 3}) as lease:
                assert sorted(numbers_in(lease.batch[TASK])) == [1, 2, 3]
                raise ZeroDivisionError
        assert sorted(await take_all(buffer)) == [1, 2, 3]


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


async def test_an_archive_keeps_them(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place, archive=10) as buffer:
        await put(buffer, 1, 2, 3)
        await take_all(buffer)
        await asyncio.sleep(0.2)
        archived = [item.item async for item in buffer.find({"status": "archived"})]
        assert sorted(numbers_in(archived)) == [1, 2, 3]


async def test_what_makes_room_is_handed_over_with_its_arrays(where: tuple[str, str]) -> None:
    """To a put that asks for what it dropped."""
    url, place = where
    async with apart(url, place, capacity=3, on_full="evict") as buffer:
        dropped: list[Any] = []
        for number in range(6):
            await buffer.put(heavy(number), TASK, dropped=dropped)
        assert sorted(number_in(item.item) for item in dropped) == [0, 1, 2]
        assert sorted(await take_all(buffer)) == [3, 4, 5]


async def test_a_put_with_a_key_replaces_the_former(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place) as buffer:
        for number in range(5):
            await buffer.put(heavy(number), TASK, key="the same")
        assert await take_all(buffer) == [4]
        await until(lambda: _has(url, 0))


async def _has(url: str, rows: int) -> bool:
    return await payload_rows(url) == rows


async def test_one_bad_group_fails_alone(where: tuple[str, str]) -> None:
    """Of those that are written and committed together."""
    url, place = where
    async with apart(url, place) as buffer:
        bad = heavy(99)
        bad[0].extra_fields["handle"] = object()
        outcomes = await asyncio.gather(
            *(buffer.put(heavy(number), TASK) for number in range(5)), buffer.put(bad, TASK), return_exceptions=True
        )
        assert [isinstance(one, Exception) for one in outcomes] == [False] * 5 + [True]
        assert sorted(await take_all(buffer)) == list(range(5))


async def test_puts_that_the_database_refuses_are_tried_one_by_one(where: tuple[str, str]) -> None:
    """A tag that no database takes; the arrays of all of them were written together."""
    url, place = where
    async with apart(url, place) as buffer:
        calls = [buffer.put(heavy(number), TASK, tags={"a": "x" if number else "\ud800"}) for number in range(4)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        stored = [number for number, one in enumerate(outcomes) if not isinstance(one, BaseException)]
        assert stored[-3:] == [1, 2, 3]
        assert sorted(await take_all(buffer)) == stored


async def test_puts_by_several_ways_at_once_write_into_their_own_places(where: tuple[str, str]) -> None:
    """Group commits, claims and puts into several buffers share the segments of the process."""
    url, place = where
    async with apart(url, place) as buffer:
        encoding = buffer.storage.encoding
        many = [_in(buffer, partial(encoding.encode, [_new(number)])) for number in range(100, 104)]
        outcomes = await asyncio.gather(put(buffer, *range(20)), *many)
        assert len(outcomes[0]) == 20
        assert sorted(await take_all(buffer)) == list(range(20))


def _new(number: int) -> Any:
    from replaybuf.storage.values import NewGroup

    return NewGroup(TASK, Status.COMPLETED, 0, heavy(number), 1.0)


# The order of bytes and commits


async def test_bytes_are_on_the_disk_before_the_commit(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durability full and on PostgreSQL, also of several groups that follow one another in a segment."""
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(number: int, real: Callable[[int], None] = real) -> None:
            if ".seg" in os.readlink(f"/proc/self/fd/{number}"):
                synced.append(os.fstat(number).st_size)
            real(number)

        monkeypatch.setattr(os, name, sync)
    async with apart(url, folder, durability="full") as buffer:
        for count in (1, 2, 5):
            synced.clear()
            await put(buffer, *range(count))
            assert synced
            assert synced[-1] >= max(files(folder).values())


async def test_an_array_that_cannot_be_written_is_not_committed(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group fails with the reason; small ones in the same commit are stored; then it goes on."""
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
        real = os.pwritev

        def failing(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "pwritev", failing)
        outcomes = await asyncio.gather(buffer.put(heavy(2), TASK), buffer.put(group(3), TASK), return_exceptions=True)
        assert isinstance(outcomes[0], PayloadStoreError)
        assert isinstance(outcomes[1], int)
        monkeypatch.setattr(os, "pwritev", real)
        await put(buffer, 4)
        got = await buffer.get(9, TASK)
        assert sorted(int(one[0].rollout_id) for one in got) == [1, 3, 4]


# Writers that are taken for dead


async def _die(url: str) -> None:
    await ask(url, "DELETE FROM rb_segment_user")


async def _disowned(url: str) -> bool:
    return not any(owner is not None and size is None for owner, size, _ in (await segments(url)).values())


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_put_of_a_writer_that_was_taken_for_dead_is_written_anew(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """Whether or not others have deleted its files."""
    url, place = where
    monkeypatch.setattr(tasks, "_RENEW_SECONDS", 1000.0)
    async with apart(url, place) as writer:
        await put(writer, 1)
        if deleted:
            await take_all(writer)
        monkeypatch.setattr(tasks, "_RENEW_SECONDS", 0.1)
        await _die(url)
        async with apart(url, place) as other:
            await put(other, 2)
            await until(lambda: _disowned_but_one(url))
            outcomes = await asyncio.gather(put(writer, 3, 4), put(other, 5))
        assert [len(one) for one in outcomes] == [2, 1]
        assert sorted(await take_all(writer)) == ([2, 3, 4, 5] if deleted else [1, 2, 3, 4, 5])


async def _disowned_but_one(url: str) -> bool:
    """Whether the segments of those who aren't users any more are sealed."""
    return not await ask(
        url,
        "SELECT 1 FROM rb_segment WHERE size IS NULL AND owner IS NOT NULL "
        "AND owner NOT IN (SELECT id FROM rb_segment_user)",
    )


async def test_a_segment_that_somebody_deleted_is_replaced(url: str, folder: Path) -> None:
    """What was in it is lost, and said to be; puts go on."""
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
        for one in (folder / "segments").iterdir():
            one.unlink()
        place_of(buffer).forget()
        await put(buffer, 2, 3)
        assert sorted(await take_all(buffer)) == [2, 3]
        [failed] = [item async for item in buffer.find({"status": "failed"})]
        assert "isn't there any more: somebody deleted it" in str(failed.error)


async def test_segments_of_the_dead_are_deleted_without_listing(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever has the database open, also if it keeps its own payloads in the database and reads nothing."""
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, 1, 2, 3)
        await buffer.delete({})
        buffer.storage.segments._user = None  # it ends without saying so
        buffer.storage.segments._renew_at = float("inf")
    await _die(url)
    async with build(url):
        await until(lambda: _none_left(url))
    assert await _listed(place) == []


async def _none_left(url: str) -> bool:
    return await segments(url) == {}


async def _listed(place: str) -> list[str]:
    from replaybuf.segments.places import open_place

    store = open_place(place, 3.0)
    try:
        return [one.name for one in await asyncio.to_thread(lambda: list(store.segments()))]
    finally:
        store.close()


async def test_a_use_that_is_renewed_while_others_look_for_the_dead_stays(lent_database: str) -> None:
    """Whoever renews it either isn't late, or learns that it was taken for dead: no segment is nobody's for ever."""
    from replaybuf.storage.sql.engine.transaction import Transaction

    async with build(lent_database) as one, build(lent_database) as other:
        await one.storage.open()
        await other.storage.open()
        engine, scope = one.storage.engine, one.storage.transactions.scope
        user = await _in(
            one, lambda: engine.write(lambda tx: statements.begin_use(tx, keeps=False), scope, fenced=False)
        )
        await ask(lent_database, "UPDATE rb_segment_user SET renewed_at = 0")
        loop, renewed, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        async def renew() -> list[int]:
            async with engine.transaction(scope, write=True) as steps:
                assert await steps.run(lambda tx: statements.renew_use(tx, user))
                found = await steps.run(lambda tx: statements.register(tx, 1, user, 2))
                loop.call_soon_threadsafe(renewed.set)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))
            return [segment.id for segment in found]

        def end(tx: Transaction) -> int:
            return statements.end_dead_users(tx)

        renewing = asyncio.create_task(_in(one, renew))
        await renewed.wait()
        ending = asyncio.create_task(_in(other, lambda: other.storage.engine.write(end, scope, fenced=False)))
        await asyncio.sleep(0.3)
        go_on.set()
        await renewing
        assert await ending == 0
        assert {owner for owner, _, _ in (await segments(lent_database)).values()} == {user}


async def _in(buffer: ReplayBuffer, work: Callable[[], Any]) -> Any:
    return await buffer.storage.thread.run(work)


# Damage


async def _damage(place: str, how: str) -> None:
    """Of the first payload in the first segment, or all of it."""
    path = Path(place) / "segments" / "1.seg"
    raw = bytearray(path.read_bytes())
    match how:
        case "changed":
            raw[5000] ^= 1
        case "header":
            raw[10] ^= 1
        case "cut short":
            raw = raw[:5000]
        case "empty":
            raw = bytearray()
        case "swapped":
            size = 64 + NBYTES + -NBYTES % 64
            raw[:size], raw[size : 2 * size] = raw[size : 2 * size], raw[:size]
        case _:
            path.unlink()
            return
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "spoilt"),
    [("changed", 1), ("header", 1), ("cut short", 3), ("empty", 3), ("swapped", 2), ("deleted", 3)],
)
async def test_damaged_groups_are_set_aside_with_the_reason(url: str, folder: Path, how: str, spoilt: int) -> None:
    """The take goes on with the next, also when a lease is drawn."""
    async with apart(url, folder) as buffer:
        await put(buffer, 0)
        await put(buffer, 1)
        await put(buffer, 2)
        await buffer.put(group(77), TASK)
        await buffer.put(heavy(3, 19_000), TASK)
        await _damage(str(folder), how)
        async with buffer.lease_batch({TASK: 1}) as lease:
            first = int(lease.batch[TASK][0][0].rollout_id)
        rest = [int(one[0].rollout_id) for one in await buffer.get(9, TASK)]
        assert [first, *rest] == [0, 1, 2, 77, 3][spoilt:]
        failed = [item async for item in buffer.find({"status": "failed"})]
        assert len(failed) == spoilt
        assert all(item.error for item in failed)


async def test_a_damaged_group_does_not_keep_others_from_being_moved(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        await put(buffer, *range(4))
        await put(buffer, *range(4, 8))
        raw = bytearray((folder / "segments" / "1.seg").read_bytes())
        raw[64 : 64 + 100] = bytes(100)
        (folder / "segments" / "1.seg").write_bytes(raw)
        kept = [item.uid async for item in buffer.find({}) if item.error is None]
        await buffer.delete({"timestamp_id": {"$in": kept[:-1]}})
        await put(buffer, *range(10, 14))
        await until(lambda: _moved(url))


async def _moved(url: str) -> bool:
    """Whether nothing is in the second segment any more, where one group was left."""
    return await _none_of(url, {2})


# Places that can't be reached


async def test_a_take_without_the_folder_gives_all_groups_back(url: str, folder: Path) -> None:
    """None is set aside, small ones can be taken meanwhile, and all are there when it is back."""
    async with apart(url, folder) as buffer:
        await put(buffer, *range(5))
        await buffer.put(group(50), "other")
        _rename(folder, folder.with_name("away"))
        place_of(buffer).close()
        for _ in range(2):
            with pytest.raises(PayloadStoreError, match="mount it, or put it back; nothing is lost"):
                await buffer.get(5, TASK)
            with pytest.raises(PayloadStoreError):
                async with buffer.lease_batch({TASK: 2}):
                    pass
        with pytest.raises(PayloadStoreError):
            await buffer.put(heavy(9), TASK)
        await buffer.put(group(51), "other")
        assert len(await buffer.get(9, "other")) == 2
        assert await buffer.count(TASK, "completed") == 5
        _rename(folder.with_name("away"), folder)
        await put(buffer, 6)
        assert sorted(await take_all(buffer)) == [0, 1, 2, 3, 4, 6]
        assert await buffer.count(TASK, "failed") == 0


async def test_a_folder_that_was_replaced_by_another_runs_is_not_damage(url: str, folder: Path, tmp_path: Path) -> None:
    """As when the mount of another run takes its path: files of the same names are there."""
    other = tmp_path / "other"
    other.mkdir()
    async with apart(f"sqlite:///{tmp_path}/other.db", other) as theirs:
        await put(theirs, 7, 8)
        async with apart(url, folder) as ours:
            await put(ours, 1, 2)
            place_of(ours).close()
            _rename(folder, folder.with_name("away"))
            _rename(other, folder)
            for _ in range(2):
                with pytest.raises(PayloadStoreError, match="another place than before"):
                    await ours.get(2, TASK)
            assert await ours.count(TASK, "failed") == 0
            async with build(url) as reader:
                with pytest.raises(PayloadStoreError, match="other payloads than those"):
                    await reader.get(2, TASK)
            _rename(folder, other)
            _rename(folder.with_name("away"), folder)
            assert sorted(await take_all(ours)) == [1, 2]
            place_of(theirs).close()
        assert sorted(await take_all(theirs)) == [7, 8]


async def test_a_put_that_was_committed_is_not_said_to_have_failed(tmp_path: Path, folder: Path) -> None:
    """Where the arrays of what it dropped can't be read: that group says so."""
    async with apart(f"sqlite:///{tmp_path}/b.db", folder, capacity=1, on_full="evict") as buffer:
        await put(buffer, 1)
        place_of(buffer).close()
        _rename(folder, folder.with_name("away"))
        dropped: list[Any] = []
        assert await buffer.put(group(2), TASK, dropped=dropped)
        [item] = dropped
        assert item.item == []
        assert "nothing is lost" in str(item.error)
        _rename(folder.with_name("away"), folder)


@pytest.mark.parametrize("way", ["away", "503", "403"])
async def test_an_object_store_that_is_down_loses_nothing(tmp_path: Path, bucket: str, relay: Relay, way: str) -> None:
    """Calls fail after the patience, all groups are given back, and when it is back all goes on."""
    async with apart(f"sqlite:///{tmp_path}/b.db", bucket, reconnect_timeout=1.0) as buffer:
        await put(buffer, *range(5))
        relay.leave() if way == "away" else setattr(relay, "status", int(way))
        with pytest.raises(PayloadStoreError):
            await buffer.get(5, TASK)
        with pytest.raises(PayloadStoreError):
            await buffer.put(heavy(9), TASK)
        assert await buffer.count(TASK, "completed") == 5
        relay.well()
        await put(buffer, 5)
        assert sorted(await take_all(buffer)) == list(range(6))
        assert await buffer.count(TASK, "failed") == 0


async def test_sweeps_do_not_wait_for_a_place_that_is_down(
    tmp_path: Path, bucket: str, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do leases that end."""
    async with apart(f"sqlite:///{tmp_path}/b.db", bucket, reconnect_timeout=30.0) as buffer:
        await put(buffer, *range(3))
        await buffer.put(group(5), "other")
        relay.leave()
        await buffer.delete({"task_name": TASK})
        await asyncio.sleep(0.3)
        lease = await buffer.lease_batch({"other": 1}, seconds=0.5, heartbeat=False).__aenter__()
        assert lease is not None
        await until(lambda: _count(buffer, "other"), 8)
        relay.well()


async def _count(buffer: ReplayBuffer, task: str) -> bool:
    return len(await buffer.get(1, task)) == 1


# Space


async def test_space_comes_back(where: tuple[str, str]) -> None:
    """After everything was taken only what is kept for the next puts is there, after the end nothing."""
    url, place = where
    async with apart(url, place) as buffer:
        for first in range(0, 60, 10):
            await put(buffer, *range(first, first + 10))
            assert len(await take_all(buffer)) == 10
        await until(lambda: _has(url, 0))
        await until(lambda: _few(url))
    assert await segments(url) == {}
    assert await _listed(place) == []


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
            await until(lambda: _has(url, 0))
            await asyncio.sleep(0.15)
        [(anew,)] = await ask(url, "SELECT count(*) FROM rb_segment WHERE file IS NOT NULL")
        assert anew > 0
        assert len(files(folder)) <= 8


async def test_nothing_is_written_over_or_deleted_while_somebody_keeps_segments(where: tuple[str, str]) -> None:
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, *range(8))
        keeping = await _in(buffer, lambda: buffer.storage.engine.write(partial(begin_use, keeps=True), fenced=False))
        before = set(await _listed(place))
        await take_all(buffer)
        await until(lambda: _has(url, 0))
        await put(buffer, *range(10, 20))
        await asyncio.sleep(0.3)
        assert before <= set(await _listed(place))
        [(written_over,)] = await ask(url, "SELECT count(*) FROM rb_segment WHERE file IS NOT NULL")
        assert written_over == 0
        await _in(buffer, lambda: buffer.storage.engine.write(partial(end_use, user=keeping), fenced=False))
        await take_all(buffer)
        await until(lambda: _has(url, 0))
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
        await until(lambda: _has(url, 0))


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
        await until(lambda: _has(url, 2))
        if "://" not in place:  # an object of a group is dense or gone
            await until(lambda: _none_of(url, {1, 3}))
        assert sorted(await take_all(buffer)) == [0, 8]


async def _none_of(url: str, numbers: set[int]) -> bool:
    """Whether nothing is in these segments any more."""
    return not any(live for number, (_, _, live) in (await segments(url)).items() if number in numbers)


async def test_leased_groups_are_not_moved_and_keep_no_others_from_it(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        uids = []
        for number in range(16):
            uids += await put(buffer, number)
        async with buffer.lease_batch({TASK: 1}, seconds=60) as lease:
            await buffer.delete({"timestamp_id": {"$nin": [uids[0], uids[5]]}})
            await put(buffer, 20)
            await until(lambda: _none_of(url, {2}))
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
            await until(lambda: _none_of(url, {1}))
            if (folder / "segments" / "1.seg").exists():
                await until(lambda: _not_there(folder / "segments" / "1.seg"))

        monkeypatch.setattr(segments_of.reader, "_fetch", moved_first)
        monkeypatch.setattr(tasks, "_MOST_KEPT", 0)
        assert numbers_in(await buffer.get(1, TASK)) == [0]
        assert calls >= 2
        assert await buffer.count(TASK, "failed") == 0


async def _not_there(path: Path) -> bool:
    return path.name not in files(path.parent.parent)


def _rename(old: Path, new: Path) -> None:
    old.rename(new)


# Cancellation


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.003, 0.01])
async def test_cancelled_puts_and_takes_leave_all_exact(where: tuple[str, str], seconds: float) -> None:
    """Each group is stored wholly or not at all, and delivered once."""
    url, place = where
    async with apart(url, place) as buffer:
        stored: set[int] = set()
        tried: set[int] = set()
        got: list[int] = []
        for first in range(0, 24, 4):
            numbers = range(first, first + 4)
            tried |= set(numbers)
            puts = [asyncio.create_task(buffer.put(heavy(number), TASK)) for number in numbers]
            await asyncio.sleep(seconds)
            for task in puts[::2]:
                task.cancel()
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            stored |= {n for n, one in zip(numbers, outcomes, strict=True) if isinstance(one, int)}
            taking = asyncio.create_task(buffer.get(3, TASK))
            await asyncio.sleep(seconds)
            taking.cancel()
            [taken] = await asyncio.gather(taking, return_exceptions=True)
            if isinstance(taken, list):
                got += numbers_in(taken)
        got += await take_all(buffer)
        assert len(got) == len(set(got))
        assert stored <= set(got) <= tried
        assert await buffer.count(TASK, "failed") == 0


# Changing over


async def test_a_buffer_changes_over_while_it_is_full(where: tuple[str, str], tmp_path: Path) -> None:
    """From the database to a place, to another, and back; all groups come out."""
    url, place = where
    other = tmp_path / "another"
    other.mkdir()
    for turn, setting in enumerate(["database", place, str(other), place, "database"]):
        async with apart(url, setting) as buffer:
            await put(buffer, *range(10 * turn, 10 * turn + 5))
    async with build(url) as buffer:
        assert await take_all(buffer) == [10 * turn + n for turn in range(5) for n in range(5)]
        await until(lambda: _none_left(url))
    assert await _listed(place) == []
    assert files(other) == {}


async def test_a_folder_that_was_moved_is_known_by_its_marker(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        await put(buffer, 1, 2)
    _rename(folder, folder.with_name("larger"))
    async with apart(url, folder.with_name("larger")) as buffer:
        await put(buffer, 3)
        assert sorted(await take_all(buffer)) == [1, 2, 3]


async def test_a_place_that_is_gone_for_good_keeps_no_other_from_being_tidied(
    url: str, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "another"
    other.mkdir()
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
    _rename(folder, folder.with_name("away"))
    async with apart(url, other) as buffer:
        await buffer.delete({})
        await put(buffer, 2)
        await take_all(buffer)
        await until(lambda: _has(url, 0))
    assert files(other) == {}


async def test_a_database_that_was_taken_back_writes_over_nothing(tmp_path: Path, folder: Path) -> None:
    """Files of the time that is gone have the names of its next segments: they stay, and puts go on."""
    path = tmp_path / "b.db"
    async with apart(f"sqlite:///{path}", folder) as buffer:
        await put(buffer, 1)
    before = path.read_bytes()
    async with apart(f"sqlite:///{path}", folder) as buffer:
        for first in range(0, 40, 4):
            await put(buffer, *range(first, first + 4))
        later = {name: (folder / "segments" / name).read_bytes() for name in files(folder)}
    for name, raw in later.items():
        (folder / "segments" / name).write_bytes(raw)
    path.write_bytes(before)
    async with apart(f"sqlite:///{path}", folder) as buffer:
        await put(buffer, 50, 51)
        assert sorted(await take_all(buffer)) == [1, 50, 51]
    kept = {name: raw for name, raw in later.items() if (folder / "segments" / name).exists()}
    assert all((folder / "segments" / name).read_bytes() == raw for name, raw in kept.items() if name != "1.seg")


# Bad input


async def test_two_databases_on_one_place_are_refused(tmp_path: Path, place: str) -> None:
    async with apart(f"sqlite:///{tmp_path}/one.db", place) as buffer:
        await put(buffer, 1)
        with pytest.raises(ConfigError, match=r"another database.*name another place"):
            async with apart(f"sqlite:///{tmp_path}/two.db", place) as other:
                await put(other, 2)
        assert await take_all(buffer) == [1]


@pytest.mark.parametrize(
    ("payloads", "says"),
    [
        ("{folder}/missing", "isn't there: make it .mkdir -p., mount it, or name another one"),
        ("{folder}/file", "is a file: name a folder"),
        ("file://{folder}/missing", "isn't there"),
        ("file://host/run", "file:///absolute/path, with three /"),
        ("", "payloads is empty"),
        ("s3:/bucket/run", "write it as in s3://bucket/prefix"),
        ("s3://", "names no bucket"),
        ("s3://user:hidden@bucket/run", "credentials belong in the environment"),
        ("S4://bucket/run", "is no place that is known: name a folder, or one of"),
    ],
)
async def test_a_mistake_in_the_setting_is_said(tmp_path: Path, folder: Path, payloads: str, says: str) -> None:
    """With what to do, and without secrets."""
    (folder / "file").touch()
    with pytest.raises((ConfigError, PayloadStoreError), match=says) as refused:
        async with apart(f"sqlite:///{tmp_path}/b.db", payloads.format(folder=folder)) as buffer:
            await put(buffer, 1)
    assert "hidden" not in str(refused.value)


async def test_a_bucket_that_is_not_there_is_said_so(tmp_path: Path, relay: Relay) -> None:
    with pytest.raises(PayloadStoreError, match="no such bucket; make it, or correct the name"):
        async with apart(f"sqlite:///{tmp_path}/b.db", "s3://nobody-made-it/run") as buffer:
            await put(buffer, 1)


async def test_a_database_in_memory_has_no_place(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs a database that lasts"):
        async with apart("memory://", folder) as buffer:
            await put(buffer, 1)


async def test_a_marker_that_cannot_be_read_is_said_so(tmp_path: Path, folder: Path) -> None:
    (folder / MARKER).write_text("nonsense")
    with pytest.raises(PayloadStoreError, match="restore it, or name another place"):
        async with apart(f"sqlite:///{tmp_path}/b.db", folder) as buffer:
            await put(buffer, 1)


async def test_an_array_in_memory_that_was_read_is_the_readers_own(where: tuple[str, str]) -> None:
    """It can be written to."""
    url, place = where
    async with apart(url, place) as buffer:
        await put(buffer, 1)
        [got] = await buffer.get(1, TASK)
        array = got[0].extra_fields["experts"]
        array[:] = 0
        assert not np.any(array)


def test_damage_is_a_decode_error() -> None:
    """The reason that groups are set aside for, not one that a call fails with."""
    from replaybuf.segments.frames import GoneError

    assert issubclass(GoneError, DecodeError)
    assert not issubclass(PayloadStoreError, DecodeError)


async def test_a_place_that_has_lost_its_marker_is_not_taken_for_a_new_one(where: tuple[str, str]) -> None:
    url, place = where
    if "://" in place:
        pytest.skip("a marker in an object store is deleted in the same way")
    marker = Path(place) / MARKER
    async with apart(url, place) as buffer:
        await put(buffer, 1)
    kept = marker.read_bytes()
    marker.unlink()
    with pytest.raises(PayloadStoreError, match="has lost its replaybuf"):
        async with apart(url, place) as buffer:
            await put(buffer, 2)
    marker.write_bytes(kept)
    async with apart(url, place) as buffer:
        assert await take_all(buffer) == [1]
        await until(lambda: _has(url, 0))
    marker.unlink()
    async with apart(url, place) as buffer:
        await put(buffer, 3)
    assert await ask(url, "SELECT count(*) FROM rb_place") == [(1,)]
