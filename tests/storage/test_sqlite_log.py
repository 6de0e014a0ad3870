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
from replaybuf.storage.sql.engine.database import Access, Database
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.sqlite import checkpoint_wal
from replaybuf.storage.sql.engine.sqlite_connection import PAGE_SIZE
from replaybuf.storage.sql.engine.transaction import Transaction

PAGES = 32


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is copied after a few pages; nothing waits for the disk, which may take as long as hundreds of writes."""
    monkeypatch.setattr(sqlite, "_COMMITS", PAGES)
    monkeypatch.setattr(sqlite, "sync_wal", lambda path: None)
    monkeypatch.setattr(sqlite, "checkpoint_wal", copy_unflushed)


def copy_unflushed(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA synchronous = OFF")
    checkpoint_wal(connection)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Database]:
    engine = open_database(Access(make_url(f"sqlite:///{path}"), lock_timeout=5))
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


def salts_of(log: Path) -> bytes:
    return log.read_bytes()[16:24]


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

    def copy(connection: sqlite3.Connection) -> None:
        seen.append(may_write(path))
        checkpoint_wal(connection)

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
            logs.add(await asyncio.to_thread(salts_of, Path(f"{path}-wal")))
        rows = await engine.read(lambda tx: tx.run("SELECT count(*) FROM numbers")[0][0])
        assert rows == count


async def test_few_large_commits_are_copied_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_COMMITS", 1 << 30)
    monkeypatch.setattr(sqlite, "_GROWTH_BYTES", PAGES * PAGE_SIZE)
    path = tmp_path / "run.db"
    async with opened(path) as engine, asyncio.timeout(60):
        while pages_of(path) <= PAGES:
            await insert(engine, PAGES)


async def test_a_log_that_can_not_be_copied_is_copied_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failures = tmp_path / "run.db", 2

    def copy(connection: sqlite3.Connection) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise sqlite3.OperationalError("disk I/O error")
        checkpoint_wal(connection)

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

    def copy(connection: sqlite3.Connection) -> None:
        copies.append(closing_began)
        checkpoint_wal(connection)

    monkeypatch.setattr(sqlite, "checkpoint_wal", copy)
    async with opened(tmp_path / "run.db") as engine:
        await insert(engine, 2 * PAGES)
        writing = asyncio.create_task(insert(engine, 8 * PAGES))
        await asyncio.sleep(0)
        closing_began = True
        await asyncio.wait_for(asyncio.gather(engine.dispose(), writing), 60)
    assert copies.count(True) <= 1
