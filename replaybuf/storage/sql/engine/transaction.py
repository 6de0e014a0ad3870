"""A transaction of one buffer: the first argument of every statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, CursorResult, Table, and_, false, insert, true
from sqlalchemy import Dialect as Compiler

from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.engine.dialects import DIALECTS, Dialect
from replaybuf.storage.sql.schema.tables import lane


@dataclass(frozen=True, slots=True)
class Scope:
    """One buffer in a database, and its rules. Without a name: all buffers, for readers.

    `epoch` is the number of restores of the buffer before it was opened; `ticket_shift` is uid minus ticket;
    `checkpoint` is the number of the checkpoint made last.
    """

    buffer: str | None = "default"
    rules: Rules = field(default_factory=Rules)
    epoch: int = 0
    ticket_shift: int = 0
    checkpoint: int = 0

    @property
    def lanes(self) -> ColumnElement[bool]:
        """The lanes of the groups in the buffer, without leased ones except for readers."""
        return true() if self.buffer is None else and_(lane.c.buffer == self.buffer, lane.c.leased == false())


#: For transactions about the whole database, and for files that hold one buffer.
DEFAULT = Scope()


@dataclass(slots=True)
class Transaction:
    """A running transaction. `scope` is the buffer as the transaction knows it (`statements.fence`)."""

    connection: Connection
    dialect: Dialect
    scope: Scope = DEFAULT

    @classmethod
    def over(cls, connection: Connection, scope: Scope = DEFAULT) -> Transaction:
        """Return the transaction of a connection."""
        return cls(connection, DIALECTS[connection.dialect.name], scope)

    def of(self, scope: Scope) -> Transaction:
        """Return the same transaction for another buffer."""
        return Transaction(self.connection, self.dialect, scope)

    def execute(self, statement: Any, parameters: Any = None) -> CursorResult[*tuple[Any, ...]]:
        """Run a SQLAlchemy statement."""
        return self.connection.execute(statement, parameters)

    def insert_rows(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows, each a tuple in the order of the table's columns, JSON as text.

        The statement is SQLAlchemy's, but compiled once and passed to the driver with the rows unchanged: half the time
        of inserting dicts.
        """
        if rows:
            self.connection.exec_driver_sql(_insert_statement(self.connection.dialect, table), list(rows))


@lru_cache
def _insert_statement(compiler: Compiler, table: Table) -> str:
    return str(insert(table).compile(dialect=compiler, column_keys=[column.key for column in table.columns]))
