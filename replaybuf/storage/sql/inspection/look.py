"""Reading by the text of SQL: for the questions that people ask all day, and which take no import of SQLAlchemy."""

from __future__ import annotations

import json
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from replaybuf.storage.sql.engine.host_clock import since_start, this_start
from replaybuf.storage.sql.schema.revisions import VERSION_TABLE

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction

Table = tuple[list[str], list[tuple[Any, ...]]]

_JSON = ("tags", "rewards", "wants", "limits", "uids", "data")
_TIMES = (
    *("created_at", "leased_until", "archived_at", "oldest", "newest", "taken_at", "since", "until", "deadline"),
    *("seen_at", "last_seen", "started_at", "ended_at", "happened_at"),
)


def time_of(seconds: float | None) -> datetime | None:
    """Return a time that is given in seconds since the epoch."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


class Look(ABC):
    """A transaction that reads. Statements are texts with parameters `:name`, and so the same for both databases."""

    dialect: Literal["sqlite", "postgresql"]

    @staticmethod
    def over(tx: Transaction) -> Look:
        """Return the look of a transaction that runs, for those who need SQLAlchemy besides."""
        return _OfTransaction(tx)

    @abstractmethod
    def table(self, statement: str, /, **values: Any) -> Table:
        """Run a statement; return the names of its columns (none if it returns no rows) and its rows."""

    def rows(self, statement: str, /, **values: Any) -> list[dict[str, Any]]:
        """Run a statement and return its rows, with the same Python types from both databases (`tidy`)."""
        names, found = self.table(statement, **values)
        return [tidy(dict(zip(names, row, strict=True))) for row in found]

    def value(self, statement: str, /, **values: Any) -> Any:
        """Run a statement and return the first value of its first row; None when there is no row."""
        _, found = self.table(statement, **values)
        return found[0][0] if found else None

    def revision(self) -> str | None:
        """Return the revision of the schema, None where there is none."""
        return self.value("SELECT version_num FROM rb_version") if self._is_ours() else None

    @abstractmethod
    def _is_ours(self) -> bool:
        """Return whether there is the table with the revision."""

    @abstractmethod
    def seconds(self) -> float:
        """Return the time of the store's clock, which decides when leases end, in seconds since the epoch."""

    def now(self) -> datetime:
        """Return the time of the store's clock."""
        return datetime.fromtimestamp(self.seconds(), UTC)

    @abstractmethod
    def database_bytes(self) -> int:
        """Return the size of the database on disk."""


class SqliteLook(Look):
    """A look at a SQLite database, by the driver of the standard library."""

    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def table(self, statement: str, /, **values: Any) -> Table:
        cursor = self._connection.execute(statement, values or ())
        return [name for name, *_ in cursor.description or ()], cursor.fetchall()

    def _is_ours(self) -> bool:
        return bool(self.value("SELECT count(*) FROM sqlite_master WHERE name = :name", name=VERSION_TABLE))

    def seconds(self) -> float:
        name = this_start()
        start = None if name is None else self.value("SELECT value FROM rb_info WHERE name = :name", name=name)
        return time.time() if start is None else float(start) + since_start()

    def database_bytes(self) -> int:
        path = self.value("SELECT file FROM pragma_database_list WHERE name = 'main'")
        beside = (Path(f"{path}{suffix}") for suffix in ("", "-wal"))
        return sum(file.stat().st_size for file in beside if file.exists())


class _OfTransaction(Look):
    """A look by way of a transaction of SQLAlchemy's: on PostgreSQL there is no other."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.dialect = "sqlite" if tx.dialect.name == "sqlite" else "postgresql"

    def table(self, statement: str, /, **values: Any) -> Table:
        from sqlalchemy import text

        if values:
            result = self._tx.connection.execute(text(statement), values)
        else:
            result = self._tx.connection.exec_driver_sql(statement)
        if not result.returns_rows:
            return [], []
        return list(result.keys()), [tuple(row) for row in result.fetchall()]

    def _is_ours(self) -> bool:
        from replaybuf.storage.sql.schema.create import current_revision

        return current_revision(self._tx.connection) is not None

    def seconds(self) -> float:
        return self._tx.dialect.clock(self._tx)

    def database_bytes(self) -> int:
        return self._tx.dialect.database_bytes(self._tx.connection)


def tidy(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a view with the same Python types from both databases."""
    values = dict(row)
    for name, value in values.items():
        if isinstance(value, Decimal):
            values[name] = int(value) if value == value.to_integral_value() else float(value)
        elif isinstance(value, str) and name in _JSON:
            values[name] = json.loads(value)
        elif isinstance(value, str) and name in _TIMES:
            values[name] = datetime.fromisoformat(value).replace(tzinfo=UTC)
    return values
