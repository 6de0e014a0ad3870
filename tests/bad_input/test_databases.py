"""Databases that can't be opened, written to, or believed."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from replaybuf import ClosedError, LockedError, UnreachableError
from replaybuf.errors import AccessError, NotADatabaseError
from tests.bad_input.calls import find, refresh, refused
from tests.postgres import execute
from tests.stores import TASK, build, fill, group, numbers_of, take_all


async def test_a_port_where_nobody_listens() -> None:
    await refused("postgresql://user@127.0.0.1:1/db", UnreachableError, "can't reach postgresql://user@127.0.0.1:1/db")


async def test_an_unknown_host() -> None:
    await refused("postgresql://user@host.invalid/db", UnreachableError, "can't reach postgresql://user@host.invalid")


async def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    await refused(f"postgresql://user@/db?host={tmp_path}", UnreachableError, "can't reach")


async def test_a_database_that_does_not_exist(postgres_url: str) -> None:
    url = make_url(postgres_url).set(database="nope").render_as_string(hide_password=False)
    await refused(url, UnreachableError, 'database "nope" does not exist; create the database first')


async def test_a_user_that_may_not_create_tables(postgres_database: str) -> None:
    role = f"reader_{os.getpid()}"
    execute(postgres_database, f"CREATE ROLE {role} LOGIN")
    try:
        url = make_url(postgres_database).set(username=role).render_as_string(hide_password=False)
        await refused(url, AccessError, "refused access: permission denied for schema public")
    finally:
        execute(postgres_database, f"DROP ROLE {role}")


async def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    await refused(f"sqlite:///{tmp_path}/no/x.db", AccessError, f"there is no folder {tmp_path}/no")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    await refused(f"sqlite:///{tmp_path}", AccessError, "is a folder")


async def test_a_file_that_is_no_database_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("These are notes.\n" * 100)
    await refused(f"sqlite:///{file}", NotADatabaseError, "not a database; give the path of a replaybuf database")
    assert file.read_text() == "These are notes.\n" * 100


def of_someone_else(tmp_path: Path) -> str:
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as connection:
        connection.execute("CREATE TABLE rb_group (x)")
    return f"sqlite:///{tmp_path}/theirs.db"


async def test_a_database_of_someone_else_stays_as_it_is(tmp_path: Path, postgres_database: str) -> None:
    execute(postgres_database, "CREATE TABLE rb_group (x int)")
    for url in (of_someone_else(tmp_path), postgres_database):
        await refused(url, NotADatabaseError, "tables or views named rb_group that are not replaybuf's")


@pytest.mark.parametrize("share", [0.5, 0.05])
async def test_a_truncated_database_is_noticed(tmp_path: Path, share: float) -> None:
    file = tmp_path / "buffer.db"
    async with build(f"sqlite:///{file}") as buffer:
        await fill(buffer, 300)
    os.truncate(file, int(os.path.getsize(file) * share) // 512 * 512)  # noqa: ASYNC240
    await refused(f"sqlite:///{file}", NotADatabaseError, "malformed")


async def test_a_database_locked_by_another_says_so_in_time(shared_url: str) -> None:
    from tests.cancellation.ways import locked

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


async def test_a_closed_buffer_says_so(sql_url: str, tmp_path: Path) -> None:
    buffer = build(sql_url)
    await buffer.put(group(1), TASK)
    await buffer.close()
    await buffer.close()
    calls: list[Coroutine[Any, Any, Any]] = [
        buffer.put(group(1), TASK),
        buffer.get(1, TASK),
        buffer.take_batch({TASK: 1}, timeout=5),
        buffer.wait_ready({TASK: 1}, timeout=5),
        buffer.is_ready({TASK: 1}),
        buffer.count(TASK, "completed"),
        buffer.count_where({}),
        buffer.delete({}),
        buffer.update({}, priority=1),
        refresh({TASK: 1})(buffer),
        find()(buffer),
        buffer.save(tmp_path),
        buffer.resume(tmp_path),
        buffer.__aenter__(),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="build a new one"):
            await call
    with pytest.raises(ClosedError):
        len(buffer)
    with pytest.raises(ClosedError):
        buffer.state_dict()


async def test_a_payload_that_is_damaged_is_set_aside_and_not_lost(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        await fill(buffer, 4)
        if shared_url.startswith("sqlite"):
            with sqlite3.connect(shared_url.removeprefix("sqlite:///")) as connection:
                connection.execute("UPDATE rb_payload SET data = CAST(x'00' || data AS BLOB) WHERE uid = 2")
            connection.close()
        else:
            execute(shared_url, "UPDATE rb_payload SET data = '\\x00'::bytea || data WHERE uid = 2")
        batch, _ = await buffer.take_batch({TASK: 3}, timeout=5)
        assert numbers_of(batch[TASK]) == [0, 2, 3]
        (damaged,) = [item async for item in buffer.find({})]
        assert (damaged.uid, damaged.status, damaged.item) == (2, "failed", [])
        assert "not a replaybuf payload" in (damaged.error or "")
