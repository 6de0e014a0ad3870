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
    {tables}, {views}, {set_last_uid:last}  whole statements: the names of all tables; the names and definitions of
                              all views; the next uid is `last + 1`

Statements that vary with a user's query or with the policy are SQLAlchemy Core, which its public methods compile. All
else that differs is a method of `Transaction`. Frequent read commands use texts alone, and don't import SQLAlchemy,
which takes longer than their queries.
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
    from sqlalchemy import ColumnElement
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

    #: SQLAlchemy's name for it, used by `query.compile_sql` and the views.
    name: str
    #: Whether it is a server: each statement is a round trip, and transactions write concurrently, with row locks.
    is_remote: bool
    #: What begins the number of a parameter, and the macros of statements.
    parameter: str
    macros: ClassVar[Mapping[str, str]]

    @property
    @abstractmethod
    def compiler(self) -> Compiler:
        """SQLAlchemy's dialect, by which statements are compiled and values are converted. JSON values are text."""

    @abstractmethod
    def one_of(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        """Return the condition that a column is one of the values in the list parameter `name` (`listed`)."""

    @abstractmethod
    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        """Return values as one list parameter of a prepared statement."""


# Statements


@dataclass(frozen=True, slots=True)
class Form:
    """A compiled statement: the driver's SQL, and the names of its parameters in the driver's order.

    `fixed` has the values of parameters that aren't given, and `converts` the converters of those that have one.
    """

    sql: str
    names: Sequence[str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    converts: Mapping[str, Convert] = field(default_factory=dict)

    def values(self, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the driver's parameters for these values; there may be more than the statement has. Raises KeyError"""
        if self.fixed:
            by_name = {**self.fixed, **by_name}
        if not self.converts:
            return tuple([by_name[name] for name in self.names])
        converts = self.converts
        return tuple([converts[name](by_name[name]) if name in converts else by_name[name] for name in self.names])


def form_of(statement: Any, dialect: Dialect) -> Form:
    """Return a text or a statement of SQLAlchemy compiled for a dialect, the latter each time; a Form as it is."""
    if isinstance(statement, str):
        return of_text(statement, dialect)
    return statement if isinstance(statement, Form) else of_core(statement, dialect)


_PART = re.compile(r"\{(?P<macro>\w+)(?::(?P<argument>\w+))?\}|(?<![:\w]):(?P<name>[a-z_]\w*)")


@lru_cache(maxsize=2048)
def of_text(text: str, dialect: Dialect) -> Form:
    """Return a text with macros compiled for a dialect."""
    names: list[str] = []
    converts: dict[str, Convert] = {}

    def parameter(name: str) -> str:
        if name not in names:
            names.append(name)
        return f"{dialect.parameter}{names.index(name) + 1}"

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

    return Form(_PART.sub(replaced, text), names, converts=converts)


def to_json_text(value: Any) -> str | None:
    """Return a value as JSON, None as NULL."""
    from pydantic_core import to_json

    return None if value is None else to_json(value).decode()


def of_core(statement: Any, dialect: Dialect) -> Form:
    """Return a statement of SQLAlchemy compiled for a dialect.

    Its parameters without a value are given later, in the driver's form.
    """
    compiled = statement.compile(dialect=dialect.compiler)
    if compiled.post_compile_params:  # lists: then all of its values must be in the statement
        compiled = statement.compile(dialect=dialect.compiler, compile_kwargs={"render_postcompile": True})
    required = {name for parameter, name in compiled.bind_names.items() if parameter.required}
    kinds = {name: parameter.type for parameter, name in compiled.bind_names.items()}
    fixed = {}
    for name, value in compiled.construct_params(dict.fromkeys(required)).items():
        if name not in required:
            kind = kinds.get(name)
            convert = kind and kind.dialect_impl(dialect.compiler).bind_processor(dialect.compiler)
            fixed[name] = convert(value) if convert else value
    return Form(str(compiled), compiled.positiontup or (), fixed)
