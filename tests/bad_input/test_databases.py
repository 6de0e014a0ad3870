"""Databases that can't be opened, written to, or believed."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf.errors import AccessError, LockedError, StorageError, UnreachableError
from replaybuf.storage.sql.engine import sqlite_files
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.bad_input.conftest import refused
from tests.postgres import execute
from tests.scripts import run
from tests.stores import TASK, build, fill, group, take_all


@pytest.mark.parametrize("url", ["user@127.0.0.1:1/db", "user@host.invalid/db", "user@/db?host=/no/such/socket"])
async def test_a_server_that_is_not_there(url: str) -> None:
    await refused(f"postgresql://{url}", UnreachableError, f"can't reach postgresql://{url.partition('?')[0]}")


async def test_a_database_that_does_not_exist(postgres_url: str) -> None:
    url = make_url(postgres_url).set(database="nope").render_as_string(hide_password=False)
    await refused(url, UnreachableError, 'database "nope" does not exist; create the database first')


async def test_a_folder_that_does_not_exist_or_is_in_place_of_a_file(tmp_path: Path) -> None:
    await refused(f"sqlite:///{tmp_path}/no/x.db", AccessError, f"there is no folder {tmp_path}/no")
    await refused(f"sqlite:///{tmp_path}", AccessError, "is a folder")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE runs (id INTEGER)", "CREATE VIEW numbers AS SELECT 1", "CREATE TABLE rb_version (version_num TEXT)"],
)
async def test_a_file_of_another_program_stays_as_it_is(tmp_path: Path, statement: str) -> None:
    """To the byte, with nothing beside it; PostgreSQL's databases are shared with others, by their names."""
    file = tmp_path / "theirs.db"
    execute(file, statement)
    before = file.read_bytes()
    name = statement.split()[2]
    await refused(f"sqlite:///{file}", StorageError, f"of another program: it has {name} .*as it is")
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]  # noqa: ASYNC240


@pytest.mark.parametrize(("content", "log"), [(b"notes\n" * 300, b""), (b"7", b""), (b"", b"7" * 9000)])
async def test_a_file_that_is_no_database_stays_as_it_is(tmp_path: Path, content: bytes, log: bytes) -> None:
    """SQLite removes the log of an empty file."""
    file, beside = tmp_path / "notes", tmp_path / "notes-wal"
    file.write_bytes(content)
    if log:
        beside.write_bytes(log)
    await refused(f"sqlite:///{file}", StorageError, "not a database.*give the path of")
    assert file.read_bytes() == content
    assert not log or beside.read_bytes() == log


_DIES = """
    async def main():
        await fill(build(url), 2)
        os._exit(0)

    asyncio.run(main())
"""


async def test_a_database_whose_process_was_killed_is_taken(tmp_path: Path) -> None:
    """Though all of it is in its log."""
    file = tmp_path / "run.db"
    await asyncio.to_thread(run, _DIES, f"sqlite:///{file}")
    assert (tmp_path / "run.db-wal").stat().st_size
    (tmp_path / "run.db-shm").unlink()
    async with build(f"sqlite:///{file}") as buffer:
        assert await buffer.count_where({}) == 2


async def test_a_file_that_a_killed_process_left_half_made_is_taken(tmp_path: Path) -> None:
    file, journal = tmp_path / "run.db", tmp_path / "run.db-journal"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("CREATE TABLE runs (id INTEGER); DROP TABLE runs; VACUUM")
    journal.write_bytes(bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", 0, 7, 0, 512, 4096) + bytes(484))
    async with build(f"sqlite:///{file}") as buffer:
        await fill(buffer, 2)
        assert await take_all(buffer) == [0, 1]


async def test_an_empty_file_is_taken(tmp_path: Path) -> None:
    """Also one in which another program has had tables."""
    (tmp_path / "new.db").touch()
    execute(tmp_path / "used.db", "CREATE TABLE runs (id INTEGER)", "DROP TABLE runs")
    for name in ("new.db", "used.db"):
        async with build(f"sqlite:///{tmp_path}/{name}") as buffer:
            await fill(buffer, 2)
            assert await take_all(buffer) == [0, 1]


async def test_a_database_of_someone_else_stays_as_it_is(postgres_database: str) -> None:
    execute(postgres_database, "CREATE TABLE rb_group (x int)")
    await refused(postgres_database, StorageError, "tables or views named rb_group that are not replaybuf's")


@pytest.mark.parametrize("share", [0.5, 0.05])
async def test_a_truncated_database_is_noticed(tmp_path: Path, share: float) -> None:
    file = tmp_path / "buffer.db"
    async with build(f"sqlite:///{file}") as buffer:
        await fill(buffer, 300)
    os.truncate(file, int(os.path.getsize(file) * share) // 512 * 512)  # noqa: ASYNC240
    await refused(f"sqlite:///{file}", StorageError, "malformed")


async def test_a_database_locked_by_another_says_so_in_time(shared_url: str) -> None:
    from tests.cancellation.conftest import locked

    async with build(shared_url, lock_timeout=0.3) as buffer:
        await fill(buffer, 2)
        async with locked(shared_url):
            for call in (buffer.put(group(3), TASK), buffer.get(1, TASK), buffer.delete({})):
                async with asyncio.timeout(5):
                    with pytest.raises(LockedError, match=r"0\.3 s"):
                        await call
            assert await buffer.count_where({}) == 2  # readers don't wait
        await buffer.put(group(4), TASK)
        assert await take_all(buffer) == [0, 1, 4]


@pytest.mark.parametrize("write", [False, True])
async def test_an_error_in_a_transaction_is_not_said_to_be_damage(tmp_path: Path, write: bool) -> None:
    """It may be a defect of the program, and the file is sound: nobody is sent to rescue it."""
    async with build(f"sqlite:///{tmp_path}/run.db") as buffer:
        call = buffer.storage._write if write else buffer.storage._read
        with pytest.raises(StorageError, match=r"raised KeyError: 'here'.*doctor tells which") as raised:
            await call(lambda tx: {}["here"])
        assert "damaged" not in str(raised.value)
        assert not raised.value.reason
        assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("look", [False, True])
async def test_a_sqlite_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: bool) -> None:
    """Where the file is opened, by buffers and by commands, before a statement that it can't read."""
    async with build(f"sqlite:///{tmp_path}/run.db") as buffer:
        await fill(buffer, 1)
    sqlite_files.check_version()
    monkeypatch.setattr(sqlite_files.check_version, "__defaults__", ((3, 34, 1),))

    async def opened() -> None:
        if look:
            open_reader(str(tmp_path / "run.db")).read(lambda tx: None)
        async with build(f"sqlite:///{tmp_path}/run.db"):
            pass

    with pytest.raises(StorageError, match=r"has SQLite 3\.34\.1, and replaybuf needs 3\.35\.0 or newer"):
        await opened()
