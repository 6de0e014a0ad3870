"""Connections to SQLite through aiosqlite: their settings, and the check of the files before each use."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
from pydantic_core import from_json, to_json
from sqlalchemy import event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, StaticPool

from replaybuf.storage.sql.engine.sqlite_files import OpenFiles
from replaybuf.storage.sql.engine.sqlite_log import LONG_PAGES
from replaybuf.storage.sql.engine.sqlite_uri import quote_path
from replaybuf.storage.sql.engine.urls import is_memory

T = TypeVar("T")

#: 16 KiB pages: 100 KB payloads are written at 1.3 times the rate with 4 KiB pages (`benchmarks/README.md`).
PAGE_SIZE = 16 * 1024
#: Pages of a write-ahead log that are kept for the next one.
_LOG_PAGES = 4 * LONG_PAGES
CACHE_KIB = 16 * 1024

JSON_OPTIONS: dict[str, Any] = {
    "json_serializer": lambda value: to_json(value).decode(),
    "json_deserializer": from_json,
}


class ThreadedConnection(aiosqlite.Connection):
    """An aiosqlite connection that can also run a function of its `sqlite3` connection in its thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(lambda: sqlite3.connect(*args, **options), iter_chunk_size=64)
        self.worker: threading.Thread = getattr(self, "_thread", self)  # type: ignore[arg-type]
        self.worker.daemon = True
        self._sent = self._done = 0  # each counted by one thread

    @property
    def raw(self) -> sqlite3.Connection:
        """The connection of `sqlite3`; other threads may use it while this is idle."""
        return self._conn

    @property
    def idle(self) -> bool:
        """Whether nothing runs in the connection's thread, not even for callers that were cancelled."""
        return self._sent == self._done

    async def in_thread(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run `function(connection)` in the connection's thread."""
        result: list[T] = []  # which the thread, until it is called again, would keep alive if it were returned

        def call() -> None:
            try:
                result.append(function(self._conn))
            finally:
                self._done += 1

        execute: Callable[..., Awaitable[None]] = self._execute
        self._sent += 1
        await execute(call)
        return result.pop()


class Workers:
    """The threads of a pool's connections."""

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def open(self, *args: Any, **options: Any) -> ThreadedConnection:
        connection = ThreadedConnection(*args, **options)
        self._threads.add(connection.worker)
        return connection

    async def ended(self, timeout: float) -> None:
        """Return when all have ended, or after `timeout` seconds; the connections were closed.

        The thread of a connection whose opening or closing was cancelled goes on for a moment, and would then answer a
        loop that has been closed.
        """
        deadline = time.monotonic() + timeout
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def sqlite_pool(url: URL, *, durability: str, lock_timeout: float, read_only: bool, workers: Workers) -> AsyncEngine:
    """Return SQLAlchemy's engine for a SQLite URL. Connects to nothing yet."""
    memory = is_memory(url)
    options: dict[str, Any] = {
        "timeout": lock_timeout,
        "isolation_level": None,
        "check_same_thread": False,
        "async_creator_fn": workers.open,
    }
    if read_only and not memory:
        path = Path(url.database or "").absolute()
        url = url.set(database=f"file:{quote_path(path)}", query={"mode": "ro", "uri": "true"})
    pool: dict[str, Any] = {"poolclass": StaticPool}
    if not memory:
        pool = {"poolclass": AsyncAdaptedQueuePool, "pool_size": 6, "max_overflow": 2, "pool_timeout": lock_timeout}
    # Every transaction is ended explicitly, so connections need no rollback when they return to the pool.
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

    return engine


def _patiently(function: Callable[[], object], seconds: float) -> None:
    """Call the function, repeatedly while the database is locked, for up to `seconds`.

    When several processes create a new database at once, all but the first to switch it to WAL fail immediately: SQLite
    doesn't wait there, whatever its timeout.
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
        "wal_autocheckpoint = 0",  # see `sqlite_log`
        # Some builds overwrite deleted content with zeros; FAST does so only where it costs no extra writing.
        "secure_delete = FAST",
        f"journal_size_limit = {_LOG_PAGES * PAGE_SIZE}",
    ]
