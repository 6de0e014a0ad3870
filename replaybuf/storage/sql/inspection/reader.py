"""Opens a database for reading: creates and writes nothing, and holds no lock for long.

A reader runs one function in one read transaction, which ends before anything is printed. On SQLite the transaction
imports SQLAlchemy, which takes longer than common reads do, only for queries.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from replaybuf.common.redact import redact
from replaybuf.errors import AccessError, ConfigError, LockedError, UnreachableError
from replaybuf.storage.sql.engine.sqlite_dialect import SqliteTransaction
from replaybuf.storage.sql.engine.sqlite_files import check_version, quiet_state, translate_sqlite
from replaybuf.storage.sql.engine.sqlite_raw import RawConnection
from replaybuf.storage.sql.engine.transaction import Transaction as Transaction
from replaybuf.storage.sql.schema import check_schema, no_tables_error

if TYPE_CHECKING:
    from sqlalchemy.engine import URL


T = TypeVar("T")

#: Seconds to wait for a lock; readers block only on SQLite databases that aren't in WAL mode.
LOCK_TIMEOUT = 10.0
_STEPS_BETWEEN_CHECKS = 20_000
# File paths, and file URLs, that need no parser.
_PLAIN_PATH = re.compile(r"(?:sqlite:///)?[A-Za-z0-9_./+~ -]+")


def open_reader(url: str) -> Reader:
    """Return the reader of a URL, or of the SQLite file at a path. Doesn't connect yet.

    Raises ConfigError, and UnreachableError when the file doesn't exist.
    """
    if _PLAIN_PATH.fullmatch(url):
        return _sqlite_reader(url, os.path.expanduser(url.removeprefix("sqlite:///")))
    from replaybuf.storage.sql.engine.urls import is_memory, public_url, url_or_path

    parsed = url_or_path(url)
    if parsed.get_backend_name() != "sqlite":
        return PostgresReader(url, public_url(parsed))
    if is_memory(parsed):
        raise ConfigError("a SQLite database in memory lives in the process that made it; nobody else can look into it")
    return _sqlite_reader(url, parsed.database or "", public_url(parsed))


def _sqlite_reader(url: str, database: str, where: str | None = None) -> Reader:
    where, path = where or f"sqlite:///{database}", Path(database)
    if os.path.isdir(path):
        raise UnreachableError(f"{redact(str(path))} is a folder; give the database file in it")
    if not os.path.exists(path):
        raise UnreachableError(f"there is no database {where} (file {redact(str(path.absolute()))})")
    return SqliteReader(url, where, path.absolute())


class Reader(ABC):
    """Runs functions in read transactions of a database.

    `where` is its URL without password, `path` the path of a SQLite file.
    """

    def __init__(self, url: str, where: str, path: Path | None = None) -> None:
        self._given_url = url
        self.where = where
        self.path = path

    @cached_property
    def url(self) -> URL:
        from replaybuf.storage.sql.engine.urls import url_or_path

        return url_or_path(self._given_url)

    def read(self, function: Callable[[Transaction], T], *, timeout: float | None = None) -> T:
        """Run `function(tx)` in a read-only transaction, and roll it back.

        Raises StorageError for a database that isn't one of this version of replaybuf, and LockedError after `timeout`
        seconds.
        """

        def checked(tx: Transaction) -> T:
            if not check_schema(tx, self.where):
                raise no_tables_error(self.where)
            return function(tx)

        return self.read_any(checked, timeout=timeout)

    @abstractmethod
    def read_any(self, function: Callable[[Transaction], T], *, timeout: float | None = None) -> T:
        """Like `read`, but in any database, without a check of its schema."""


class SqliteReader(Reader):
    """A SQLite file, opened read-only.

    Without a WAL the file is read as immutable, which leaves no files behind and works in a read-only folder. If
    another process wrote meanwhile, the read is repeated as an ordinary WAL reader, which blocks no writer.
    """

    def __init__(self, url: str, where: str, path: Path) -> None:
        self._path = path
        super().__init__(url, where, path)

    def read_any(self, function: Callable[[Transaction], T], *, timeout: float | None = None) -> T:
        if not os.access(self._path, os.R_OK):
            if not os.path.exists(self._path) and os.access(self._path.parent, os.X_OK):
                raise UnreachableError(f"there is no database {self.where} (file {redact(str(self._path))})")
            raise AccessError(f"{self.where} can't be read: check the permissions of the file")
        quiet = quiet_state(self._path)
        if quiet is not None:
            try:
                result = self._read(function, timeout, immutable=True)
            except Exception:
                if quiet_state(self._path) == quiet:
                    raise
            else:
                if quiet_state(self._path) == quiet:
                    return result
        return self._read(function, timeout, immutable=False)

    def _read(self, function: Callable[[Transaction], T], timeout: float | None, *, immutable: bool) -> T:
        clock = _Clock(timeout)
        try:
            with closing(self._connect(clock, immutable)) as connection:
                connection.execute("BEGIN")
                return function(SqliteTransaction(connection))
        except sqlite3.Error as error:
            if "interrupted" in str(error):
                clock.explain(error)
            raise translate_sqlite(error, self.where, str(self._path), LOCK_TIMEOUT) from error

    def _connect(self, clock: _Clock, immutable: bool) -> RawConnection:
        uri = f"file:{quote(os.fsencode(self._path))}?mode=ro{'&immutable=1' if immutable else ''}"
        check_version()
        connection = sqlite3.connect(uri, timeout=LOCK_TIMEOUT, isolation_level=None, factory=RawConnection, uri=True)
        connection.execute("PRAGMA query_only = ON")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # ATTACH and VACUUM INTO would create files
        connection.set_progress_handler(clock.is_over, _STEPS_BETWEEN_CHECKS)
        return connection


class _Clock:
    """Interrupts a SQLite statement after a timeout. As Python code, the handler also lets Ctrl-C through."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._started = time.monotonic()
        self._is_over = False

    def is_over(self) -> bool:
        self._is_over = self._timeout is not None and time.monotonic() - self._started > self._timeout
        return self._is_over

    def explain(self, error: Exception) -> None:
        """Raise the cause of an interrupted statement: the timeout, or Ctrl-C."""
        if self._is_over:
            raise LockedError(f"stopped after {self._timeout:g} s") from error
        raise KeyboardInterrupt from error


class PostgresReader(Reader):
    """A PostgreSQL database, in read-only transactions."""

    def read_any(self, function: Callable[[Transaction], T], *, timeout: float | None = None) -> T:
        import asyncio

        from replaybuf.storage.sql.engine.thread import KeepaliveLoop

        # At its end, a runner makes the repr of its task and so of the result, which may take seconds.
        results: list[T] = []

        async def read() -> None:
            results.append(await self._read(function, timeout))

        with asyncio.Runner(loop_factory=KeepaliveLoop) as runner:
            runner.run(read())
        return results[0]

    async def _read(self, function: Callable[[Transaction], T], timeout: float | None) -> T:
        import asyncio

        from replaybuf.storage.sql.engine import open_database
        from replaybuf.storage.sql.engine.database import Access

        def limited(tx: Transaction) -> T:
            if timeout is not None:
                if limit.when() is None:  # once connected
                    limit.reschedule(asyncio.get_running_loop().time() + timeout)
                # If this process is killed, the server stops. After a statement, nothing makes a transaction writable.
                milliseconds = str(round((timeout + 1) * 1000))
                tx.tuples("SELECT set_config('statement_timeout', :time, true)", time=milliseconds)
            return function(tx)

        engine = open_database(Access(self.url, lock_timeout=LOCK_TIMEOUT, read_only=True))
        limit = asyncio.timeout(None)
        try:
            async with limit:
                return await engine.read(limited)
        except TimeoutError as error:
            if limit.expired():
                raise LockedError(f"stopped after {timeout:g} s") from error
            raise
        finally:
            await engine.dispose()
