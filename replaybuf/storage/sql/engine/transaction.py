"""What statements are functions of: a transaction of one buffer."""

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
    """One buffer in a database, and its rules. Without a name: all buffers, for those who only look.

    `epoch` counts the restores of the buffer up to when it was opened; uids are `ticket_shift` ahead of tickets;
    `checkpoint` is the number of the checkpoint that was made last.
    """

    buffer: str | None = "default"
    rules: Rules = field(default_factory=Rules)
    epoch: int = 0
    ticket_shift: int = 0
    checkpoint: int = 0

    @property
    def lanes(self) -> ColumnElement[bool]:
        """The lanes of what is in the buffer: not of what is leased, except for those who only look."""
        return true() if self.buffer is None else and_(lane.c.buffer == self.buffer, lane.c.leased == false())


#: Of transactions about the database as a whole, and of files that hold one buffer.
DEFAULT = Scope()


@dataclass(slots=True)
class Transaction:
    """A transaction that is under way. `scope` is the buffer as this transaction knows it (`statements.fence`)."""

    connection: Connection
    dialect: Dialect
    scope: Scope = DEFAULT

    @classmethod
    def over(cls, connection: Connection, scope: Scope = DEFAULT) -> Transaction:
        """The transaction that a connection is in."""
        return cls(connection, DIALECTS[connection.dialect.name], scope)

    def of(self, scope: Scope) -> Transaction:
        """The same transaction, for another buffer."""
        return Transaction(self.connection, self.dialect, scope)

    def execute(self, statement: Any, parameters: Any = None) -> CursorResult[*tuple[Any, ...]]:
        """Run a statement of SQLAlchemy's."""
        return self.connection.execute(statement, parameters)

    def insert_rows(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows, each a tuple in the order of the table's columns, JSON as text.

        The statement is SQLAlchemy's, but compiled once and given to the driver with the rows as they are: half the
        time of an insert of dicts.
        """
        if rows:
            self.connection.exec_driver_sql(_insert_statement(self.connection.dialect, table), list(rows))


@lru_cache
def _insert_statement(compiler: Compiler, table: Table) -> str:
    return str(insert(table).compile(dialect=compiler, column_keys=[column.key for column in table.columns]))
