"""A transaction of one buffer: the first argument of every statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, and_, false, true

from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.engine.dialect import Dialect, form_of
from replaybuf.storage.sql.engine.hooks import on_statement
from replaybuf.storage.sql.engine.read_transaction import ReadTransaction, Table
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

    def finish(self, statement: str) -> None:
        """Queue a statement to be sent together with COMMIT; no other statement may follow it."""
        on_statement(statement)
        self.last = (*self.last, statement)

    def run(self, sql: str, *values: Any) -> Sequence[Row]:
        """Run SQL in the driver's own form and return its rows, if any."""
        return self.session.fetch(sql, values)


Row = Sequence[Any]
