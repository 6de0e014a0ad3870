"""The write-ahead log of a SQLite file is copied by replaybuf, so that no version of SQLite loses a commit by it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from replaybuf.storage.sql.engine import sqlite
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.sqlite import checkpoint_wal, salts_at
from replaybuf.storage.sql.engine.sqlite_connection import PAGE_SIZE
from replaybuf.storage.sql.engine.transaction import Transaction

PAGES = 32


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is copied after a few pages; nothing waits for the disk, which may take as long as hundreds of writes."""
    for name in ("ALONE_PAGES", "_GROWTH_PAGES"):
        monkeypatch.setattr(sqlite, name, PAGES)
    monkeypatch.setattr(sqlite, "sync_wal", lambda path: None)
    monkeypatch.setattr(sqlite, "checkpoint_wal", copy_unflushed)


def copy_unflushed(connection: sqlite3.Connection) -> int:
    connection.execute("PRAGMA synchronous = OFF")
    return checkpoint_wal(connection)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Database]:
    engine = open_database(make_url(f"sqlite:///{path}"), lock_timeout=5)
    try:
        await engine.write(lambda tx: run(tx, "CREATE TABLE numbers (id INTEGER PRIMARY KEY, data BLOB)"))
        yield engine
    finally:
        await engine.dispose()


def run(tx: Transaction, sql: str, *values: Any) -> None:
    tx.run(sql, *values)


async def insert(engine: Database, times: int) -> None:
    for _ in range(times):
        await engine.write(lambda tx: run(tx, "INSERT INTO numbers (data) VALUES (?)", bytes(PAGE_SIZE)))


def pages_of(path: str | Path) -> float:
    return os.path.getsize(path) / PAGE_SIZE


def may_write(path: str | Path, timeout: float = 0) -> bool:
    """Whether another connection can begin to write at this moment, or soon."""
    with closing(sqlite3.connect(path, timeout=timeout, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


async def test_nobody_else_writes_while_the_log_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "run.db", []

    def copy(connection: sqlite3.Connection) -> int:
        seen.append(may_write(path))
        return checkpoint_wal(connection)

    monkeypatch.setattr(sqlite, "checkpoint_wal", copy)
    async with opened(path) as engine:
        await insert(engine, 3 * PAGES)
    assert seen
    assert not any(seen)


async def test_no_connection_copies_the_log_by_itself(tmp_path: Path) -> None:
    def pragma(tx: Transaction) -> int:
        return int(tx.run("PRAGMA wal_autocheckpoint")[0][0])

    async with opened(tmp_path / "run.db") as engine:
        assert await engine.write(pragma) == 0
        assert await engine.read(pragma) == 0
        async with engine.transaction(write=True) as steps:
            assert await steps.run(pragma) == 0


async def test_the_log_begins_anew_while_somebody_writes_without_a_pause(tmp_path: Path) -> None:
    path, logs, count = tmp_path / "run.db", set(), 0
    async with opened(path) as engine, asyncio.timeout(60):
        while len(logs) < 4:
            await insert(engine, PAGES)
            count += PAGES
            logs.add(salts_at(f"{path}-wal", 1))
        rows = await engine.read(lambda tx: tx.run("SELECT count(*) FROM numbers")[0][0])
        assert rows == count


async def test_a_log_that_can_not_be_copied_is_copied_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failures = tmp_path / "run.db", 2

    def copy(connection: sqlite3.Connection) -> int:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise sqlite3.OperationalError("disk I/O error")
        return checkpoint_wal(connection)

    monkeypatch.setattr(sqlite, "checkpoint_wal", copy)
    async with opened(path) as engine, asyncio.timeout(60):
        while pages_of(path) <= PAGES:
            await insert(engine, PAGES)
    assert failures < 0


async def test_a_reader_that_holds_the_log_back_does_not_hold_up_writers(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with opened(path) as engine:
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM numbers").fetchone() == (0,)
            await asyncio.wait_for(insert(engine, 8 * PAGES), 60)
            assert reader.execute("SELECT count(*) FROM numbers").fetchone() == (0,)
        await insert(engine, 4 * PAGES)
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("SELECT count(*) FROM numbers").fetchone() == (12 * PAGES,)


async def test_no_copy_begins_while_an_engine_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is about to be closed; and whoever closes it waits for the one that is under way."""
    closing_began, copies = False, []

    def copy(connection: sqlite3.Connection) -> int:
        copies.append(closing_began)
        return checkpoint_wal(connection)

    monkeypatch.setattr(sqlite, "checkpoint_wal", copy)
    async with opened(tmp_path / "run.db") as engine:
        await insert(engine, 2 * PAGES)
        writing = asyncio.create_task(insert(engine, 8 * PAGES))
        await asyncio.sleep(0)
        closing_began = True
        await asyncio.wait_for(asyncio.gather(engine.dispose(), writing), 60)
    assert copies.count(True) <= 1


def test_the_pages_of_a_log_are_known_by_their_salts(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    log = f"{path}-wal"
    assert salts_at(log, 1) is None
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("CREATE TABLE numbers (data BLOB)")
        connection.execute("INSERT INTO numbers VALUES (zeroblob(100000))")
        pages = connection.execute("PRAGMA wal_checkpoint").fetchone()[1]
        before = salts_at(log, pages)
        assert before is not None
        assert before == salts_at(log, 1)
        assert salts_at(log, pages + 1) is None
        connection.execute("INSERT INTO numbers VALUES (1)")  # in a new log, over the old one
        assert salts_at(log, 1) not in (None, before)
        assert salts_at(log, pages) is None
