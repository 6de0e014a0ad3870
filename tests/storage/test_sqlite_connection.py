"""Functions in the threads of connections."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.sql.engine.sqlite_connection import SqliteConnection, connect


@pytest.fixture
async def connection() -> AsyncIterator[SqliteConnection]:
    connection = SqliteConnection(partial(connect, ":memory:", [], 5))
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
        engine = open_database(url, lock_timeout=5)
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
