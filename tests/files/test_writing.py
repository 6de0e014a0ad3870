"""Exports appear under their names when they are whole, and replace nothing unasked."""

from __future__ import annotations

import asyncio
import builtins
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import FileError, InputError, MissingDriverError, StorageError
from replaybuf.files import exporting
from tests.files.conftest import fill
from tests.stores import because

pytestmark = pytest.mark.fast


@pytest.fixture
async def buffer() -> Any:
    async with ReplayBufferConfig(url="memory://").build() as new_buffer:
        await fill(new_buffer, 7)
        yield new_buffer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_file_that_is_there_stays_unless_forced(buffer: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    await buffer.export(file, limit=1)
    before = file.read_bytes()
    with pytest.raises(FileError, match=r"a\.jsonl is there already", check=because("exists")):
        await buffer.export(file)
    assert file.read_bytes() == before
    assert (await buffer.export(file, force=True)).groups == 7
    assert names(tmp_path) == ["a.jsonl"]


async def test_what_is_exported_is_chosen_and_ordered(buffer: Any, tmp_path: Path) -> None:
    await buffer.export(tmp_path / "a.jsonl", where={"task_name": "code"}, order_by="-priority", limit=2)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]
    assert [row["group.key"] for row in rows] == ["k6", "k6", None, None]


async def test_an_export_of_nothing_is_an_empty_file(buffer: Any, tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet"):
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
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(
            StorageError, match=f"the disk is full: .*{name} was not written", check=because("disk full")
        ):
            await buffer.export(tmp_path / name)
    assert names(tmp_path) == []


async def test_a_cancelled_export_leaves_no_file(buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_GROUPS_AT_ONCE", 1)
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


async def test_what_a_host_of_a_longer_name_writes_is_left_alone(
    buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be shared: the number after this host's name needn't be that of a process."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu")
    theirs = tmp_path / "a.jsonl.gpu-99999998-99999999-1.partial"
    theirs.write_bytes(b"half")
    await buffer.export(tmp_path / "a.jsonl")
    assert names(tmp_path) == ["a.jsonl", theirs.name]


async def test_groups_that_leave_meanwhile_are_left_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS_AT_ONCE", 1)
    monkeypatch.setattr("replaybuf.storage.sql.tasks.transactions.PIECE_GROUPS", 1)
    async with ReplayBufferConfig(url=url).build() as shared:
        await fill(shared, 7)
        find = shared.storage.find

        async def found(*args: Any, **options: Any) -> Any:
            async for number, item in _numbered(find(*args, **options)):
                yield item
                if number == 2:
                    await shared.delete({"uid": {"$gt": item.uid}})

        monkeypatch.setattr(shared.storage, "find", found)
        summary = await shared.export(tmp_path / "a.jsonl")
    assert summary.groups == 2
    assert len((tmp_path / "a.jsonl").read_bytes().splitlines()) == 4


async def _numbered(items: Any) -> Any:
    number = 0
    async for item in items:
        number += 1
        yield number, item


async def test_a_name_without_a_format_is_refused(buffer: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"doesn't say its format: a file is named \.jsonl"):
        await buffer.export(tmp_path / "a.csv")
    assert names(tmp_path) == []


async def test_a_missing_package_is_named(buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDriverError, match=": pip install pyarrow"):
        await buffer.export(tmp_path / "a.parquet")
    assert names(tmp_path) == []
