"""The interface to all differences between the two databases inside a transaction.

Statements use it and never compare a database's name. `sqlite_dialect` and `postgres_dialect` implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic_core import from_json, to_json
from sqlalchemy import BigInteger, ColumnElement, Select, Table, bindparam
from sqlalchemy import Dialect as Compiler

from replaybuf.common import units
from replaybuf.errors import StorageError
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.schema.tables import group

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction

#: The most bytes of a UTF-8 character.
_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The maximum size of all values of a row in bytes, and the reason for this limit."""

    nbytes: int
    why: str

    def check(self, what: str, values: Iterable[object]) -> None:
        """Raise StorageError when these values exceed the limit of a row. The message begins with `what`."""
        if (size := self._size(list(values))) > self.nbytes:
            raise StorageError(
                f"{what} takes {units.size(size)} ({size:,} bytes), and a row holds at most {self.nbytes:,} bytes "
                f"({self.why}); nothing was stored. Make smaller groups, or keep large values elsewhere and store "
                "their place",
                reason="too large",
            )

    def _size(self, values: list[object]) -> int:
        texts = [value for value in values if isinstance(value, str)]
        size = sum(len(value) for value in values if isinstance(value, (bytes, bytearray, memoryview)))
        if size + _CHARACTER * sum(map(len, texts)) <= self.nbytes:
            return 0
        return size + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


#: The drivers' JSON values are text.
JSON_OPTIONS: dict[str, Any] = {
    "json_serializer": lambda value: to_json(value).decode(),
    "json_deserializer": from_json,
}

#: The parameters of `first_of_lane`.
LANE, SIZE = bindparam("lane", type_=group.c.lane.type), bindparam("size", type_=BigInteger())


class Dialect(ABC):
    """The SQL of one kind of database."""

    #: SQLAlchemy's name for it, used by `query.compile_sql` and the views.
    name: str
    #: SQLAlchemy's dialect, by which statements are compiled and values are converted.
    compiler: Compiler
    #: Whether it is a server: each statement is a round trip, and transactions write concurrently, with row locks.
    is_remote: bool
    #: What begins the number of a parameter, and the macros of statements (`statement`).
    parameter: str
    macros: ClassVar[Mapping[str, str]]

    @abstractmethod
    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition that a column is one of the values in the list parameter `name` (`listed`)."""

    @abstractmethod
    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        """Return values as one list parameter of a prepared statement."""

    # Locks: none by default, for a database with one writer at a time.

    def for_update(self, query: Select[Any], *, of: Table | None = None, skip_locked: bool = False) -> Select[Any]:
        """Return the query with FOR UPDATE, if there are row locks; `skip_locked` as in SQL."""
        return query

    def lock(self, tx: Transaction, key: Lock) -> None:  # noqa: B027
        """Take an advisory lock exclusively, until the end of the transaction."""

    def lock_schema(self, tx: Transaction) -> None:
        """Take the lock for creating the schema, until the end of the transaction."""
        self.lock(tx, Lock.SCHEMA)

    def try_lock(self, tx: Transaction, key: Lock, *, shared: bool = False) -> bool:
        """Try to take an advisory lock without waiting; return whether it was free."""
        return True

    def lock_names(self, tx: Transaction, kind: NamedLock, names: Iterable[str]) -> None:  # noqa: B027
        """Take the advisory locks of these names exclusively, in sorted order."""

    @abstractmethod
    def clock(self, tx: Transaction) -> float:
        """Return the time of the lease clock, in seconds since the epoch, the same for all users of the database."""

    def start_clock(self, tx: Transaction) -> float:
        """Return the time of `clock` in a write transaction, and make the clock monotonic from now on."""
        return self.clock(tx)

    @abstractmethod
    def first_of_lane(self, query: Select[Any], keys: Sequence[ColumnElement[Any]], *, backwards: bool) -> Select[Any]:
        """Return a query for the first groups of a lane by these keys, locked, with the parameters LANE and SIZE.

        `backwards`: the order of the keys is a backward scan of the index.
        """

    @abstractmethod
    def read_ranges(self, tx: Transaction, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | None]:
        """Return byte ranges of payloads, given the uid, the offset and the length of each.

        A range beyond the end is cut short, and None without a payload. Only these bytes are read.
        """

    @abstractmethod
    def set_columns(self, tx: Transaction, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Update these columns of groups. A row is a uid and the values in the driver's form, JSON as text."""

    @abstractmethod
    def reserve_uids(self, tx: Transaction, count: int) -> list[int]:
        """Return the next uids; a committed uid is never reused (a rollback leaves a gap on PostgreSQL)."""

    @abstractmethod
    def set_last_uid(self, tx: Transaction, last: int) -> None:
        """Make `last + 1` the next uid."""

    @abstractmethod
    def row_limit(self, tx: Transaction) -> RowLimit:
        """Return the maximum size of a row."""

    # The schema as it is

    @abstractmethod
    def tables(self, tx: Transaction) -> set[str]:
        """Return the names of all tables."""

    @abstractmethod
    def views(self, tx: Transaction) -> dict[str, str]:
        """Return the definitions of all views, by name."""
