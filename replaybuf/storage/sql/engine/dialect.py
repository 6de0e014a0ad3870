"""What statements ask a database about: whatever the two do differently inside a transaction.

They never compare a database's name. The answers are in `sqlite_dialect` and `postgres_dialect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json
from sqlalchemy import BigInteger, ColumnElement, Select, Table, bindparam
from sqlalchemy import Dialect as Compiler

from replaybuf import units
from replaybuf.errors import TooLargeError
from replaybuf.storage.sql.engine.locks import Lock, NamedLock
from replaybuf.storage.sql.schema.tables import group

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction

#: The most bytes of a UTF-8 character.
_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most bytes of all values of a row, and what sets this limit."""

    nbytes: int
    why: str

    def check(self, what: str, values: Iterable[object]) -> None:
        """Raise TooLargeError when these values, in one row, are too large. `what` begins the message."""
        if (size := self._size(list(values))) > self.nbytes:
            raise TooLargeError(
                f"{what} takes {units.size(size)} ({size:,} bytes), and a row holds at most {self.nbytes:,} bytes "
                f"({self.why}); nothing was stored. Make smaller groups, or keep large values elsewhere and store "
                "their place"
            )

    def _size(self, values: list[object]) -> int:
        texts = [value for value in values if isinstance(value, str)]
        size = sum(len(value) for value in values if isinstance(value, (bytes, bytearray, memoryview)))
        if size + _CHARACTER * sum(map(len, texts)) <= self.nbytes:
            return 0
        return size + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A line of a plan: `table` is read in it, by `index`, or rows are sorted.

    `whole`: all of the table is read, without an index or along one.
    """

    depth: int
    text: str
    table: str | None = None
    index: str | None = None
    whole: bool = False
    sorts: bool = False


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """The columns of an index, whether it is unique, partial, and valid: its creation was not interrupted."""

    columns: list[str]
    unique: bool
    partial: bool
    valid: bool = True


#: JSON as drivers take and give it is text.
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
    #: Whether several transactions write at the same time, so that rows have to be locked.
    locks_rows: bool
    #: Whether each statement is a round trip to a server.
    is_remote: bool
    #: The rows of `rb_tally` that a transaction adds to: those of its connection, where several write at the same time.
    shard: ColumnElement[int]
    #: How many connections there are to the database, as the server counts them.
    connections: ColumnElement[int]

    @abstractmethod
    def insert(self, table: Table) -> Any:
        """Return an INSERT that supports ON CONFLICT."""

    @abstractmethod
    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition that a column is one of the values in the parameter `name`, given as by `listed`."""

    @abstractmethod
    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        """Return values as one parameter of a prepared statement."""

    @abstractmethod
    def for_update(self, query: Select[Any], *, of: Table | None = None, skip_locked: bool = False) -> Select[Any]:
        """Return the query, locking its rows against other writers; `skip_locked` leaves out rows that others hold."""

    @abstractmethod
    def lock(self, tx: Transaction, key: Lock) -> None:
        """Take a lock exclusively, until the end of the transaction."""

    def lock_schema(self, tx: Transaction) -> None:
        """Take the lock of who creates the tables, until the end of the transaction."""
        self.lock(tx, Lock.SCHEMA)

    @abstractmethod
    def try_lock(self, tx: Transaction, key: Lock, *, shared: bool = False) -> bool:
        """Take a lock if it is free; return whether it was."""

    @abstractmethod
    def lock_names(self, tx: Transaction, kind: NamedLock, names: Iterable[str]) -> None:
        """Take the locks of these names exclusively, in their order."""

    @abstractmethod
    def clock(self, tx: Transaction) -> float:
        """Return the time by which leases end, in seconds since the epoch, the same for all users of the database."""

    @abstractmethod
    def clock_value(self, given: ColumnElement[float]) -> ColumnElement[float]:
        """Return the time of `clock` as a value in a statement: the server's, or the one that is `given`."""

    @abstractmethod
    def start_clock(self, tx: Transaction) -> float:
        """Return the time of `clock` in a transaction that writes: it passes evenly from now on."""

    @abstractmethod
    def first_of_lane(self, query: Select[Any], keys: Sequence[ColumnElement[Any]], *, backwards: bool) -> Select[Any]:
        """Return the first groups of a lane by these keys, locked, with the parameters LANE and SIZE.

        `backwards`: the keys run against the uid index.
        """

    @abstractmethod
    def with_payload(self, columns: Sequence[ColumnElement[Any]]) -> Select[Any]:
        """Return a query for these columns of groups and their payloads, some of which `read_payload` has to read."""

    def read_payload(self, tx: Transaction, uid: int) -> bytes | None:
        """Return a payload that a query `with_payload` has left out, or None when there is none."""
        return None

    @abstractmethod
    def read_ranges(self, tx: Transaction, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | None]:
        """Return parts of payloads, given the uid, the first byte and the number of bytes of each.

        A part that goes beyond the end is shorter; it is None where there is no payload. Nothing else is read.
        """

    @abstractmethod
    def remove_groups(self, tx: Transaction, uids: Sequence[int], now: float) -> None:
        """Delete the metadata of groups, and make their payloads garbage now, by this host's clock or the server's."""

    @abstractmethod
    def set_columns(self, tx: Transaction, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Set these columns of groups. A row is a uid and the values, as the driver takes them, JSON as text."""

    @abstractmethod
    def set_keys(self, tx: Transaction, race: str, uids: Sequence[int], keys: Sequence[float]) -> None:
        """Set the keys of groups in a race."""

    @abstractmethod
    def reserve_uids(self, tx: Transaction, count: int) -> list[int]:
        """Return the next uids, never given again even if the transaction fails (PostgreSQL then leaves a gap)."""

    @abstractmethod
    def set_last_uid(self, tx: Transaction, last: int) -> None:
        """Make `last + 1` the next uid."""

    @abstractmethod
    def begin_keeping(self, tx: Transaction, checkpoint: int, last: int, lanes: Sequence[int]) -> None:
        """Copy groups of these lanes, up to a uid, into a checkpoint before they change, until `end_keeping`.

        Those up to its `copied_to` are there already. Only where checkpoints are made in pieces.
        """

    @abstractmethod
    def end_keeping(self, tx: Transaction, checkpoint: int) -> None:
        """Copy no more of the groups that change into this checkpoint, if they are."""

    @abstractmethod
    def row_limit(self, tx: Transaction) -> RowLimit:
        """Return how large a row may be."""

    @abstractmethod
    def explain(self, tx: Transaction, sql: str, values: Sequence[Any]) -> list[PlanStep]:
        """Return the plan of a statement with the driver's parameters, without running it."""

    # The schema as it is

    @abstractmethod
    def tables(self, tx: Transaction) -> set[str]:
        """Return the names of all tables."""

    @abstractmethod
    def views(self, tx: Transaction) -> dict[str, str]:
        """Return the definitions of all views, by name."""

    @abstractmethod
    def columns(self, tx: Transaction, table: str) -> dict[str, bool]:
        """Return the columns of a table, each with whether it may be NULL."""

    @abstractmethod
    def indexes(self, tx: Transaction, table: str) -> dict[str, IndexFacts]:
        """Return what is to be known of the indexes of a table, by name."""
