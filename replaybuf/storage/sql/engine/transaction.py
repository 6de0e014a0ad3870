"""A transaction of one buffer: the first argument of every statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from sqlalchemy import ColumnElement, Connection, CursorResult, Table, and_, false, true

from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.dialects import DIALECTS
from replaybuf.storage.sql.engine.prepared import Driver, Prepared, announce, insertion
from replaybuf.storage.sql.schema.tables import lane


@dataclass(frozen=True, slots=True)
class Scope:
    """One buffer in a database, and its rules. Without a name: all buffers, for readers.

    `epoch` is the number of restores of the buffer before it was opened; `ticket_shift` is uid minus ticket;
    `checkpoint` is the number of the checkpoint made last; `database` is the number of the database itself. `worker` is
    the name of who has it open.
    """

    buffer: str | None = "default"
    rules: Rules = field(default_factory=Rules)
    epoch: int = 0
    ticket_shift: int = 0
    checkpoint: int = 0
    database: str | None = None
    worker: str | None = None

    @property
    def lanes(self) -> ColumnElement[bool]:
        """The lanes of the groups in the buffer, without leased ones except for readers."""
        return true() if self.buffer is None else and_(lane.c.buffer == self.buffer, lane.c.leased == false())


#: For transactions about the whole database, and for files that hold one buffer.
DEFAULT = Scope()


@dataclass(slots=True)
class Transaction:
    """A running transaction. `scope` is the buffer as the transaction knows it (`statements.fence`).

    `mark` has the values of `engine.identity.MARK` until they are written; None where no commit can be in doubt. `last`
    are statements to be sent in one message with COMMIT.
    """

    connection: Connection
    dialect: Dialect
    scope: Scope = DEFAULT
    driver: Driver | None = None
    mark: tuple[str, int] | None = None
    last: tuple[str, ...] = ()

    @classmethod
    def over(cls, connection: Connection, scope: Scope = DEFAULT) -> Transaction:
        """Return the transaction of a connection."""
        return cls(connection, DIALECTS[connection.dialect.name], scope)

    def of(self, scope: Scope) -> Transaction:
        """Return the same transaction for another buffer."""
        return Transaction(self.connection, self.dialect, scope, self.driver)

    def fetch(self, statement: Prepared, *values: Any) -> Sequence[Sequence[Any]]:
        """Run a prepared statement and return its rows, as the driver gives them."""
        form = statement.form(self.dialect, self.connection)
        return (self.driver or Driver(self.connection)).fetch(form.sql, form.values(values))

    def fetch_marking(self, statement: Prepared, *values: Any) -> Sequence[Sequence[Any]]:
        """Run a prepared statement that also writes the mark, whose values are its last parameters."""
        assert self.mark is not None
        rows = self.fetch(statement, *values, *self.mark)
        self.mark = None
        return rows

    def finish(self, statement: str) -> None:
        """Have a statement sent together with COMMIT; nothing of the transaction may follow it."""
        announce(self.connection, statement, ())
        self.last = (*self.last, statement)

    def run_many(self, statement: Prepared, rows: Sequence[Sequence[Any]]) -> None:
        """Run a prepared statement once for each row of values."""
        if rows:
            form = statement.form(self.dialect, self.connection)
            driver = self.driver or Driver(self.connection)
            driver.run_many(form.sql, [form.values(row) for row in rows] if form.places else rows)

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows of all columns of a table, in its order.

        Columns that are None in all of them are left out: `sqlite3` takes longer to bind a None than a number, and most
        columns of a group are None.
        """
        if rows:
            columns, empty = [*zip(*rows, strict=True)], (None,) * len(rows)
            filled = tuple([column != empty for column in columns])
            self.run_many(insertion(table, filled), [*zip(*compress(columns, filled), strict=True)])

    def execute(self, statement: Any, parameters: Any = None) -> CursorResult[*tuple[Any, ...]]:
        """Run a SQLAlchemy statement."""
        return self.connection.execute(statement, parameters)
