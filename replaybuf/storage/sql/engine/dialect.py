"""Statements that are written once for both databases, and how they are compiled for each.

Statements never compare a database's name. Most are texts with parameters `:name` and a few macros in braces, for which
each database has its own SQL (`Dialect.macros`):

    {in:uids}                 follows a column: it is one of the numbers of the list `uids`
    {in_texts:tasks}          the same for texts
    {each:uids}               the numbers of the list as the column `value` of a table
    {json:tags}               the value `tags` as JSON
    {moment:at}               the moment `at` of the present, NULL for None: on a server its own time, as clocks differ
    {clock:now}               the time `now` of the lease clock, by which leases end: on a server its own time
    {lock}, {lock:g}, {skip}  at the end of a query: locks its rows; those of the table `g`; those not locked by others
    {insert}                  INSERT of many rows, which SQLite doesn't undo alone when it fails (all errors end the
                              transaction): a large one would make a temporary file, as a call of a date function does
    {shard}                   the shard of `rb_tally` that the transaction updates
    {draw}                    the id of the batch that the transaction wrote last
    {tables}, {views}, {set_last_uid:last}  whole statements: the names of all tables; of all views; the next uid is
                              `last + 1`

A user's query is a condition of SQLAlchemy, which its public methods compile to such a text
(`rules.query.sql_conditions`). All else that differs is a method of `Transaction`. Frequent read commands use texts
alone, and don't import SQLAlchemy, which takes longer than their queries.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from replaybuf.common import units
from replaybuf.errors import StorageError

if TYPE_CHECKING:
    from sqlalchemy import Dialect as Compiler

Convert = Callable[[Any], Any]


#: The bytes of all values of a row at most; a megabyte is for its other columns. SQLite's rows have up to 10^9 bytes;
#: PostgreSQL's messages, in which rows are sent and received, less than 1 GiB.
MOST_ROW_BYTES = 999_000_000


def check_row(label: str, values: Iterable[object]) -> None:
    """Raise StorageError when these values exceed what a row of either database holds. The message begins with `label`.

    The server would close the connection after a larger row.
    """
    sized = [value for value in values if isinstance(value, (str, bytes, bytearray, memoryview))]
    if 4 * sum(map(len, sized)) <= MOST_ROW_BYTES:  # as in nearly all rows, whatever their characters
        return
    size = sum(len(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value) for value in sized)
    if size > MOST_ROW_BYTES:
        raise StorageError(
            f"{label} takes {units.size(size)} ({size:,} bytes), and a row holds at most {MOST_ROW_BYTES:,} bytes; "
            "nothing was stored. Make smaller groups, or keep large values elsewhere and store their place",
            reason="too large",
        )


class Dialect(ABC):
    """The SQL of one kind of database."""

    #: SQLAlchemy's name for it, used by the views.
    name: str
    #: Whether it is a server: each statement is a round trip, and transactions write concurrently, with row locks.
    is_remote: bool
    #: What begins the number of a parameter, and the macros of statements.
    parameter: str
    macros: ClassVar[Mapping[str, str]]

    @property
    @abstractmethod
    def compiler(self) -> Compiler:
        """SQLAlchemy's dialect, by which queries and the schema are compiled. Parameters are named."""

    @abstractmethod
    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        """Return values as one list parameter of a prepared statement."""


# Statements


@dataclass(frozen=True, slots=True)
class Form:
    """A compiled statement: the driver's SQL, and the names of its parameters in the driver's order.

    `converts` has the converters of those that have one.
    """

    sql: str
    names: Sequence[str]
    converts: Mapping[str, Convert] = field(default_factory=dict)

    def values(self, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the driver's parameters for these values; there may be more than the statement has. Raises KeyError"""
        if not self.converts:
            return tuple([by_name[name] for name in self.names])
        converts = self.converts
        return tuple([converts[name](by_name[name]) if name in converts else by_name[name] for name in self.names])


_PART = re.compile(r"\{(?P<macro>\w+)(?::(?P<argument>\w+))?\}|(?<![:\w]):(?P<name>[a-z_]\w*)")


@lru_cache(maxsize=2048)
def form_of(text: str, dialect: Dialect) -> Form:
    """Return a text with macros compiled for a dialect."""
    places: dict[str, int] = {}
    converts: dict[str, Convert] = {}

    def parameter(name: str) -> str:
        return f"{dialect.parameter}{places.setdefault(name, len(places) + 1)}"

    def replaced(match: re.Match[str]) -> str:
        macro, argument = match["macro"], match["argument"]
        if macro is None:
            return parameter(match["name"])
        if argument is None:
            return dialect.macros[macro]
        if macro == "lock":
            return dialect.macros["lock_of"].format(argument)
        if macro == "json":
            converts[argument] = to_json_text
        elif macro in ("in", "in_texts", "each"):
            converts[argument] = dialect.listed
        return dialect.macros[macro].format(parameter(argument))

    return Form(_PART.sub(replaced, text), tuple(places), converts)


def to_json_text(value: Any) -> str | None:
    """Return a value as JSON, None as NULL."""
    from pydantic_core import to_json

    return None if value is None else to_json(value).decode()
