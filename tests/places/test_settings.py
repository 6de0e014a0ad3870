"""The setting of a place, and a place that has several names."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from replaybuf.errors import ConfigError, PayloadStoreError
from replaybuf.storage.places.owners import parse_place
from replaybuf.storage.places.store import FILES, MARKER
from tests.cli.doctored import examine, wrong
from tests.places.arrays import apart, ask, files, listed, put, take_all, until_no_files
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


async def test_without_attempts_after_a_lost_connection_a_place_has_time_to_answer(tmp_path: Path, place: str) -> None:
    async with apart(f"sqlite:///{tmp_path}/b.db", place, reconnect_timeout=0) as buffer:
        await put(buffer, 1)
        assert await take_all(buffer) == [1]


# Bad input


async def test_two_databases_on_one_place_are_refused(tmp_path: Path, place: str) -> None:
    async with apart(f"sqlite:///{tmp_path}/one.db", place) as buffer:
        await put(buffer, 1)
        with pytest.raises(ConfigError, match=r"another database.*name another place"):
            async with apart(f"sqlite:///{tmp_path}/two.db", place) as other:
                await put(other, 2)
        assert await take_all(buffer) == [1]


async def test_a_mistake_in_the_setting_is_said(tmp_path: Path, folder: Path) -> None:
    """With what to do, and without secrets."""
    (folder / "file").touch()
    (folder / "spoilt" / FILES).mkdir(parents=True)
    (folder / "spoilt" / MARKER).write_text("nonsense")
    for payloads, says in (
        (f"{folder}/missing", "is no folder: make it .mkdir -p., mount it, or name another one"),
        (f"{folder}/file", "is no folder"),
        (f"{folder}/spoilt", r"restore it .*--take-over writes it again.*or name another place"),
        (f"file://{folder}", "payloads names no place"),
        ("", "payloads names no place"),
        ("s3:/user:hidden@bucket/run", "a bucket as in s3://bucket/prefix"),
        ("s3://", "a bucket as in s3://bucket/prefix"),
        ("s3://user:hidden@bucket/run", "credentials belong in the environment"),
        ("S4://bucket/run", "payloads names no place"),
    ):
        with pytest.raises((ConfigError, PayloadStoreError), match=says) as refused:
            async with apart(f"sqlite:///{tmp_path}/b.db", payloads) as buffer:
                await put(buffer, 1)
        assert "hidden" not in str(refused.value)


async def test_a_database_in_memory_has_no_place(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs a database that lasts"):
        async with apart("memory://", folder) as buffer:
            await put(buffer, 1)


async def noted(url: str) -> list[str]:
    """Where the database says that its places are."""
    return [place_url for (place_url,) in await ask(url, "SELECT url FROM rb_place ORDER BY id")]


async def test_the_name_that_was_used_last_is_noted(url: str, folder: Path, tmp_path: Path) -> None:
    """Processes without a name of their own read there, and handles have the name of their process."""
    other = tmp_path / "other"
    other.symlink_to(folder)
    for number, name in enumerate((folder, other, folder)):
        async with apart(url, name) as buffer:
            await put(buffer, number)
            assert await noted(url) == [str(name)]
            items = [item.item[0] async for item in buffer.find({}, deferred=["extra_fields"])]
            urls = [rollout.extra_fields["experts"].source.url for rollout in items]
            assert urls == [str(name)] * (number + 1)
    async with build(url) as reader:
        assert sorted(await take_all(reader)) == [0, 1, 2]


async def test_places_that_were_added_before_and_after_a_backup_was_put_back_are_two(
    folder: Path, tmp_path: Path
) -> None:
    """No group is read from the wrong one, or lost."""
    path, before, after = tmp_path / "run.db", tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    url = f"sqlite:///{path}"

    async def add(number: int, place: Path) -> None:
        async with apart(url, place) as buffer:
            await put(buffer, number)

    await add(1, folder)
    shutil.copy(path, tmp_path / "backup.db")
    await add(2, before)
    os.replace(tmp_path / "backup.db", path)
    await add(3, after)
    await add(4, before)
    assert wrong(await asyncio.to_thread(examine, url)).get("payloads") is None
    async with build(url) as buffer:
        assert sorted(await take_all(buffer)) == [1, 3, 4]


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, 10))])
async def test_those_who_create_a_database_at_the_same_moment_share_its_place(
    empty_url: str, folder: Path, turn: int
) -> None:
    async def begin(number: int) -> None:
        async with apart(empty_url, folder) as buffer:
            await put(buffer, number)

    await asyncio.gather(*(begin(number) for number in range(4)))
    async with build(empty_url) as buffer:
        assert sorted(await take_all(buffer)) == [0, 1, 2, 3]


def test_a_home_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_place("~/payloads") == "/home/me/payloads"
