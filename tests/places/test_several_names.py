"""A place is one thing, whatever hosts call it, and it is never taken for another."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from replaybuf.errors import ConfigError, PayloadStoreError
from replaybuf.storage.places.owners import parse_place
from replaybuf.storage.places.store import MARKER
from replaybuf.storage.sql.tasks import payload_files as tasks
from replaybuf.storage.sql.tasks import sweeper
from tests.cli.doctored import examine, wrong
from tests.faults.ledger import entries
from tests.faults.processes import end, start
from tests.places import roles
from tests.places.arrays import apart, ask, numbers_in, put, take_all
from tests.postgres import execute, new_database
from tests.stores import TASK, build, until

STORES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def _soon_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(tasks, "_LOOK_SECONDS", 0.1)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/buffer.db"
    return str(request.getfixturevalue("lent_database"))


async def noted(url: str) -> list[str]:
    """Where the database says that its places are."""
    return [one for (one,) in await ask(url, "SELECT url FROM rb_place ORDER BY id")]


async def _is_known(url: str) -> bool:
    """Whether this process has given a sign of life: it uses the folder where it is noted."""
    return bool(await ask(url, "SELECT 1 FROM rb_worker"))


async def test_the_name_that_was_noted_first_stays(url: str, folder: Path, tmp_path: Path) -> None:
    """As long as it is seen from here. Who isn't told otherwise reads there."""
    other = tmp_path / "other"
    other.symlink_to(folder)
    for number, name in enumerate((folder, other, folder)):
        async with apart(url, name) as buffer:
            await put(buffer, number)
            assert await noted(url) == [str(folder)]
            items = [item.item[0] async for item in buffer.find({}, deferred=["extra_fields"])]
            urls = [rollout.extra_fields["experts"].source.url for rollout in items]
            assert urls == [str(name)] * (number + 1)
    async with build(url) as reader:
        assert sorted(await take_all(reader)) == [0, 1, 2]


async def test_a_host_that_mounts_the_place_elsewhere_reads_and_writes_there(
    url: str, folder: Path, tmp_path: Path
) -> None:
    """In a mount namespace, where the folder is at another path, and an empty one at its own; handles load there."""
    own, sent, ledger = tmp_path / "own", tmp_path / "sent", tmp_path / "ledger"
    own.mkdir()
    async with apart(url, folder) as buffer:
        await put(buffer, 1, 2)
        items = [item async for item in buffer.find({}, deferred=["extra_fields"])]
        sent.write_bytes(pickle.dumps([item.item[0].extra_fields["experts"] for item in items]))
        await until(lambda: _is_known(url))
        process = start(roles.other_host, ledger, url, str(folder), str(own), str(sent))
        assert await asyncio.to_thread(end, process, ledger) == 0
        if entries(ledger, "not-permitted"):
            pytest.skip("this user may not mount")
        assert entries(ledger, "loaded") == ["1 2"]
        assert entries(ledger, "found") == ["1 2"]
        assert await noted(url) == [str(folder)]
        assert sorted(numbers_in(await buffer.get(9, TASK))) == [1, 2, 10]
    assert entries(ledger, "put") == ["10"]


async def test_a_folder_that_was_moved_is_noted_once_nobody_uses_it_where_it_was(url: str, folder: Path) -> None:
    """A process that was killed is taken for dead first."""
    async with apart(url, folder) as buffer:
        await put(buffer, 1)
    moved = folder.with_name("moved")
    shutil.move(folder, moved)
    columns = "buffer, id, name, host, pid, started_at, seen_at, activity, waits"
    another = "'default', 1, 'rollouts', 'elsewhere', 1, 0, 1e12, '{}', '[]'"
    await ask(url, f"INSERT INTO rb_worker ({columns}) VALUES ({another})")
    for seen_at, known in ((1e12, folder), (0, moved)):
        await ask(url, f"UPDATE rb_worker SET seen_at = {seen_at} WHERE host = 'elsewhere'")
        async with apart(url, moved) as buffer:
            await put(buffer, 2)
            assert await noted(url) == [str(known)]
    async with build(url) as reader:
        assert sorted(await take_all(reader)) == [1, 2, 2]


# A database that was put back from a backup


class Backup:
    """A database of which a backup is made, and put back."""

    def __init__(self, url: str, make: Callable[[], None], put_back: Callable[[], str]) -> None:
        self.url, self.make, self._put_back = url, make, put_back

    def put_back(self) -> None:
        self.url = self._put_back()


@pytest.fixture(params=STORES)
def backed_up(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backup]:
    if request.param == "sqlite":
        file, copy = tmp_path / "run.db", tmp_path / "backup.db"

        def replace() -> str:
            os.replace(copy, file)
            return f"sqlite:///{file}"

        yield Backup(f"sqlite:///{file}", lambda: shutil.copy(file, copy), replace)
        return
    server = request.getfixturevalue("postgres_url")
    with new_database(server) as url:
        copies: list[str] = []
        opened = []

        def make() -> None:
            opened.append(new_database(server, str(make_url(url).database)))
            copies.append(opened[0].__enter__())

        def put_back() -> str:
            execute(copies[0], f"DROP DATABASE {make_url(url).database}")
            return copies[0]

        yield Backup(url, make, put_back)
        opened[0].__exit__(None, None, None)


def test_places_that_were_added_before_and_after_a_backup_was_put_back_are_two(
    backed_up: Backup, folder: Path, tmp_path: Path
) -> None:
    """No group is read from the wrong one, or lost."""

    async def add(number: int, place: Path) -> None:
        async with apart(backed_up.url, place) as buffer:
            await put(buffer, number)

    async def take() -> list[int]:
        async with build(backed_up.url) as buffer:
            return sorted(await take_all(buffer))

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    asyncio.run(add(1, folder))
    backed_up.make()
    asyncio.run(add(2, before))
    backed_up.put_back()
    asyncio.run(add(3, after))
    asyncio.run(add(4, before))
    found = examine(backed_up.url)
    assert wrong(found).get("payloads") is None
    assert asyncio.run(take()) == [1, 3, 4]


# Places that are refused


def _other_databases(folder: Path) -> None:
    (folder / MARKER).write_text(json.dumps({"database": "0" * 32, "place": 7}))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "it is not there": (Path.rmdir, "isn't there: make it"),
    "it is a file": (lambda folder: (folder.rmdir(), folder.touch())[1], "is a file: name a folder"),
    "it is that of another database": (_other_databases, "has the payloads of another database"),
}


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.fixture(params=STORES)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database that isn't there, or has no tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/buffer.db"
        return
    with new_database(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.mark.parametrize("why", REFUSED)
async def test_a_database_that_is_refused_its_place_is_not_created(
    new_url: str, folder: Path, tmp_path: Path, why: str
) -> None:
    spoil, said = REFUSED[why]
    spoil(folder)
    before = everything_in(tmp_path)
    with pytest.raises((ConfigError, PayloadStoreError), match=said):
        async with apart(new_url, folder) as buffer:
            await put(buffer, 1)
    assert everything_in(tmp_path) == before
    if new_url.startswith("postgresql"):
        assert await ask(new_url, "SELECT 1 FROM pg_class WHERE relname LIKE 'rb_%'") == []


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, 10))])
async def test_those_who_create_a_database_at_the_same_moment_share_its_place(
    new_url: str, folder: Path, turn: int
) -> None:
    async def begin(number: int) -> None:
        async with apart(new_url, folder) as buffer:
            await put(buffer, number)

    await asyncio.gather(*(begin(number) for number in range(4)))
    async with build(new_url) as buffer:
        assert sorted(await take_all(buffer)) == [0, 1, 2, 3]


def test_a_home_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_place("~/payloads") == "/home/me/payloads"
