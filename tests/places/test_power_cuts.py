"""A power cut, where `tests/power` doesn't go: payloads beside PostgreSQL, and exports.

What was synced is there, under names that were synced, and nothing else is certain.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

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
    postgres_database: str, folder: Path, tmp_path: Path, disk: Disk, count: int
) -> None:
    """With the marker and all names, from the first put on."""
    async with apart(postgres_database, folder) as buffer:
        for number in range(count):
            await put(buffer, number)
        disk.survive(folder, tmp_path / "survivor")
    rename(folder, tmp_path / "before")
    rename(tmp_path / "survivor", folder)
    async with apart(postgres_database, folder) as buffer:
        assert sorted(await take_all(buffer)) == [*range(count)]


async def test_what_was_exported_survives(tmp_path: Path, folder: Path, disk: Disk) -> None:
    """In the folder that was made for it."""
    path = tmp_path / "saved/groups.jsonl"
    path.parent.mkdir()
    async with apart(f"sqlite:///{tmp_path}/run.db", folder) as buffer:
        await put(buffer, 1)
        await buffer.export(path)
    assert disk.names[_key(tmp_path)]["saved"] == _key(path.parent)
    assert disk.names[_key(path.parent)][path.name] == _key(path)
    assert disk.content(path) == path.read_bytes()
