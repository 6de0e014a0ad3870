"""Values that no writer of the tables stores. SQLite has any value in any column, such as one that was set by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.common.units import number_of, some
from replaybuf.errors import StorageError

if TYPE_CHECKING:
    from sqlalchemy import Column

    from replaybuf.storage.sql.engine.transaction import Transaction

#: The errors of Python about values of a wrong type, or that can't be.
IMPOSSIBLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error)


def impossible(where: str, cells: Sequence[str], error: Exception) -> StorageError:
    """Return the error for a database with these `wrong_cells`, or others that a read has shown by this error."""
    sentence = some(cells) or text_of(error)
    return StorageError(f"{where}: {sentence}; replaybuf doctor says what else is damaged", reason="not a database")


def text_of(error: Exception) -> str:
    """Return an error of `IMPOSSIBLE` as one sentence."""
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"


def wrong_cells(tx: Transaction) -> list[str]:
    """Return a sentence for each column with values of a wrong type, or NULL where none may be. Reads all tables.

    PostgreSQL stores none.
    """
    from replaybuf.storage.sql.schema.tables import metadata  # it imports SQLAlchemy

    sentences: list[str] = []
    for table in metadata.tables.values() if tx.dialect.name == "sqlite" else ():
        counts = ", ".join(f"total(NOT {_type_condition(column)})" for column in table.columns)
        [row] = tx.run(f"SELECT {counts} FROM {table.name}")  # noqa: S608
        sentences += [
            f"{table.name}.{column.name} has {number_of(int(count), 'value')} that can't be there"
            for column, count in zip(table.columns, row, strict=True)
            if count
        ]
    return sentences


_TYPES = {int: ("integer",), bool: ("integer",), float: ("real", "integer"), bytes: ("blob",)}


def _type_condition(column: Column[object]) -> str:
    """Return the condition that a value has a type of its column, as text of SQL."""
    from sqlalchemy import JSON

    name, kind = column.name, column.type.python_type
    types = _TYPES.get(kind, ("text",)) + ("null",) * bool(column.nullable)
    fits = f"typeof({name}) IN ({', '.join(map(repr, types))})"
    return f"({fits} AND ({name} IS NULL OR json_valid({name})))" if isinstance(column.type, JSON) else fits
