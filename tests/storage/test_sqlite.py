"""The thread of a SQLite database's connection, and the copying of its log."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from replaybuf.errors import UnreachableError
from replaybuf.storage.sql import lifecycle
from replaybuf.storage.sql.engine import open_database, sqlite
from replaybuf.storage.sql.engine.database import Access, Database
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase, checkpoint_wal
from replaybuf.storage.sql.engine.sqlite_connection import PAGE_SIZE, SqliteConnection, connect
from replaybuf.storage.sql.engine.sqlite_dialect import SqliteTransaction, of_rows
from replaybuf.storage.sql.engine.sqlite_raw import patiently
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.tasks.group_commit import GroupCommit
from replaybuf.storage.sql.tasks.sweeper import Sweeper
from tests.stores import build, fill, until


@pytest.fixture
async def connection() -> AsyncIterator[SqliteConnection]:
    connection = SqliteConnection(partial(connect, Access(make_url("sqlite://"))))
    await connection.open()
    yield connection
    await connection.close()


async def test_functions_run_in_one_thread_that_does_not_keep_the_process_alive(connection: SqliteConnection) -> None:
    [thread] = {await connection.in_thread(threading.current_thread) for _ in range(3)}
    assert thread.daemon
    assert thread is not threading.current_thread()


INSERT = "INSERT INTO t AS own (a, b, c) VALUES (?1, ?2, 3)"
ADD = f"{INSERT} ON CONFLICT (a) DO UPDATE SET b = own.b + excluded.b"


@pytest.mark.parametrize("sql", [INSERT, ADD, "UPDATE t SET b = ?2 WHERE a = ?1"])
@pytest.mark.parametrize("count", [1, 4, 15, 16, 57])
def test_many_rows_are_written_as_one_by_one(sql: str, count: int) -> None:
    rows = [(n, None if n % 3 else f"({n}, ?)") for n in range(count)]
    tables = []
    for together in (True, False):
        with closing(connect(Access(make_url("sqlite://")))) as raw:
            raw.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b, c)")
            if sql is not INSERT:
                raw.executemany(INSERT, [(n, 1) for n, _ in rows])
            tx = SqliteTransaction(raw)
            tx.run_many(sql, rows) if together else raw.executemany(sql, rows)
            tables.append(raw.execute("SELECT * FROM t ORDER BY a").fetchall())
    assert tables[0] == tables[1]
    assert len(tables[0]) == count


@pytest.mark.parametrize(
    ("size", "kind", "count"), [(10, bytes, 1), (900_000, bytes, 4), (900_000, bytearray, 4), (1_100_000, bytes, 16)]
)
def test_a_statement_has_at_most_four_megabytes_of_rows_and_large_rows_have_one_each(
    size: int, kind: type[bytes | bytearray], count: int
) -> None:
    """`sqlite3` keeps copies of the values until the statement is run again."""
    with closing(connect(Access(make_url("sqlite://")))) as raw:
        raw.execute("CREATE TABLE t (a, b, c)")
        statements: list[str] = []
        raw.set_trace_callback(lambda sql: statements.append(sql[:20]))
        SqliteTransaction(raw).run_many(INSERT, [(n, kind(size)) for n in range(16)])
        assert len(statements) == count


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE t SET a = ?1",
        "INSERT INTO t (a, b) VALUES (?2, ?1)",
        "INSERT INTO t (a, b) VALUES (?1, ?1)",
        "INSERT INTO t (a) VALUES (json(?1))",
        "INSERT INTO t (a) VALUES (?1) ON CONFLICT DO UPDATE SET a = ?1",
        "INSERT INTO t (a) SELECT ?1",
    ],
)
def test_only_inserts_of_parameters_in_order_write_several_rows(sql: str) -> None:
    assert of_rows(sql, 4) is None


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


async def test_a_read_that_outlasts_closing_leaves_no_connection(tmp_path: Path) -> None:
    engine = open_database(Access(make_url(f"sqlite:///{tmp_path}/run.db"), lock_timeout=5))
    assert isinstance(engine, SqliteDatabase)
    await engine.write(lambda tx: run(tx, "CREATE TABLE numbers (id INTEGER)"))
    async with engine.connections.lend():
        await engine.dispose()
    assert os.listdir(tmp_path) == ["run.db"]


def test_a_locked_database_is_asked_again_until_the_time_is_over() -> None:
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    answers = [locked, locked, None]

    def ask() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    patiently(ask, 5)
    assert answers == []
    for answers in ([sqlite3.OperationalError("no such table")] * 2, [locked] * 1000):
        with pytest.raises(sqlite3.OperationalError):
            patiently(ask, 0.02)
        assert answers


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
    path, answers = tmp_path / "run.db", []

    def copy(connection: sqlite3.Connection) -> None:
        answers.append(may_write(path))
        checkpoint_wal(connection)

    monkeypatch.setattr(sqlite, "checkpoint_wal", copy)
    async with opened(path) as engine:
        await insert(engine, 3 * PAGES)
    assert answers
    assert not any(answers)


async def test_no_connection_copies_the_log_by_itself(tmp_path: Path) -> None:
    def pragma(tx: Transaction) -> int:
        return int(tx.run("PRAGMA wal_autocheckpoint")[0][0])

    async with opened(tmp_path / "run.db") as engine:
        assert await engine.write(pragma) == 0
        assert await engine.read(pragma) == 0
        async with engine.transaction(write=True) as step:
            assert await step(pragma) == 0


async def test_a_transaction_that_is_cancelled_while_it_begins_is_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with opened(path) as engine:

        async def run_steps() -> None:
            async with engine.transaction(write=True):
                pass

        await insert(engine, 1)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            steps = asyncio.create_task(run_steps())
            await until(lambda: not engine._writer.idle)  # type: ignore[attr-defined]
            steps.cancel()
            other.execute("ROLLBACK")
        await asyncio.wait([steps])
        assert steps.cancelled()
        await insert(engine, 1)
        assert may_write(path)


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
    assert copies
    assert copies.count(True) <= 1


PUTS_AND_TAKES = """
import asyncio, os, sys
from replaybuf import ReplayBufferConfig, RolloutState, Status

def group():
    return [RolloutState(message=[], response_ids=[*range(200)], reward=1.0, status=Status.COMPLETED)]

async def main():
    async with ReplayBufferConfig(url=sys.argv[1]).build() as buffer:
        before = os.stat(os.environ["SQLITE_TMPDIR"]).st_mtime_ns
        for _ in range(3):
            await asyncio.gather(*(buffer.put(group(), "math") for _ in range(128)))
            await buffer.take_batch({"math": 64}, timeout=60)
        print(os.stat(os.environ["SQLITE_TMPDIR"]).st_mtime_ns - before)

asyncio.run(main())
"""


def test_puts_and_takes_make_no_temporary_files(tmp_path: Path) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", PUTS_AND_TAKES, f"sqlite:///{tmp_path}/run.db"]
    environment = {**os.environ, "SQLITE_TMPDIR": str(temporary)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.stderr) == ("0\n", "")


@pytest.mark.parametrize(("step", "seconds"), [((Sweeper, "stop"), 60), ((GroupCommit, "close"), 0.1)])
async def test_closing_ends_work_that_never_ends_and_then_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], seconds: float
) -> None:
    """As at a server that stands still."""

    async def stand_still(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(lifecycle, "_CLOSE_SECONDS", seconds)
    monkeypatch.setattr(lifecycle, "_ENDING_SECONDS", 0.01)
    monkeypatch.setattr(*step, stand_still)
    buffer = build(f"sqlite:///{tmp_path}/b.db")
    await fill(buffer, 1)
    with pytest.raises(UnreachableError) if step[0] is GroupCommit else nullcontext():
        await buffer.close()
    assert os.listdir(tmp_path) == ["b.db"]
