"""A transaction of one buffer: the first argument of every statement.

Hooks see each statement of the process, and are called before and after each commit. Tests and benchmarks install them
(kill points, counts of statements, plans); the product itself installs none.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Self

from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.engine.dialect import Dialect, form_of
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.schema import VERSION_TABLE


@dataclass(frozen=True, slots=True)
class Scope:
    """One buffer in a database, and its rules. Without a name: all buffers, for readers.

    `epoch` is the number of restores of the buffer before it was opened; `ticket_shift` is uid minus ticket;
    `database` is the unique id of the database, `worker` the worker name of this store. `with_leased`: queries find
    leased groups, too.
    """

    buffer: str | None = "default"
    rules: Rules = field(default_factory=Rules)
    epoch: int = 0
    ticket_shift: int = 0
    database: str | None = None
    worker: str | None = None
    with_leased: bool = False


#: For transactions about the whole database, and for files that hold one buffer.
DEFAULT = Scope()


class Transaction(ABC):
    """A running transaction. Statements are SQL text with parameters `:name` (`dialect`).

    `scope` is the buffer as seen by the transaction (`statements.fence`). `newest` is the id of the buffer's newest
    checkpoint once the fence has read it. Each database has its own class, with its driver's connection; values and
    rows are in the driver's form.
    """

    dialect: ClassVar[Dialect]

    def __init__(self, scope: Scope = DEFAULT) -> None:
        self.scope = scope
        self.newest: int | None = None

    def of(self, scope: Scope) -> Self:
        """Return the same transaction for another buffer."""
        other = copy.copy(self)
        other.scope, other.newest = scope, None
        return other

    # The driver's statements

    @abstractmethod
    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        """Run a statement and return its rows, if it has any."""

    @abstractmethod
    def execute(self, sql: str, values: Row = ()) -> int:
        """Run a statement that returns no rows; return the number of changed rows."""

    @abstractmethod
    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run a statement once for each row of values."""

    def send_many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run a statement as `run_many` does; where each is a round trip, with the next one, or with COMMIT."""
        self.run_many(sql, rows)

    @abstractmethod
    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        """Run a statement; return its column names (none if it returns no rows) and its rows.

        PostgreSQL's JSON columns are parsed.
        """

    @abstractmethod
    def fetch_mappings(self, sql: str, values: Row) -> Sequence[Mapping[str, Any]]:
        """Run a statement and return its rows with their column names."""

    def run(self, sql: str, *values: Any) -> Sequence[Row]:
        """Run SQL in the driver's own form and return its rows, if any."""
        return self.fetch(sql, values)

    # What the databases do differently. One with a single writer at a time has no locks.

    def lock(self, key: Lock) -> None:  # noqa: B027
        """Take an advisory lock exclusively, until the end of the transaction."""

    def lock_schema(self) -> None:
        """Take the lock for creating the schema, until the end of the transaction."""
        self.lock(Lock.SCHEMA)

    def try_lock(self, key: Lock) -> bool:
        """Try to take an advisory lock without waiting; return whether it was free."""
        return True

    def lock_names(self, kind: NamedLock, names: Iterable[str]) -> None:  # noqa: B027
        """Take the advisory locks of these names exclusively, in sorted order."""

    @abstractmethod
    def clock(self) -> float:
        """Return the time of the lease clock, in seconds since the epoch, the same for all users of the database."""

    def start_clock(self) -> float:
        """Return the time of `clock` in a write transaction, and make the clock monotonic from now on."""
        return self.clock()

    @abstractmethod
    def set_columns(self, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Update these columns of groups. A row is a uid and the values in the driver's form, JSON as text."""

    @abstractmethod
    def reserve_uids(self, count: int) -> list[int]:
        """Return the next uids; a committed uid is never reused (a rollback leaves a gap on PostgreSQL)."""

    # Reading

    def tuples(self, statement: str, /, **values: Any) -> Sequence[Row]:
        """Run a statement and return the driver's rows: JSON may be text, a boolean a number."""
        form = form_of(statement, self.dialect)
        return self.fetch(form.sql, form.values(values))

    def rows(self, statement: str, /, **values: Any) -> list[dict[str, Any]]:
        """Run a statement and return its rows, with the same Python types from both databases (`tidy`)."""
        form = form_of(statement, self.dialect)
        return [*map(tidy, self.fetch_mappings(form.sql, form.values(values)))]

    def value(self, statement: str, /, **values: Any) -> Any:
        """Run a statement and return the first value of its first row; None when there is no row."""
        rows = self.tuples(statement, **values)
        return rows[0][0] if rows else None

    def values(self, statement: str, /, **values: Any) -> list[Any]:
        """Run a statement and return the first value of each row."""
        return [row[0] for row in self.tuples(statement, **values)]

    def now(self) -> datetime:
        """Return the time of `clock`."""
        return datetime.fromtimestamp(self.clock(), UTC)

    def revision(self) -> str | None:
        """Return the revision of the schema, None where there is none."""
        table = self.value(_FIND_TABLE[self.dialect.name], name=VERSION_TABLE)
        return None if table is None else self.value(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608

    def places(self) -> tuple[dict[int, str], str | None]:
        """Return the places of payloads by id, and the unique id of the database that owns their payloads."""
        return dict(map(tuple, self.tuples("SELECT id, url FROM rb_place"))), self.value(_OWNER)

    def database_bytes(self) -> tuple[int, int]:
        """Return the size of the database on disk with its WAL, and that of the WAL, 0 on a server, which has one."""
        size = self.value(_SIZE[self.dialect.name])
        if self.dialect.name == "postgresql":
            return int(size), 0
        files = (Path(f"{size}{suffix}") for suffix in ("", "-wal"))
        database, wal = (file.stat().st_size if file.exists() else 0 for file in files)
        return database + wal, wal

    # Writing

    def change(self, statement: str, /, **values: Any) -> int:
        """Run a statement that returns no rows; return the number of changed rows."""
        form = form_of(statement, self.dialect)
        return self.execute(form.sql, form.values(values))

    def each(self, statement: str, rows: Sequence[Row]) -> None:
        """Run a statement once for each row of values, which are in the order of its parameters."""
        if rows:
            form = form_of(statement, self.dialect)
            if form.converts:
                converts = [form.converts.get(name) for name in form.names]
                rows = [[x if cast is None else cast(x) for cast, x in zip(converts, row, strict=True)] for row in rows]
            self.run_many(form.sql, rows)

    def send(self, statement: str, rows: Sequence[Row] | None = None, /, **values: Any) -> None:
        """Run a statement of which nobody needs the result, with these values, or once for each row of values.

        Where each statement is a round trip, it is sent together with the next one, or with COMMIT, its values inlined.
        They should be short, because there is a timeout for the answer to COMMIT.
        """
        form = form_of(statement, self.dialect)
        if rows := [form.values(values)] if rows is None else rows:
            self.send_many(form.sql, rows)


Row = Sequence[Any]

_JSON_COLUMNS = ("tags", "rewards", "wants", "limits", "uids", "data", "activity", "waits", "lanes", "tallies")
_TIME_COLUMNS = (
    *("created_at", "leased_until", "archived_at", "oldest", "newest", "taken_at", "since", "until", "deadline"),
    *("seen_at", "last_seen", "started_at", "ended_at", "happened_at"),
)
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
        elif isinstance(value, str) and name in _JSON_COLUMNS:
            values[name] = json.loads(value)
        elif isinstance(value, str) and name in _TIME_COLUMNS:
            values[name] = datetime.fromisoformat(value).replace(tzinfo=UTC)
    return values


class Hook:
    """Methods called in the thread that runs the statement; an exception of theirs aborts the transaction."""

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        """Called before a statement is sent; `many`: once for each of the rows in `values`."""

    def committing(self) -> None:
        """Called before a commit."""

    def committed(self) -> None:
        """Called after a commit."""


#: The installed hooks. An empty list costs a statement next to nothing.
HOOKS: list[Hook] = []


@contextmanager
def installed(hook: Hook) -> Iterator[None]:
    """Install a hook in this block, for all databases of this process."""
    HOOKS.append(hook)
    try:
        yield
    finally:
        HOOKS.remove(hook)


def on_statement(sql: str, values: Sequence[Any] = (), *, many: bool = False) -> None:
    """Call the hooks before a statement."""
    for hook in HOOKS:
        hook.statement(sql, values, many)


def on_commit() -> None:
    """Call the hooks before a commit."""
    for hook in HOOKS:
        hook.committing()


def after_commit() -> None:
    """Call the hooks after a commit."""
    for hook in HOOKS:
        hook.committed()
