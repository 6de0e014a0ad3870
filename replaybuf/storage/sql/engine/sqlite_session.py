"""Statements and whole transactions on a connection of `sqlite3`, by one thread at a time."""

from __future__ import annotations

import gc
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE
from replaybuf.storage.sql.engine.sqlite_files import OpenFiles
from replaybuf.storage.sql.engine.transaction import (
    HOOKS,
    Row,
    Scope,
    Session,
    Transaction,
    after_commit,
    on_commit,
    on_statement,
)

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.database import Function

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005


class SqliteSession(Session):
    """Runs statements and whole transactions on a connection of `sqlite3`; one thread at a time."""

    dialect = SQLITE

    def __init__(self, raw: sqlite3.Connection, files: OpenFiles | None = None) -> None:
        self.raw = raw
        self._files = files or OpenFiles(None)
        self._opened = 0  # blobs, since the last `_forget_blobs`

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        if HOOKS:
            on_statement(sql, values)
        return self.raw.execute(sql, values).fetchall()

    def change(self, sql: str, values: Row = ()) -> int:
        on_statement(sql, values)
        return self.raw.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        on_statement(sql, rows, many=True)
        self.raw.executemany(sql, rows)

    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        on_statement(sql, values)
        cursor = self.raw.execute(sql, values)
        return [name for name, *_ in cursor.description or ()], cursor.fetchall()

    def read_blob(self, table: str, column: str, row: int, at: int = 0, size: int = -1) -> bytes | None:
        """Return the blob in a column of the row with this rowid, or None if there is none.

        Given an offset `at` and a `size`, only that range, cut at the end of the blob.
        """
        self._opened += 1
        if self._opened > _MOST_OPENED:
            self._opened = 0
            _forget_blobs(self.raw)
        try:
            with self.raw.blobopen(table, column, row, readonly=True) as blob:
                blob.seek(min(at, len(blob)))
                return blob.read(size)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such row, or another type of value
                return None
            raise

    # Transactions

    def transact(self, function: Function[T], scope: Scope, *, write: bool, patience: float = 0.0) -> T:
        """Run a transaction and return its result; wait for the write lock for up to `patience` seconds."""
        self._files.check()
        with FORK_GUARD, self._files.read():
            self.begin(write=write, patience=patience)
            try:
                result = function(Transaction(self, scope))
                self.commit()
            except BaseException:
                self.roll_back()
                raise
            return result

    def begin(self, *, write: bool, patience: float = 0.0) -> None:
        """Begin a transaction."""
        # A read transaction that is upgraded to a write fails at once when another connection has written in between,
        # whatever the busy timeout; so write transactions begin with BEGIN IMMEDIATE.
        patiently(partial(self.change, "BEGIN IMMEDIATE" if write else "BEGIN"), patience)

    def commit(self) -> None:
        """Commit the transaction."""
        self._files.confirm()
        on_commit()
        self.raw.commit()
        after_commit()

    def roll_back(self) -> None:
        """Roll the transaction back, unless SQLite already has."""
        if self.raw.in_transaction:
            self.raw.rollback()


#: Weak references to blobs that a connection may keep: 88 bytes each, traversed by every full garbage collection.
_MOST_OPENED = 1000


def _forget_blobs(raw: sqlite3.Connection) -> None:
    """Delete a connection's dead weak references to closed blobs.

    Python's `sqlite3` keeps one for each blob until the connection is closed (python/cpython#144424).
    """
    for kept in gc.get_referents(raw):
        if type(kept) is list:
            kept[:] = [one for one in kept if not isinstance(one, weakref.ref) or one() is not None]


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another connection held a lock."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def patiently(function: Callable[[], object], seconds: float) -> None:
    """Call the function, and retry while another connection holds a lock, for up to `seconds`.

    When several processes create a database at once, all but the first to switch it to WAL fail immediately: SQLite
    ignores the busy timeout there.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            function()
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)


# Forks wait for calls of SQLite, and these for forks: a forked process inherits SQLite's in-memory record of the file
# locks, but not the locks themselves, so a transaction that was open in another thread would seem to be open in the
# child for ever; and a mutex that another thread held, as opening and closing do, would never be free there.

#: The longest wait of a fork for running transactions. Afterwards it proceeds, and the child may see a locked database.
LONGEST_SECONDS = 10.0


class ForkGuard:
    """A context that blocks forks of the process, for at most `LONGEST_SECONDS`; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._forking = 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking, LONGEST_SECONDS)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def before(self) -> None:
        """Block new transactions and wait for running ones, before a fork."""
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._inside, LONGEST_SECONDS)

    def after_in_parent(self) -> None:
        """Let transactions begin again."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Reset: the child has one thread, and no transaction runs in it."""
        self.__init__()  # type: ignore[misc]


FORK_GUARD = ForkGuard()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=FORK_GUARD.before,
        after_in_parent=FORK_GUARD.after_in_parent,
        after_in_child=FORK_GUARD.after_in_child,
    )
