"""A transaction of one buffer: the first argument of every statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json
from sqlalchemy import JSON, ColumnElement, TextClause, and_, false, true
from sqlalchemy.sql.selectable import ReturnsRows

from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.hooks import on_statement
from replaybuf.storage.sql.engine.read_transaction import ReadTransaction, Table
from replaybuf.storage.sql.engine.statement import Statement, compile_core, converters, form_of
from replaybuf.storage.sql.schema.tables import lane

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Scope:
    """One buffer in a database, and its rules. Without a name: all buffers, for readers.

    `epoch` is the number of restores of the buffer before it was opened; `ticket_shift` is uid minus ticket;
    `database` is the unique id of the database. `worker` is the worker
    name of this store.
    """

    buffer: str | None = "default"
    rules: Rules = field(default_factory=Rules)
    epoch: int = 0
    ticket_shift: int = 0
    database: str | None = None
    worker: str | None = None

    @property
    def lanes(self) -> ColumnElement[bool]:
        """The lanes of the groups in the buffer, without leased ones except for readers."""
        return true() if self.buffer is None else and_(lane.c.buffer == self.buffer, lane.c.leased == false())


#: For transactions about the whole database, and for files that hold one buffer.
DEFAULT = Scope()


class Session(ABC):
    """A driver's connection with an open transaction. Values and rows are in the driver's form."""

    dialect: Dialect

    @abstractmethod
    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        """Run a statement and return its rows, if it has any."""

    @abstractmethod
    def change(self, sql: str, values: Row = ()) -> int:
        """Run a statement that returns no rows; return the number of changed rows."""

    @abstractmethod
    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run a statement once for each row of values."""

    @abstractmethod
    def table(self, sql: str, values: Row = ()) -> tuple[list[str], Sequence[Row]]:
        """Run a statement; return its column names (none if it returns no rows) and its rows.

        PostgreSQL's JSON columns are parsed.
        """


@dataclass(slots=True)
class Transaction(ReadTransaction):
    """A running transaction, which may write. `scope` is the buffer as seen by the transaction (`statements.fence`).

    `last` are statements to be sent in one message with COMMIT. `newest` is the id of the buffer's newest checkpoint
    once it was read (`statements.past`).
    """

    session: Session
    scope: Scope = DEFAULT
    last: tuple[str, ...] = ()
    newest: int | None = None
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        self.dialect = self.session.dialect

    def of(self, scope: Scope) -> Transaction:
        """Return the same transaction for another buffer."""
        return Transaction(self.session, scope)

    @property
    def dialect_name(self) -> str:
        return self.dialect.name

    def table(self, statement: str, /, **values: Any) -> Table:
        form = form_of(statement, self.dialect) if values else None
        names, rows = self.session.table(form.sql, form.values(values)) if form else self.session.table(statement)
        return names, [tuple(row) for row in rows]

    def tuples(self, statement: Any, /, **values: Any) -> Sequence[Row]:
        form = form_of(statement, self.dialect)
        return self.session.fetch(form.sql, form.values(values))

    def change(self, statement: Any, /, **values: Any) -> int:
        """Run a statement that returns no rows; return the number of changed rows."""
        form = form_of(statement, self.dialect)
        return self.session.change(form.sql, form.values(values))

    def each(self, statement: str, rows: Sequence[Row]) -> None:
        """Run a statement once for each row of values, which are in the order of its parameters."""
        if rows:
            form = form_of(statement, self.dialect)
            if form.converts:
                converts = [form.converts.get(name) for name in form.names]
                rows = [[one if to is None else to(one) for to, one in zip(converts, row, strict=True)] for row in rows]
            self.session.run_many(form.sql, rows)

    def seconds(self) -> float:
        return self.dialect.clock(self)

    def fetch(self, statement: Prepared, *values: Any) -> Sequence[Row]:
        """Run a prepared statement and return its rows in the driver's form."""
        return self.session.fetch(*statement.bind(self.dialect, values))

    def finish(self, statement: str) -> None:
        """Queue a statement to be sent together with COMMIT; no other statement may follow it."""
        on_statement(statement)
        self.last = (*self.last, statement)

    def run_many(self, statement: Prepared, rows: Sequence[Row]) -> None:
        """Run a prepared statement once for each row of values."""
        if rows:
            made = [statement.bind(self.dialect, row) for row in rows]
            self.session.run_many(made[0][0], [values for _, values in made])

    def execute(self, statement: Any, parameters: Any = None) -> Rows:
        """Run a SQLAlchemy statement, once or for each of a list of parameters."""
        made = bound(statement, parameters, self.dialect)
        if made.many:
            if made.values:
                self.session.run_many(made.sql, made.values)
            return Rows([], len(made.values))
        if made.returned is not None:
            return made.returned(self.session.fetch(made.sql, made.values))
        if made.is_text:
            return rows_of(*self.session.table(made.sql, made.values))
        return Rows([], self.session.change(made.sql, made.values))

    def run(self, sql: str, *values: Any) -> Sequence[Row]:
        """Run SQL in the driver's own form and return its rows, if any."""
        return self.session.fetch(sql, values)


Row = Sequence[Any]


class Prepared(Statement):
    """A statement of SQLAlchemy whose values are given in the order of `names`."""

    __slots__ = ("names",)

    def __init__(self, build: Callable[[Dialect], Any], *names: str) -> None:
        super().__init__(build)
        self.names = names

    def bind(self, dialect: Dialect, values: Sequence[Any]) -> tuple[str, Row]:
        """Return the SQL and the driver's parameters for these values."""
        form = self.form(dialect)
        return form.sql, form.values(dict(zip(self.names, values, strict=True)))


class Rows:
    """The result of a statement: rows with their columns as attributes, or the number of changed rows."""

    __slots__ = ("_rows", "rowcount")

    def __init__(self, rows: list[Any], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        """Return all rows."""
        return self._rows

    def first(self) -> Any:
        """Return the first row, or None."""
        return self._rows[0] if self._rows else None

    def one(self) -> Any:
        """Return the only row. Raises LookupError unless there is exactly one."""
        if len(self._rows) != 1:
            raise LookupError(f"expected one row, and found {len(self._rows)}")
        return self._rows[0]

    def scalar(self) -> Any:
        """Return the first value of the first row, or None."""
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        """Return the first value of the only row. Raises LookupError unless there is exactly one."""
        return self.one()[0]

    def scalars(self) -> list[Any]:
        """Return the first value of each row."""
        return [row[0] for row in self._rows]

    def mappings(self) -> list[dict[str, Any]]:
        """Return all rows as dictionaries."""
        return [row._asdict() for row in self._rows]


def rows_of(names: Sequence[str], rows: Sequence[Row]) -> Rows:
    """Return the driver's rows with these column names."""
    make = _row_class(tuple(names))._make
    return Rows([make(row) for row in rows], len(rows))


@lru_cache(maxsize=1024)
def _row_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Row", names, rename=True)


class Bound(NamedTuple):
    """A statement with its values, or with many rows of them.

    `returned` converts the driver's rows to `Rows`; None for a statement that returns no rows, or textual SQL, whose
    columns aren't known (`is_text`).
    """

    sql: str
    values: Sequence[Any]
    many: bool
    is_text: bool
    returned: Callable[[Sequence[Row]], Rows] | None


Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


def bound(statement: Any, parameters: Parameters, dialect: Dialect) -> Bound:
    """Return a SQLAlchemy statement compiled for the driver, with its parameter values converted."""
    many = isinstance(parameters, Sequence)
    given: Sequence[Mapping[str, Any]] = parameters if many else [parameters or {}]  # type: ignore[assignment,list-item]
    compiled = compile_core(statement, dialect, sorted(given[0]))
    order, converts = compiled.positiontup or (), converters(compiled, dialect)
    bound_rows = []
    for row in given:
        values = compiled.construct_params(row)
        bound_rows.append(tuple([converts[name](values[name]) if name in converts else values[name] for name in order]))
    sql = str(compiled)
    if many:
        return Bound(sql, bound_rows, True, False, None)
    return Bound(sql, bound_rows[0], False, isinstance(statement, TextClause), _returned(statement, dialect))


def _returned(statement: Any, dialect: Dialect) -> Callable[[Sequence[Row]], Rows] | None:
    """Return the converter of the driver's rows, or None if the statement is known to return none."""
    columns = list(statement.exported_columns.items()) if isinstance(statement, ReturnsRows) else []
    if not columns or isinstance(statement, TextClause):
        return None
    found = [(at, _reader(column.type, dialect)) for at, (_, column) in enumerate(columns)]
    converts = [(at, convert) for at, convert in found if convert is not None]

    def returned(rows: Sequence[Row]) -> Rows:
        converted = [list(row) for row in rows] if converts else rows
        for at, convert in converts:
            for row in converted:
                row[at] = convert(row[at])  # type: ignore[index]
        return rows_of([name for name, _ in columns], converted)

    return returned


Convert = Callable[[Any], Any]


def _from_json(value: Any) -> Any:
    return None if value is None else from_json(value)


#: PostgreSQL's OID of the type `numeric`, so that a column of floats has floats, whatever number is returned.
_NUMERIC = 1700


def _reader(kind: Any, dialect: Dialect) -> Convert | None:
    """Return the converter of values of a column of this type, or None."""
    if isinstance(kind, JSON):  # whose decoding SQLAlchemy leaves to asyncpg
        return _from_json
    convert: Convert | None = kind.dialect_impl(dialect.compiler).result_processor(dialect.compiler, _NUMERIC)
    return convert
