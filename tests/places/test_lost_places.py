"""Damage of what is kept apart, and places that can't be reached: what is lost is said, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer, load_into
from replaybuf.errors import PayloadStoreError
from replaybuf.storage.places import folder as folders
from replaybuf.storage.places.store import FILES, MARKER
from tests.places.arrays import (
    NBYTES,
    apart,
    ask,
    files,
    heavy,
    lent,
    put,
    rename,
    take_all,
    until_rows,
)
from tests.places.relay import Relay
from tests.stores import TASK, build, group, until

pytestmark = pytest.mark.usefixtures("soon_swept")


async def _damage(place: str, damage: str) -> None:
    """Of the first payload in a file, or all of it."""
    [path] = [file for file in (Path(place) / FILES).iterdir() if file.stat().st_size > 2 * NBYTES]
    raw = bytearray(path.read_bytes())
    match damage:
        case "cut short":
            raw = raw[:5000]
        case "swapped":
            size = NBYTES + -NBYTES % 64
            raw[:size], raw[size : 2 * size] = raw[size : 2 * size], raw[:size]
        case _:
            path.unlink()
            return
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "spoilt"),
    [("cut short", 3), ("swapped", 2), ("deleted", 3)],
)
async def test_damaged_groups_are_set_aside_with_the_reason(url: str, folder: Path, how: str, spoilt: int) -> None:
    """The take goes on with the next, also when a lease is drawn."""
    async with apart(url, folder) as buffer:
        await buffer.put_many([heavy(number) for number in range(3)], TASK)
        await buffer.put(group(77), TASK)
        await buffer.put(heavy(3, 19_000), TASK)
        await _damage(str(folder), how)
        async with buffer.lease_batch({TASK: 1}) as lease:
            first = int(lease.batch[TASK][0][0].rollout_id)
        numbers = [int(rollouts[0].rollout_id) for rollouts in await buffer.get(9, TASK)]
        assert [first, *numbers] == [0, 1, 2, 77, 3][spoilt:]
        failed = [item async for item in buffer.find({"status": "failed"})]
        assert len(failed) == spoilt
        assert all(item.error for item in failed)


# Places that can't be reached


async def goes_on_when_it_is_back(buffer: ReplayBuffer, back: Callable[[], object], words: str | None = None) -> None:
    """Takes and a put fail, small groups go on; none is set aside, and all are there when it is back."""
    for call in (buffer.get(5, TASK), buffer.get(5, TASK), buffer.put(heavy(9), TASK)):
        with pytest.raises(PayloadStoreError, match=words):
            await call
    await buffer.put(group(50), "other")
    assert len(await buffer.get(1, "other")) == 1
    assert await buffer.count(TASK, "completed") == 5
    back()
    await put(buffer, 5)
    assert sorted(await take_all(buffer)) == list(range(6))
    assert await buffer.count(TASK, "failed") == 0


@pytest.mark.parametrize("part", [".", FILES])
async def test_a_take_without_the_folder_gives_all_groups_back(url: str, folder: Path, part: str) -> None:
    away = folder.with_name("away")
    async with apart(url, folder) as buffer:
        await put(buffer, *range(5))
        rename(folder / part, away)
        with pytest.raises(PayloadStoreError):
            async with buffer.lease_batch({TASK: 2}):
                pass
        words = r"mount it, or put it back .*nothing is lost"
        await goes_on_when_it_is_back(buffer, lambda: rename(away, folder / part), words)


async def test_opening_makes_no_folder_of_files_where_there_was_one(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
    rename(folder / FILES, folder.with_name("away"))
    with pytest.raises(PayloadStoreError, match=f"{FILES} isn't there"):
        async with apart(url, folder) as buffer:
            await buffer.get(1, TASK)
    rename(folder.with_name("away"), folder / FILES)
    async with apart(url, folder) as buffer:
        assert await take_all(buffer) == [1]


async def test_a_folder_that_was_replaced_by_another_runs_is_not_damage(url: str, folder: Path, tmp_path: Path) -> None:
    """As when the mount of another run takes its path."""
    other = tmp_path / "other"
    other.mkdir()
    async with apart(f"sqlite:///{tmp_path}/other.db", other) as theirs:
        await put(theirs, 7, 8)
        async with apart(url, folder) as ours:
            await put(ours, 1, 2)
            rename(folder, folder.with_name("away"))
            rename(other, folder)
            for _ in range(2):
                with pytest.raises(PayloadStoreError, match="another place than before"):
                    await ours.get(2, TASK)
            assert await ours.count(TASK, "failed") == 0
            with pytest.raises(PayloadStoreError, match="another place than before"):
                await put(ours, 3)
            async with build(url) as reader:
                with pytest.raises(PayloadStoreError, match="other payloads than those"):
                    await reader.get(2, TASK)
            rename(folder, other)
            rename(folder.with_name("away"), folder)
            assert sorted(await take_all(ours)) == [1, 2]
        assert sorted(await take_all(theirs)) == [7, 8]


async def test_a_put_that_was_committed_is_not_said_to_have_failed(tmp_path: Path, folder: Path) -> None:
    """Where the arrays of what it dropped can't be read: that group says so."""
    async with apart(f"sqlite:///{tmp_path}/b.db", folder, capacity=1, on_full="evict") as buffer:
        await put(buffer, 1)
        rename(folder, folder.with_name("away"))
        dropped: list[Any] = []
        assert await buffer.put(group(2), TASK, dropped=dropped)
        [item] = dropped
        assert item.item == []
        assert "nothing is lost" in str(item.error)
        rename(folder.with_name("away"), folder)


@pytest.mark.parametrize("way", [pytest.param("away", marks=pytest.mark.long), "403"])
async def test_an_object_store_that_is_down_loses_nothing(tmp_path: Path, bucket: str, relay: Relay, way: str) -> None:
    """Calls fail after the patience."""
    async with apart(f"sqlite:///{tmp_path}/b.db", bucket, reconnect_timeout=1.0) as buffer:
        await put(buffer, *range(5))
        relay.fail(way)
        await goes_on_when_it_is_back(buffer, relay.well)


@pytest.mark.parametrize("on_network", [False, True])
async def test_a_folder_that_answers_nothing_fails_calls_after_the_patience(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, on_network: bool
) -> None:
    """As where the server of a file system stands still."""
    monkeypatch.setattr(folders, "filesystem_type", lambda path: "nfs4" if on_network else "ext4")
    async with apart(f"sqlite:///{tmp_path}/b.db", folder, reconnect_timeout=0.5) as buffer:
        await put(buffer, *range(5))
        answers = _hang(monkeypatch, folders, "_read_range", "_write_all")
        await goes_on_when_it_is_back(buffer, answers.set, r"within 0\.5 s")


async def test_handles_in_a_folder_that_answers_nothing_are_not_loaded_for_ever(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with apart(f"sqlite:///{tmp_path}/b.db", folder) as buffer:
        await put(buffer, 1)
        lease, _ = await lent(buffer, deferred=["extra_fields"])
        answers = _hang(monkeypatch, os, "preadv")
        with pytest.raises(PayloadStoreError, match=r"within 0\.3 s"):
            await asyncio.to_thread(load_into, lease.items, timeout=0.3)
        answers.set()
        load_into(lease.items)


async def test_a_folder_that_answers_nothing_delays_neither_build_nor_the_event_loop(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a buffer that keeps payloads there, up to its first write, which says what is wrong."""
    answers = _hang(monkeypatch, folders, "filesystem_type")
    async with apart(f"sqlite:///{tmp_path}/b.db", folder, reconnect_timeout=0.5) as buffer:
        with pytest.raises(PayloadStoreError, match=r"within 0\.5 s"):
            await put(buffer, 1)
        answers.set()
        await put(buffer, 2)


def _hang(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> threading.Event:
    """Let functions answer nothing until the event is set, or five seconds later."""
    answers = threading.Event()
    for name in names:
        real = getattr(module, name)

        def hang(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            answers.wait(5)
            return real(*arguments)

        monkeypatch.setattr(module, name, hang)
    return answers


async def test_sweeps_do_not_wait_for_a_place_that_is_down(tmp_path: Path, bucket: str, relay: Relay) -> None:
    """Nor do leases that end."""
    async with apart(f"sqlite:///{tmp_path}/b.db", bucket, reconnect_timeout=30.0) as buffer:
        await put(buffer, *range(3))
        await buffer.put(group(5), "other")
        relay.fail("away")
        await buffer.delete({"task_name": TASK})
        await asyncio.sleep(0.3)
        lease = await buffer.lease_batch({"other": 1}, seconds=0.5, heartbeat=False).__aenter__()
        assert lease is not None
        await until(lambda: buffer.get(1, "other"), 8)  # type: ignore[arg-type]


async def test_a_place_that_is_gone_for_good_keeps_no_other_from_being_tidied(
    url: str, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "another"
    other.mkdir()
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
    rename(folder, folder.with_name("away"))
    async with apart(url, other) as buffer:
        await buffer.delete({})
        await put(buffer, 2)
        await take_all(buffer)
        await until_rows(url, 0)
    assert files(other) == {}


async def test_a_place_that_has_lost_its_marker_is_not_taken_for_a_new_one(where: tuple[str, str]) -> None:
    url, place = where
    if "://" in place:
        pytest.skip("a marker in an object store is deleted in the same way")
    marker = Path(place) / MARKER
    async with apart(url, place) as buffer:
        await put(buffer, 1)
    content = marker.read_bytes()
    marker.unlink()
    with pytest.raises(PayloadStoreError, match="has lost its replaybuf"):
        async with apart(url, place) as buffer:
            await put(buffer, 2)
    marker.write_bytes(content)
    async with apart(url, place) as buffer:
        assert await take_all(buffer) == [1]
        await until_rows(url, 0)
    marker.unlink()
    async with apart(url, place) as buffer:
        await put(buffer, 3)
    assert await ask(url, "SELECT count(*) FROM rb_place") == [(1,)]
