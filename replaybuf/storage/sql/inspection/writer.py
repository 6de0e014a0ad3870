"""Opening a database to mend or upgrade it, without other writers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.opening import open_engine
from replaybuf.storage.sql.engine.port import Engine
from replaybuf.storage.sql.engine.sqlite import SqliteEngine
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader

T = TypeVar("T")

_LOCK_TIMEOUT = 30.0
_LOG_TIMEOUT_MS = 2000


@contextmanager
def open_writer(reader: Reader) -> Iterator[Writer]:
    """Yield a writer for the database of a reader. Opening a SQLite file for writing changes its journal."""
    with asyncio.Runner() as runner:
        engine = open_engine(reader.url, durability="full", lock_timeout=_LOCK_TIMEOUT)
        try:
            yield Writer(engine, runner)
        finally:
            runner.run(engine.dispose())


class Writer:
    """Runs functions in write transactions of a database, each whole or not at all, while nobody else writes."""

    def __init__(self, engine: Engine, runner: asyncio.Runner) -> None:
        self._engine, self._runner = engine, runner

    def write(self, function: Callable[[Transaction], T]) -> T:
        """Run `function(tx)` in a transaction, commit it, and return the result."""
        return self._runner.run(self._engine.write(function, alone=True))

    def empty_log(self) -> bool:
        """Copy a SQLite file's log into the file and restart it; return False while another process reads from it."""
        assert isinstance(self._engine, SqliteEngine)
        return self._runner.run(_empty_log(self._engine))


async def _empty_log(engine: SqliteEngine) -> bool:
    def work(connection: sqlite3.Connection) -> bool:
        connection.execute(f"PRAGMA busy_timeout = {_LOG_TIMEOUT_MS}")
        return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    with translated(engine.url, engine.lock_timeout):
        async with engine.pool.connect() as connection:
            pooled = await connection.get_raw_connection()
            driver: Any = pooled.driver_connection
            return bool(await driver.in_thread(work))
