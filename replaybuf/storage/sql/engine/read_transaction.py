"""Read transactions on textual SQL, the same for both databases.

Frequent read commands use only this module, without SQLAlchemy, whose import takes longer than their queries.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replaybuf.storage.sql.schema.revisions import VERSION_TABLE

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Scope, Transaction

Table = tuple[list[str], list[tuple[Any, ...]]]

_JSON = ("tags", "rewards", "wants", "limits", "uids", "data", "activity", "waits")
_TIMES = (
    *("created_at", "leased_until", "archived_at", "oldest", "newest", "taken_at", "since", "until", "deadline"),
    *("seen_at", "last_seen", "started_at", "ended_at", "happened_at"),
)


class ReadTransaction(ABC):
    """The argument of functions that read a database. Statements are SQL text with parameters `:name`."""

    __slots__ = ()

    @property
    @abstractmethod
    def dialect_name(self) -> str:
        """The kind of database: "sqlite" or "postgresql"."""

    @abstractmethod
    def table(self, statement: str, /, **values: Any) -> Table:
        """Run a statement; return its column names (none if it returns no rows) and its rows."""

    @abstractmethod
    def tuples(self, statement: str, /, **values: Any) -> Sequence[Sequence[Any]]:
        """Run a statement and return the driver's rows: JSON may be text, a boolean a number."""

    @abstractmethod
    def of(self, scope: Scope) -> Transaction:
        """Return the same transaction for SQLAlchemy statements about a buffer, such as compiled queries."""

    @abstractmethod
    def seconds(self) -> float:
        """Return the time of the store's clock, which decides when leases end, in seconds since the epoch."""

    def rows(self, statement: str, /, **values: Any) -> list[dict[str, Any]]:
        """Run a statement and return its rows, with the same Python types from both databases (`tidy`)."""
        names, found = self.table(statement, **values)
        return [tidy(dict(zip(names, row, strict=True))) for row in found]

    def value(self, statement: str, /, **values: Any) -> Any:
        """Run a statement and return the first value of its first row; None when there is no row."""
        found = self.tuples(statement, **values)
        return found[0][0] if found else None

    def values(self, statement: str, /, **values: Any) -> list[Any]:
        """Run a statement and return the first value of each row."""
        return [row[0] for row in self.tuples(statement, **values)]

    def now(self) -> datetime:
        """Return the time of the store's clock."""
        return datetime.fromtimestamp(self.seconds(), UTC)

    def revision(self) -> str | None:
        """Return the revision of the schema, None where there is none."""
        table = self.value(_FIND_TABLE[self.dialect_name], name=VERSION_TABLE)
        return None if table is None else self.value(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608

    def places(self) -> tuple[dict[int, str], str | None]:
        """Return the places of payloads by id, and the unique id of the database that owns their payloads."""
        return dict(map(tuple, self.tuples("SELECT id, url FROM rb_place"))), self.value(_OWNER)

    def database_bytes(self) -> int:
        """Return the size of the database on disk."""
        found = self.value(_SIZE[self.dialect_name])
        if self.dialect_name == "postgresql":
            return int(found)
        files = (Path(f"{found}{suffix}") for suffix in ("", "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())


_OWNER = "SELECT value FROM rb_info WHERE name = 'identity'"
_FIND_TABLE = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :name",
    # Not `to_regclass`: it may answer from the backend's catalogue cache, which may lack tables committed while this
    # transaction waited for the schema lock.
    "postgresql": "SELECT oid FROM pg_class WHERE relname = :name AND pg_table_is_visible(oid)",
}
# SQLite: the path of the file, whose size is read from the file system.
_SIZE = {
    "sqlite": "SELECT file FROM pragma_database_list WHERE name = 'main'",
    "postgresql": "SELECT pg_database_size(current_database())",
}


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
