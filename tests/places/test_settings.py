"""The setting `payloads`: changed while the buffer is full, of a folder that was moved, and mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf.errors import ConfigError, PayloadStoreError
from replaybuf.storage.places.store import MARKER
from tests.places.arrays import apart, files, listed, put, take_all, until_no_files
from tests.stores import build

pytestmark = pytest.mark.usefixtures("soon_swept")


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
        await until_no_files(url)
    assert await listed(place) == []
    assert files(other) == {}


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
        ("file://host/run", "a folder .also as file:///absolute/path"),
        ("", "payloads names no place"),
        ("s3:/bucket/run", "a bucket as in s3://bucket/prefix"),
        ("s3://", "a bucket as in s3://bucket/prefix"),
        ("s3://user:hidden@bucket/run", "credentials belong in the environment"),
        ("S4://bucket/run", "payloads names no place"),
    ],
)
async def test_a_mistake_in_the_setting_is_said(tmp_path: Path, folder: Path, payloads: str, says: str) -> None:
    """With what to do, and without secrets."""
    (folder / "file").touch()
    with pytest.raises((ConfigError, PayloadStoreError), match=says) as refused:
        async with apart(f"sqlite:///{tmp_path}/b.db", payloads.format(folder=folder)) as buffer:
            await put(buffer, 1)
    assert "hidden" not in str(refused.value)


async def test_a_database_in_memory_has_no_place(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs a database that lasts"):
        async with apart("memory://", folder) as buffer:
            await put(buffer, 1)


async def test_a_marker_that_cannot_be_read_is_said_so(tmp_path: Path, folder: Path) -> None:
    (folder / MARKER).write_text("nonsense")
    with pytest.raises(PayloadStoreError, match=r"restore it .*--take-over writes it again.*or name another place"):
        async with apart(f"sqlite:///{tmp_path}/b.db", folder) as buffer:
            await put(buffer, 1)
