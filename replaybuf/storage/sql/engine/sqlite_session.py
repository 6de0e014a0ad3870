"""One connection to SQLite, and the whole transactions that are run on it, by one thread at a time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy
from sqlalchemy import StaticPool

from replaybuf.storage.sql.engine.forks import BETWEEN_FORKS
from replaybuf.storage.sql.engine.port import Function
from replaybuf.storage.sql.engine.prepared import SqliteDriver
from replaybuf.storage.sql.engine.sqlite_connections import JSON_OPTIONS
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE
from replaybuf.storage.sql.engine.sqlite_files import OpenFiles
from replaybuf.storage.sql.engine.transaction import Scope, Transaction

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005


class Session:
    """A `sqlite3` connection, with a SQLAlchemy connection over it for the statements that aren't prepared."""

    def __init__(self, raw: sqlite3.Connection, files: OpenFiles) -> None:
        self._files = files
        self._raw = raw
        engine = sqlalchemy.create_engine(
            "sqlite://", creator=lambda: raw, poolclass=StaticPool, pool_reset_on_return=None, **JSON_OPTIONS
        )
        self._connection = engine.connect()
        self._driver = SqliteDriver(self._connection, raw)

    def transact(self, function: Function[T], scope: Scope, *, write: bool, patience: float = 0.0) -> T:
        """Run a transaction and return its result; wait for the write lock for up to `patience` seconds."""
        self._files.check()
        with BETWEEN_FORKS, self._files.read():
            self._begin(write, patience)
            try:
                result = function(Transaction(self._connection, SQLITE, scope, self._driver))
                self._commit()
            except BaseException:
                self._roll_back()
                raise
            return result

    def outside(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Return `function(connection)`, which is run outside any transaction."""
        self._files.check()
        with BETWEEN_FORKS:
            return function(self._raw)

    def _begin(self, write: bool, patience: float) -> None:
        # A read transaction that turns into a write fails at once when another connection has written in between,
        # whatever the busy timeout; so write transactions say so at the start.
        statement = "BEGIN IMMEDIATE" if write else "BEGIN"
        deadline, pause = time.monotonic() + patience, _FIRST_PAUSE
        while True:
            try:
                self._driver.fetch(statement)
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    def _commit(self) -> None:
        if self._connection.in_transaction():  # SQLAlchemy's, which begins with its first statement
            self._connection.commit()
        else:
            self._connection.dialect.do_commit(self._connection.connection)

    def _roll_back(self) -> None:
        if self._connection.get_transaction() is not None:  # an inactive one, too, after a commit that failed
            self._connection.rollback()
        if self._raw.in_transaction:
            self._raw.rollback()


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another connection held a lock."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
