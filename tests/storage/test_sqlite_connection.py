"""Functions in the threads of connections, and what `sqlite3` keeps of blobs."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import time
import weakref
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from replaybuf.storage.sql.engine import sqlite_session
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.sql.engine.sqlite_connection import SqliteConnection, connect
from replaybuf.storage.sql.engine.sqlite_session import SqliteSession


@pytest.fixture
async def connection() -> AsyncIterator[SqliteConnection]:
    connection = SqliteConnection(partial(connect, Access(make_url("sqlite://"))))
    await connection.open()
    yield connection
    await connection.close()


async def test_functions_run_one_after_the_other_in_one_thread_of_its_own(connection: SqliteConnection) -> None:
    threads = {await connection.in_thread(lambda _: threading.get_ident()) for _ in range(3)}
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


async def test_the_thread_does_not_keep_the_process_alive(connection: SqliteConnection) -> None:
    assert await connection.in_thread(lambda _: threading.current_thread().daemon)


@pytest.mark.parametrize("later", [0.0, 0.05])
def test_an_engine_that_is_disposed_of_has_no_threads_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: float
) -> None:
    """Not even of a connection whose opening was cancelled, which would answer a loop that is closed by then."""
    before = set(threading.enumerate())
    url = make_url(f"sqlite:///{tmp_path}/buffer.db")
    quick = sqlite3.connect

    def slow(*args: Any, **options: Any) -> sqlite3.Connection:
        time.sleep(0.1)
        return quick(*args, **options)

    async def use() -> None:
        engine = open_database(Access(url, lock_timeout=5))
        assert isinstance(engine, SqliteDatabase)
        first = await engine.connections.open()
        monkeypatch.setattr(sqlite3, "connect", slow)
        opening = asyncio.create_task(engine.connections.open())
        await asyncio.sleep(later)
        opening.cancel()
        await asyncio.wait([opening])
        await engine.connections.close(first)
        await engine.dispose()

    asyncio.run(use())
    assert {thread for thread in threading.enumerate() if thread not in before} == set()


# Payloads that are read one by one through `sqlite3`'s blobs


@pytest.fixture
def session() -> SqliteSession:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    raw.execute("CREATE TABLE numbers (id INTEGER PRIMARY KEY, data BLOB)")
    raw.executemany("INSERT INTO numbers VALUES (?, ?)", [(at, b"%d" % at) for at in range(100)])
    return SqliteSession(raw)


def weak_references() -> int:
    return sum(type(one) is weakref.ref for one in gc.get_objects())


def test_what_was_read_leaves_nothing_behind(session: SqliteSession) -> None:
    before = weak_references()
    for at in range(5 * sqlite_session._MOST_OPENED):
        assert session.read_blob("numbers", "data", at % 100) == b"%d" % (at % 100)
    assert weak_references() - before <= 1.5 * sqlite_session._MOST_OPENED


def test_a_blob_that_is_still_open_is_remembered(session: SqliteSession) -> None:
    """Closing the connection closes it, which without the reference would be a crash."""
    blob = session.raw.blobopen("numbers", "data", 7)
    for at in range(2 * sqlite_session._MOST_OPENED):
        session.read_blob("numbers", "data", at % 100)
    assert blob.read() == b"7"
    session.raw.close()
    with pytest.raises(sqlite3.ProgrammingError):
        blob.read()


def test_what_is_not_there_is_none(session: SqliteSession) -> None:
    assert session.read_blob("numbers", "data", 100) is None
