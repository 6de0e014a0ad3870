"""What replaybuf needs of aiosqlite and no document promises: its bounds in pyproject.toml are the versions that pass.

`ThreadedConnection` uses `_execute`, which calls a function in the connection's thread, `_conn`, the `sqlite3`
connection, and the thread itself, `_thread` (up to 0.21 the connection is the thread).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator

import aiosqlite
import pytest

from replaybuf.storage.sql.engine.sqlite_connections import ThreadedConnection


@pytest.fixture
async def connection() -> AsyncIterator[ThreadedConnection]:
    connection = ThreadedConnection(":memory:")
    await connection
    yield connection
    await connection.close()


async def test_functions_run_one_after_the_other_in_one_thread_of_its_own(connection: ThreadedConnection) -> None:
    threads = {await connection.in_thread(lambda _: threading.get_ident()) for _ in range(3)}
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


async def test_a_function_gets_the_connection_of_sqlite3_itself(connection: ThreadedConnection) -> None:
    assert type(await connection.in_thread(lambda raw: raw)) is sqlite3.Connection
    assert await connection.in_thread(lambda raw: raw.execute("SELECT 7").fetchone()) == (7,)


async def test_what_a_function_raises_reaches_its_caller(connection: ThreadedConnection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await connection.in_thread(lambda raw: raw.execute("SELECT * FROM missing"))


async def test_the_thread_does_not_keep_the_process_alive(connection: ThreadedConnection) -> None:
    assert await connection.in_thread(lambda _: threading.current_thread().daemon)


def test_no_method_of_aiosqlite_or_its_thread_is_overridden() -> None:
    own = {name for name in vars(ThreadedConnection) if not name.startswith("__")}
    assert own == {"raw", "idle", "in_thread"}
    assert own.isdisjoint({*dir(aiosqlite.Connection), *dir(threading.Thread)})
