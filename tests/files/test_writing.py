"""Exports appear under their names when they are whole, in parts if they are large, and replace nothing unasked."""

from __future__ import annotations

import asyncio
import builtins
import errno
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import FileError, InputError, MissingDriverError, StorageError
from replaybuf.files import exporting
from tests.files.stores import contents, fill
from tests.reasons import because

pytestmark = pytest.mark.fast


@pytest.fixture
async def buffer() -> Any:
    async with ReplayBufferConfig(url="memory://").build() as made:
        await fill(made, 7)
        yield made


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


async def test_a_file_that_is_there_stays_unless_forced(buffer: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    await buffer.export(file, limit=1)
    before = file.read_bytes()
    with pytest.raises(FileError, match=r"a\.jsonl is there already", check=because("exists")):
        await buffer.export(file)
    assert file.read_bytes() == before
    assert (await buffer.export(file, force=True)).groups == 7
    assert names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
async def test_a_large_export_has_parts_that_are_imported_by_its_name(
    buffer: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 2)
    monkeypatch.setattr("replaybuf.files.arrow_tables._BYTES", 1)
    done = await buffer.export(tmp_path / name, max_bytes=1)
    stem, _, ending = name.partition(".")
    assert names(tmp_path) == [f"{stem}-{n:05}-of-00004.{ending}" for n in range(4)]
    assert done.bytes == sum(file.stat().st_size for file in done.files)
    async with ReplayBufferConfig(url="memory://").build() as other:
        await other.import_from(tmp_path / name)
        assert [one for one, _ in await contents(other)] == [one for one, _ in await contents(buffer)]
    with pytest.raises(FileError, check=because("exists")):
        await buffer.export(tmp_path / name)
    await buffer.export(tmp_path / name, max_bytes=1, limit=6, force=True)
    assert names(tmp_path) == [f"{stem}-{n:05}-of-00003.{ending}" for n in range(3)]
    await buffer.export(tmp_path / name, force=True)
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("max_bytes", [None, 1])
async def test_a_folder_with_one_export_is_imported(
    buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 2)
    monkeypatch.setattr("replaybuf.files.arrow_tables._BYTES", 1)
    await buffer.export(tmp_path / "rollouts.arrows", max_bytes=max_bytes)
    for name in ("state.json", "cache-0123.arrow", ".hidden.jsonl"):
        (tmp_path / name).write_bytes(b"no rollouts")
    async with ReplayBufferConfig(url="sqlite:///:memory:").build() as other:
        await other.import_from(tmp_path)
        assert [one for one, _ in await contents(other)] == [one for one, _ in await contents(buffer)]


async def test_a_folder_without_an_export_or_with_several_is_refused(buffer: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a folder, and no file in it is an export"):
        await buffer.import_from(tmp_path)
    for name in ("a.jsonl", "b.parquet"):
        await buffer.export(tmp_path / name)
    with pytest.raises(FileError, match=r"it holds several exports \(a.jsonl, b.parquet\); name one of them"):
        await buffer.import_from(tmp_path)


async def test_a_set_that_lacks_a_part_is_not_imported(
    buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 2)
    done = await buffer.export(tmp_path / "a.jsonl", max_bytes=1)
    done.files[2].unlink()
    with pytest.raises(FileError, match="there are 3 of its 4 parts"):
        await buffer.import_from(tmp_path / "a.jsonl")


async def test_files_that_are_no_parts_of_ours_block_no_export_and_stay_when_forced(
    buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 2)
    others = ["a-00000-of-00005.jsonl", "a-00003-of-00004.jsonl", "a-notes-of-alice.jsonl"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    for force in (False, True):
        await buffer.export(tmp_path / "a.jsonl", force=force)
    assert names(tmp_path) == [*others, "a.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FileError, match="a-00003-of-00004", check=because("exists")):
        await buffer.export(tmp_path / "a.jsonl", max_bytes=1)
    assert names(tmp_path) == others


@pytest.mark.parametrize("old", [1, 4])
async def test_an_error_between_two_parts_leaves_no_set_of_two_exports(
    buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 2)
    assert len((await buffer.export(tmp_path / "a.jsonl", max_bytes=None if old == 1 else 1)).files) == old
    publish, calls = exporting.publish, []

    def failing(partial: str, path: str) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.EIO, "the disk is gone")
        publish(partial, path)

    monkeypatch.setattr(exporting, "publish", failing)
    with pytest.raises(FileError, match="the disk is gone"):
        await buffer.export(tmp_path / "a.jsonl", max_bytes=1, force=True)
    assert names(tmp_path) == []


async def test_what_is_exported_is_chosen_and_ordered(buffer: Any, tmp_path: Path) -> None:
    await buffer.export(tmp_path / "a.jsonl", where={"task_name": "code"}, order_by="-priority", limit=2, rows="groups")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]
    assert [row["key"] for row in rows] == ["k6", None]
    assert [len(row["rollouts"]) for row in rows] == [2, 2]


async def test_an_export_of_nothing_is_an_empty_file(buffer: Any, tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        assert (await buffer.export(tmp_path / name, where={"task_name": "none"})).groups == 0
        assert (await buffer.import_from(tmp_path / name)).groups == 0


async def test_a_full_disk_leaves_no_file(buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = builtins.open

    def full(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = open_(path, mode, *args, **options)
        if mode == "wb" and str(path).endswith(".partial"):
            file.close()
            return open_("/dev/full", "wb", buffering=0)
        return file

    if not Path("/dev/full").exists():  # noqa: ASYNC240
        pytest.skip("there is no /dev/full")
    monkeypatch.setattr(builtins, "open", full)
    for name in ("a.jsonl", "a.jsonl.zst", "a.parquet"):
        with pytest.raises(
            StorageError, match=f"the disk is full: .*{name} was not written", check=because("disk full")
        ):
            await buffer.export(tmp_path / name)
    assert names(tmp_path) == []


async def test_a_cancelled_export_leaves_no_file(buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 1)
    running = asyncio.ensure_future(buffer.export(tmp_path / "a.jsonl"))
    while not names(tmp_path):  # noqa: ASYNC110 the file is made in a thread
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert names(tmp_path) == []


async def test_what_a_killed_export_left_is_removed_by_the_next(buffer: Any, tmp_path: Path) -> None:
    (tmp_path / f"a.jsonl.{socket.gethostname()}-99999999-1.partial").write_bytes(b"half")
    await buffer.export(tmp_path / "a.jsonl")
    assert names(tmp_path) == ["a.jsonl"]


async def test_groups_that_leave_meanwhile_are_left_out_and_counted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS", 1)
    monkeypatch.setattr("replaybuf.storage.sql.tasks.encoding.PIECE_GROUPS", 1)
    async with ReplayBufferConfig(url=url).build() as shared:
        await fill(shared, 7)
        find = shared.storage.find

        async def found(*args: Any, **options: Any) -> Any:
            async for number, item in _numbered(find(*args, **options)):
                yield item
                if number == 2:
                    await shared.delete({"uid": {"$gt": item.uid}})

        monkeypatch.setattr(shared.storage, "find", found)
        done = await shared.export(tmp_path / "a.jsonl", rows="groups")
    assert (done.groups, done.left) == (2, 5)
    assert len((tmp_path / "a.jsonl").read_bytes().splitlines()) == 2


async def _numbered(items: Any) -> Any:
    number = 0
    async for item in items:
        number += 1
        yield number, item


async def test_a_name_without_a_format_is_refused(buffer: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"doesn't say its format: a file is named \.jsonl"):
        await buffer.export(tmp_path / "a.csv")
    with pytest.raises(InputError, match="rows must be"):
        await buffer.export(tmp_path / "a.jsonl", rows="tokens")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "module", "packages"), [("export", "pyarrow", "pyarrow"), ("to_dataset", "datasets", "datasets pyarrow")]
)
async def test_a_missing_package_is_named(
    buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, module: str, packages: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDriverError, match=f": pip install {packages}"):
        await getattr(buffer, call)(tmp_path / "a.parquet")
    assert names(tmp_path) == []


async def test_a_data_frame_has_the_rows_of_an_export(buffer: Any) -> None:
    frame = await buffer.to_pandas(where={"task_name": "math"})
    assert list(frame["group.task_name"]) == ["math"] * 6
    assert frame["response_ids"].map(len).tolist() == [2, 3, 1, 2, 0, 1]
    assert frame["reward"][0] == {"score": 2 / 7}


@pytest.mark.frameworks
async def test_a_dataset_has_the_rows_of_an_export(buffer: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    dataset = await buffer.to_dataset(tmp_path / "cache", where={"task_name": "math"})
    assert dataset.num_rows == 6
    assert dataset[0]["response_ids"] == [0, 1]
    assert dataset[0]["message"][0]["role"] == "user"


@pytest.mark.frameworks
async def test_the_folder_of_a_dataset_is_imported(buffer: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    dataset = await buffer.to_dataset(tmp_path / "cache")
    dataset.map(lambda row: row)  # leaves a file of its own beside the others
    async with ReplayBufferConfig(url="sqlite:///:memory:").build() as other:
        await other.import_from(tmp_path / "cache")
        assert [one for one, _ in await contents(other)] == [one for one, _ in await contents(buffer)]
