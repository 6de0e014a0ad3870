"""A power cut: what was synced is there, under names that were synced, and nothing else is certain."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replaybuf.places.store import MARKER
from tests.places.arrays import apart, put, rename, take_all

_Key = tuple[int, int]


class Disk:
    """What of files and folders has been synced by this process: contents, and names in folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contents: dict[_Key, bytes] = {}
        self.names: dict[_Key, dict[str, _Key]] = {}
        for name in ("fsync", "fdatasync"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda number, real=real: (real(number), self._note(number))[0])

    def _note(self, number: int) -> None:
        found = os.fstat(number)
        path, key = Path(os.readlink(f"/proc/self/fd/{number}")), (found.st_dev, found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            self.names[key] = {one.name: _key(one) for one in path.iterdir()}
        else:
            self.contents[key] = path.read_bytes()

    def content(self, path: Path) -> bytes | None:
        """What is certain to be in a file, None if not even that is known."""
        return self.contents.get(_key(path))

    def survive(self, folder: Path, into: Path, key: _Key | None = None) -> None:
        """Make a folder of all that is certain to be in another, whose own name is."""
        into.mkdir()
        for name, inside in self.names.get(key or _key(folder), {}).items():
            if inside in self.names:
                self.survive(folder / name, into / name, inside)
            elif (folder / name).is_dir():
                (into / name).mkdir()
            else:
                (into / name).write_bytes(self.contents.get(inside, b""))


def _key(path: Path) -> _Key:
    found = path.stat()
    return found.st_dev, found.st_ino


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("count", [1, 3])
async def test_the_payloads_of_all_commits_survive(
    url: str, folder: Path, tmp_path: Path, disk: Disk, count: int
) -> None:
    """With the marker and all names, from the first put on; durability full, and PostgreSQL."""
    async with apart(url, folder, durability="full") as buffer:
        for number in range(count):
            await put(buffer, number)
        disk.survive(folder, tmp_path / "survivor")
    rename(folder, tmp_path / "before")
    rename(tmp_path / "survivor", folder)
    async with apart(url, folder) as buffer:
        assert sorted(await take_all(buffer)) == [*range(count)]


async def test_a_place_is_never_that_of_a_database_that_is_not_there(
    tmp_path: Path, folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability normal SQLite syncs no commit; the first is synced before the marker names its database."""
    path, cut = tmp_path / "run.db", tmp_path / "cut.db"
    link = os.link

    def linked(*arguments: Any) -> None:
        shutil.copy(path, cut)
        log = disk.content(Path(f"{path}-wal"))
        Path(f"{cut}-wal").write_bytes(log or b"")
        assert _key(path) in disk.names[_key(tmp_path)].values()
        link(*arguments)

    monkeypatch.setattr(os, "link", linked)
    async with apart(f"sqlite:///{path}", folder) as buffer:
        await put(buffer, 1)
    with closing(sqlite3.connect(cut)) as database:
        [(identity,)] = database.execute("SELECT value FROM rb_info WHERE name = 'identity'")
    assert json.loads((folder / MARKER).read_text())["database"] == identity


@pytest.mark.parametrize("what", ["snapshot", "export"])
async def test_what_was_saved_survives(tmp_path: Path, folder: Path, disk: Disk, what: str) -> None:
    """In the folder that was made for it."""
    target = tmp_path / "saved"
    async with apart(f"sqlite:///{tmp_path}/run.db", folder) as buffer:
        await put(buffer, 1)
        if what == "snapshot":
            path = await buffer.save(target)
        else:
            target.mkdir()
            await buffer.export(path := target / "groups.jsonl")
    assert disk.names[_key(tmp_path)]["saved"] == _key(target)
    assert disk.names[_key(target)][path.name] == _key(path)
    assert disk.content(path) == path.read_bytes()
