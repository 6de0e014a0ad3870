"""Snapshots: a half-written, cut or damaged one is never taken for a whole one; how far a long one has come."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.common.progress import Progress
from replaybuf.errors import ReplayBufError, SnapshotError
from replaybuf.storage.sql.copies.snapshot_file import DIGEST, SNAPSHOT_FILE
from tests.contract.harness import everything
from tests.stores import TASK, build, fill, group, number_of

COUNT = 40


def large(number: int) -> list[RolloutState]:
    """A group whose payload takes a page or more."""
    return group(number, text=f"{number:04d} " * random.Random(number).randint(100, 8000))


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The file of a snapshot, which tests only read, and what is in it."""
    folder = tmp_path_factory.mktemp("saved")

    async def save() -> tuple[Path, list[Any]]:
        async with build(f"sqlite:///{folder}/source.db", max_times_sampled=2, worker="trainer") as buffer:
            for number in range(COUNT):
                details = {"priority": 1 + number / 7, "tags": {"n": number}, "key": f"key {number}"}
                await buffer.put(large(number), "math", **details)
            await buffer.get(3, "math", current_train_step=5)
            return await buffer.save(folder / "snapshot"), await everything(buffer)

    return asyncio.run(save())


@pytest.fixture
def saved(saved_once: tuple[Path, list[Any]], tmp_path: Path) -> tuple[Path, list[Any]]:
    """The file of a snapshot, to be changed at will, and what is in it."""
    file, contents = saved_once
    return Path(shutil.copytree(file.parent, tmp_path / "snapshot")) / file.name, contents


async def resumed(url: str, folder: Path) -> list[Any] | None:
    """What a snapshot gives, or None where it is refused; then nothing of it was loaded."""
    async with build(url) as buffer:
        with suppress(SnapshotError):
            await buffer.resume(folder)
            return await everything(buffer)
        assert len(buffer) == 0
        return None


def places(size: int, count: int, seed: int) -> Iterable[int]:
    """Places in a file: near its ends, and anywhere."""
    chance = random.Random(seed)
    return sorted({0, 1, 17, 99, 100, size // 2, size - 1, *(chance.randrange(size) for _ in range(count))})


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_database_of_the_name_of_a_snapshot_is_not_replaced(tmp_path: Path, is_open: bool) -> None:
    url = f"sqlite:///{tmp_path / SNAPSHOT_FILE}"
    async with build("sqlite://") as source, build(url) as other:
        await other.put(group(1), TASK)
        if not is_open:
            await other.close()
        with pytest.raises(SnapshotError, match="into another folder"):
            await source.save(tmp_path)
    async with build(url) as buffer:
        assert len(buffer) == 1


async def test_a_snapshot_that_became_a_database_is_not_replaced(tmp_path: Path) -> None:
    """It was saved and resumed twice before."""
    url = f"sqlite:///{tmp_path / SNAPSHOT_FILE}"
    async with build("sqlite://") as source:
        for number in range(2):
            await source.save(tmp_path)
            assert await resumed(f"sqlite:///{tmp_path}/{number}.db", tmp_path) == []
        async with build(url) as buffer:
            await buffer.put(group(1), TASK)
        with pytest.raises(SnapshotError, match="was opened as a database"):
            await source.save(tmp_path)


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
async def test_no_snapshot_is_put_beside_the_log_of_an_older_one(tmp_path: Path, suffix: str) -> None:
    """As is left where somebody has written to a snapshot, and was killed: SQLite reads it with the new file."""
    async with build("sqlite://") as buffer:
        file = await buffer.save(tmp_path)
        log = file.with_name(f"{SNAPSHOT_FILE}{suffix}")
        log.write_bytes(b"")
        await buffer.save(tmp_path)
        log.write_bytes(b"changes")
        with pytest.raises(SnapshotError, match="into another folder"):
            await buffer.save(tmp_path)


async def test_a_snapshot_that_was_cut_short_is_refused(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    file, _ = saved
    data = file.read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    for i, size in enumerate((*places(len(data), 2, 1), *range(0, len(data), len(data) // 4 // 4096 * 4096))):
        (folder / SNAPSHOT_FILE).write_bytes(data[:size])
        copied = await resumed(f"sqlite:///{tmp_path}/{i}.db", folder)
        assert copied is None or (len(data) - size < 4096 and copied == saved[1]), size  # zeros at the end of a page
    (folder / SNAPSHOT_FILE).write_bytes(data)
    assert await resumed(f"sqlite:///{tmp_path}/whole.db", folder) == saved[1]


async def test_a_flipped_bit_is_noticed_or_means_nothing(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Wherever it is: the snapshot is refused, or what is loaded is what was saved."""
    file, contents = saved
    data = file.read_bytes()
    folder = tmp_path / "flipped"
    folder.mkdir()
    chance, outcomes = random.Random(2), []
    for i, place in enumerate(places(len(data), 10, 3)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        (folder / SNAPSHOT_FILE).write_bytes(flipped)
        outcomes.append(await resumed(f"sqlite:///{tmp_path}/{i}.db", folder))
        assert outcomes[-1] in (None, contents), place
    assert None in outcomes
    assert contents in outcomes  # free space in pages, for example


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rb_group SET priority = priority + 1 WHERE uid = 20",
        "UPDATE rb_lane SET step = 77",
        "UPDATE rb_tally SET amount = amount + 1",
        "UPDATE rb_payload SET data = substr(data, 1, 50) || 'x' || substr(data, 52) WHERE uid = 20",
        "UPDATE rb_payload SET prompt = 'other' WHERE uid = 20",
        "DELETE FROM rb_payload WHERE uid = 20",
        "DELETE FROM rb_group WHERE uid = 20",
        "DELETE FROM rb_info WHERE name = 'digest'",
        "DELETE FROM rb_info",
    ],
)
async def test_other_rows_than_those_that_were_saved_are_refused(saved: tuple[Path, list[Any]], change: str) -> None:
    with closing(sqlite3.connect(saved[0])) as connection, connection:
        connection.execute(change)
    assert await resumed("memory://", saved[0].parent) is None


async def test_a_snapshot_that_was_brought_to_another_schema_is_loaded(saved: tuple[Path, list[Any]]) -> None:
    """Its rows are no longer those that were saved."""
    with closing(sqlite3.connect(saved[0])) as connection, connection:
        connection.execute("UPDATE rb_info SET value = '' WHERE name = ?", (DIGEST,))
    assert await resumed("memory://", saved[0].parent) == saved[1]


async def test_a_partial_file_is_refused_under_the_right_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_url: str
) -> None:
    """Whatever was written of it when its writer was stopped."""
    folder, copies = tmp_path / "snapshot", []

    def copy(progress: Progress) -> None:
        for partial in folder.glob("*.partial*"):
            target = tmp_path / f"copy-{len(copies)}"
            target.mkdir(exist_ok=True)
            shutil.copy(
                partial,
                target
                / partial.name.replace(partial.name.partition(".partial")[0], SNAPSHOT_FILE).replace(".partial", ""),
            )
        copies.append(progress)

    monkeypatch.setattr("replaybuf.common.progress._SECONDS", 0)
    monkeypatch.setattr("replaybuf.storage.sql.copies.snapshot._BATCH_GROUPS", 10)
    async with build(shared_url) as buffer:
        await fill(buffer, 50)
        await buffer.save(folder, progress=copy)
    assert len(copies) >= 5
    for number in range(len(copies)):
        assert await resumed(f"sqlite:///{tmp_path}/{number}.db", tmp_path / f"copy-{number}") is None
    assert len(await resumed(f"sqlite:///{tmp_path}/whole.db", folder) or []) == 50


async def test_progress_tells_of_all_groups(shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows from nothing to all, while saving and while resuming, outside of the caller's thread."""
    monkeypatch.setattr("replaybuf.common.progress._SECONDS", 0)
    reports: list[Progress] = []
    threads = set()

    def tell(progress: Progress) -> None:
        reports.append(progress)
        threads.add(threading.get_ident())

    async with build(shared_url) as buffer:
        await fill(buffer, 30)
        await buffer.put(group(30, status=Status.FAILED), "code")
        async with buffer.lease_batch({"math": 2}):
            await buffer.save(tmp_path, progress=tell)
        assert reports[0] == Progress(0, 31, 0)
        assert [report.groups for report in reports] == sorted(report.groups for report in reports)
        assert (reports[-1].groups, reports[-1].total) == (31, 31)
        items = [item.uid async for item in buffer.find({})]
    async with build("sqlite:///:memory:") as fresh:
        total_bytes = reports[-1].bytes
        reports.clear()
        await fresh.resume(tmp_path, progress=tell)
        assert len(fresh) == 31 > len(items)
    assert reports[0] == Progress(0, 31, 0)
    assert reports[-1] == Progress(31, 31, total_bytes)
    assert threading.get_ident() not in threads


async def test_progress_is_told_of_a_few_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaybuf.storage.sql.copies.snapshot._BATCH_GROUPS", 1)
    monkeypatch.setattr("replaybuf.common.progress.time", SimpleNamespace(monotonic=lambda: 5.0))
    reports: list[Progress] = []
    async with build("sqlite:///:memory:") as buffer:
        await fill(buffer, 30)
        await buffer.save(tmp_path, progress=reports.append)
    assert [report.groups for report in reports] == [0, 30]


@pytest.mark.parametrize("error", [KeyError("not now"), BrokenPipeError("not now"), sqlite3.OperationalError("locked")])
@pytest.mark.parametrize("what", ["save", "resume", "export"])
async def test_an_error_of_progress_ends_it_and_leaves_nothing(
    shared_url: str, tmp_path: Path, what: str, error: Exception
) -> None:
    """It isn't taken for one of a file or a database."""

    def refuse(progress: Progress) -> None:
        raise error

    (tmp_path / "new").mkdir()
    async with build(shared_url) as buffer, build("sqlite:///:memory:") as fresh:
        await fill(buffer, 3)
        await buffer.save(tmp_path / "saved")
        calls = {
            "save": lambda: buffer.save(tmp_path / "new", progress=refuse),
            "resume": lambda: fresh.resume(tmp_path / "saved", progress=refuse),
            "export": lambda: buffer.export(tmp_path / "new" / "a.jsonl", progress=refuse),
        }
        with pytest.raises(ReplayBufError, match=f"the progress callback raised {type(error).__name__}") as caught:
            await calls[what]()
        assert caught.value.__cause__ is error
        assert list((tmp_path / "new").iterdir()) == []
        assert len(fresh) == 0


async def test_a_damaged_source_is_no_damaged_snapshot(tmp_path: Path) -> None:
    """What was saved is what is loaded, damaged payloads included."""
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url) as buffer:
        await fill(buffer, 3)
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection, connection:
        connection.execute("UPDATE rb_payload SET data = x'00' WHERE uid = 2")
    async with build(url) as buffer:
        await buffer.save(tmp_path / "snapshot")
        contents = await everything(buffer)
    assert await resumed("sqlite:///:memory:", tmp_path / "snapshot") == contents


async def test_a_process_that_has_the_buffer_open_goes_on_with_the_tickets_of_a_snapshot(
    shared_url: str, tmp_path: Path
) -> None:
    """What it puts is drawn at random as if it had been put where the snapshot was saved."""
    options: dict[str, Any] = {"policy": "uniform", "seed": 5}

    async def put_and_drawn(buffer: ReplayBuffer) -> list[int]:
        for number in range(10, 20):
            await buffer.put(group(number), TASK)
        return [number_of(rollouts) for _ in range(20) for rollouts in await buffer.get(1, TASK)]

    async with build("memory://", **options) as original:
        for number in range(10):
            await original.put(group(number), TASK)
        await original.get(1, TASK)
        await original.save(tmp_path / "snapshot")
        expected = await put_and_drawn(original)
    async with build(shared_url, **options) as first, build(shared_url, **options) as second:
        await fill(second, 30)  # so that uids and tickets differ
        await second.delete({})
        await first.resume(tmp_path / "snapshot")
        assert await put_and_drawn(second) == expected
