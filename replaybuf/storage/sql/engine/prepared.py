"""Statements of the hot paths: built by SQLAlchemy once, then run by the driver with plain tuples.

SQLAlchemy takes longer to look up a statement in its cache, to convert parameters and to wrap rows than SQLite takes to
run it. These statements are compiled once for each kind of database, so that a call costs what the driver costs.
"""

from __future__ import annotations

import gc
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, bindparam, insert

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.dialect import Dialect

Row = Sequence[Any]


class Prepared:
    """A statement with the parameters `names`: a `bindparam` each.

    `build(dialect)` returns the statement. Values are given in the order of the names, as the driver takes them: JSON
    as text, lists as `Dialect.listed` returns them. Rows are the driver's: JSON as
    text or parsed, booleans perhaps as integers.
    """

    __slots__ = ("_build", "_forms", "_names")

    def __init__(self, build: Callable[[Dialect], Any], *names: str) -> None:
        self._build = build
        self._names = names
        self._forms: dict[Dialect, Form] = {}

    def form(self, dialect: Dialect, connection: Connection) -> Form:
        """Return the statement as the driver of this connection takes it."""
        form = self._forms.get(dialect)
        if form is None:
            form = self._forms[dialect] = Form.of(self._build(dialect), self._names, connection)
        return form


@dataclass(frozen=True, slots=True)
class Form:
    """A compiled statement; each of its places takes a given value, or has a fixed one.

    Without `places` the driver takes the values as they are given.
    """

    sql: str
    places: Sequence[tuple[int | None, Any]] = ()

    @classmethod
    def of(cls, statement: Any, names: Sequence[str], connection: Connection) -> Form:
        compiled = statement.compile(dialect=connection.dialect)
        order: Sequence[str] = compiled.positiontup or ()
        assert set(names) <= set(order), f"not all of {names} are in {compiled}"
        if list(order) == list(names):
            return cls(str(compiled))
        fixed = compiled.params
        return cls(str(compiled), [(names.index(one) if one in names else None, fixed.get(one)) for one in order])

    def values(self, given: Row) -> Row:
        """Return the driver's parameters for these values."""
        if not self.places:
            return given
        return tuple(fixed if place is None else given[place] for place, fixed in self.places)


@lru_cache(maxsize=1024)
def insertion(table: Table, filled: Sequence[bool]) -> Prepared:
    """Return the INSERT of the columns of a table that are `filled`; the values are in the order of its columns."""
    values: dict[Any, Any] = {column: bindparam(f"new_{column.key}") for column in compress(table.columns, filled)}
    return Prepared(lambda _: insert(table).values(values), *(one.key for one in values.values()))


class Driver:
    """Runs compiled statements on a connection: through SQLAlchemy, but without its parameters and rows."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fetch(self, sql: str, values: Row) -> Sequence[Row]:
        """Run a statement and return its rows, if it has any."""
        result = self._connection.exec_driver_sql(sql, tuple(values))
        return result.fetchall() if result.returns_rows else ()

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run a statement once for each row of values."""
        self._connection.exec_driver_sql(sql, list(rows))


class SqliteDriver(Driver):
    """Runs statements on a connection of `sqlite3` itself, whose transaction has begun."""

    __slots__ = ("_opened", "raw")

    def __init__(self, connection: Connection, raw: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.raw = raw
        self._opened = 0  # blobs, since the connection last forgot them

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        announce(self._connection, sql, values)
        return self.raw.execute(sql, values).fetchall()

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        announce(self._connection, sql, rows, many=True)
        self.raw.executemany(sql, rows)

    def read_blob(self, table: str, column: str, row: int) -> bytes | None:
        """Return the bytes in a column of the row with this number, or None when there are none."""
        self._opened += 1
        if self._opened > _MOST_OPENED:
            self._opened = 0
            _forget_blobs(self.raw)
        try:
            with self.raw.blobopen(table, column, row, readonly=True) as blob:
                return blob.read()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such row, or another type of value
                return None
            raise


#: Blobs that a connection may remember: 88 bytes each, which every full garbage collection goes through.
_MOST_OPENED = 1000


def _forget_blobs(raw: sqlite3.Connection) -> None:
    """Make a connection forget the blobs that are gone.

    Python's `sqlite3` keeps a weak reference to each one until the connection is closed (python/cpython#144424).
    """
    for kept in gc.get_referents(raw):
        if type(kept) is list:
            kept[:] = [one for one in kept if not isinstance(one, weakref.ref) or one() is not None]


def announce(connection: Connection, sql: str, values: Iterable[Any], *, many: bool = False) -> None:
    """Tell the listeners of SQLAlchemy's `before_cursor_execute`, which see no statement otherwise."""
    if connection._has_events or connection.engine._has_events:
        for listener in connection.dispatch.before_cursor_execute:
            listener(connection, None, sql, values, None, many)
