"""SQLite through aiosqlite: settings, and whole transactions run in the connection's own thread.

aiosqlite gives every connection a thread and sends it one call at a time. A transaction of eight calls would change
threads sixteen times, each time waiting for Python's interpreter lock when the training loop is busy; so a transaction
is sent as one call, and SQLAlchemy runs it there on the thread's `sqlite3` connection.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, StaticPool

from replaybuf.storage.sql.engine.sqlite_files import OpenFiles

T = TypeVar("T")

#: 16 KiB pages: 100 KB payloads are written at 1.3 times the rate of 4 KiB pages (`benchmarks/README.md`).
PAGE_SIZE = 16 * 1024
#: The write-ahead log is copied into the database whenever it has grown by this many pages (16 MiB).
CHECKPOINT_PAGES = 1024
CACHE_KIB = 16 * 1024

JSON_OPTIONS: dict[str, Any] = {
    "json_serializer": lambda value: to_json(value).decode(),
    "json_deserializer": from_json,
}


class ThreadedConnection(aiosqlite.Connection):
    """An aiosqlite connection that can also run a function of its `sqlite3` connection in its thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(lambda: sqlite3.connect(*args, **options), iter_chunk_size=64)
        thread: Any = getattr(self, "_thread", self)
        thread.daemon = True

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run `function(connection)` in the connection's thread."""
        execute: Callable[..., Awaitable[T]] = self._execute
        return await execute(function, self._conn)


def is_memory(url: URL) -> bool:
    """Whether the URL names a SQLite database in memory."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def is_wal(path: str | Path) -> bool:
    """Whether a file is a SQLite database with a write-ahead log, by its header. Nothing is opened by SQLite."""
    with open(path, "rb") as file:
        header = file.read(20)
    return header.startswith(b"SQLite format 3") and header[18:19] == b"\x02"


def sqlite_engine(url: URL, *, durability: str, lock_timeout: float, read_only: bool) -> AsyncEngine:
    """The async engine for a SQLite URL."""
    memory = is_memory(url)
    options: dict[str, Any] = {
        "timeout": lock_timeout,
        "isolation_level": None,
        "check_same_thread": False,
        "async_creator_fn": ThreadedConnection,
    }
    if read_only and not memory:
        path = Path(url.database or "").absolute()
        url = url.set(database=f"file:{quote_path(path)}", query={"mode": "ro", "uri": "true"})
    pool: dict[str, Any] = {"poolclass": StaticPool}
    if not memory:
        pool = {"poolclass": AsyncAdaptedQueuePool, "pool_size": 6, "max_overflow": 2, "pool_timeout": lock_timeout}
    # Every transaction ends by itself, so connections need no rollback when they go back to the pool.
    engine = create_async_engine(url, connect_args=options, pool_reset_on_return=None, **JSON_OPTIONS, **pool)

    files = OpenFiles(None if memory or read_only else url.database)
    event.listen(engine.sync_engine, "do_connect", lambda *_: files.before_opening())
    event.listen(engine.sync_engine, "close", lambda *_: files.closing())

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        with files.read():
            for pragma in _pragmas(durability, read_only):
                _patiently(partial(cursor.execute, f"PRAGMA {pragma}"), lock_timeout)
        cursor.close()
        record.info["replaybuf_files"] = files
        files.opened()

    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _patiently(function: Callable[[], object], seconds: float) -> None:
    """Call it again while the database is locked.

    Of several processes that make a new database at once, those that come second to switch it to WAL are told so at
    once: SQLite does not wait there, whatever its timeout.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            function()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _pragmas(durability: str, read_only: bool) -> list[str]:
    if read_only:
        return [f"cache_size = -{CACHE_KIB}", "query_only = ON"]
    return [
        f"cache_size = -{CACHE_KIB}",
        f"page_size = {PAGE_SIZE}",
        "journal_mode = WAL",
        f"synchronous = {'FULL' if durability == 'full' else 'NORMAL'}",
        f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        # Some builds overwrite what is deleted with zeros; FAST does so only where it costs no writing.
        "secure_delete = FAST",
        f"journal_size_limit = {4 * CHECKPOINT_PAGES * PAGE_SIZE}",
    ]


def quote_path(path: Path) -> str:
    """A path as it stands in a SQLite URI."""
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _begin(connection: Connection) -> None:
    # A read transaction that turns into a write fails at once when another connection has written in between, whatever
    # the busy timeout; so whoever is going to write says so at the start.
    write = connection.get_execution_options().get("replaybuf_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


async def run_transaction(connection: AsyncConnection, function: Callable[[Connection], T], *, write: bool) -> T:
    """Run `function(connection)` in a transaction, in the thread of the connection, and commit."""
    pooled = await connection.get_raw_connection()
    driver: Any = pooled.driver_connection

    def transaction(raw: sqlite3.Connection) -> T:
        files: OpenFiles = pooled.info["replaybuf_files"]
        files.check()
        engine = pooled.info.get("replaybuf_engine")
        if engine is None:
            engine = pooled.info["replaybuf_engine"] = _engine_over(raw)
        with files.read(), engine.connect() as inner:
            inner.execution_options(replaybuf_write=write)
            with inner.begin():
                return function(inner)

    result: T = await driver.run(transaction)
    return result


def _engine_over(raw: sqlite3.Connection) -> Engine:
    """A SQLAlchemy engine whose only connection is this one."""
    engine = create_engine(
        "sqlite://", creator=lambda: raw, poolclass=StaticPool, pool_reset_on_return=None, **JSON_OPTIONS
    )
    event.listen(engine, "begin", _begin)
    return engine
