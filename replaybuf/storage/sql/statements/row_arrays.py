"""Bulk INSERT on PostgreSQL with one array parameter per column (unnest): one statement, and one message.

An array is NULL if no row has a value, and unnest then yields as many NULLs as there are rows: asyncpg is slow per
element. The unnests are in the SELECT list and not in FROM, where PostgreSQL would first spill large ones to a file.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Column, Table, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY

from replaybuf.storage.sql.engine.postgres_dialect import NOW
from replaybuf.storage.sql.engine.transaction import Prepared, Row
from replaybuf.storage.sql.schema.tables import group, payload

#: The indices of columns in rows of `rb_payload`.
DATA, FILE = (list(payload.columns.keys()).index(name) for name in ("data", "file"))
#: Bytes stored by one statement at most.
MOST_BYTES = 64 << 20
#: Larger payloads together are sent faster as rows.
MOST_PAYLOADS = 1 << 19
#: Columns with one value for all rows in nearly all calls, which is then sent once.
_SHARED = ("worker", "put_step")
_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]

Arrays = list[list[Any] | None]


def columns(rows: Sequence[Row]) -> Arrays:
    """Return the columns of rows, None for a column without a value."""
    empty = (None,) * len(rows)
    return [None if column == empty else list(column) for column in zip(*rows, strict=True)]


def of_groups(rows: Sequence[Row], without: Container[str] = ()) -> Arrays:
    """Return the columns of rows of `rb_group` except `without`; a shared value is sent once."""
    arrays = dict(zip(group.columns.keys(), columns(rows), strict=True))
    for name in _SHARED:
        values = arrays[name]
        if values is not None and values.count(values[0]) == len(values):
            arrays[name] = values[:1]
    return [values for name, values in arrays.items() if name not in without]


def names(table: Table, without: Container[str] = ()) -> list[str]:
    """Return the parameter names of a table's columns except `without`."""
    return [f"{table.name}_{column.name}" for column in table.columns if column.name not in without]


def insertion(table: Table, made: Mapping[str, str], source: str = "") -> str:
    """Return the INSERT of the arrays `names` into a table; `made` has SQL for columns computed from the `source`.

    `:count` is the number of rows.
    """
    values = ", ".join(made.get(column.name) or _value(column) for column in table.columns)
    into = ", ".join(column.name for column in table.columns)
    return f"INSERT INTO {table.name} ({into}) SELECT {values} {source}"


def _value(column: Column[Any]) -> str:
    kind, _, _ = ARRAY(column.type).compile(dialect=_DIALECT).partition(" COLLATE")
    values = f"CAST(:{column.table.name}_{column.name} AS {kind})"
    if column.name in _SHARED:
        same = f"array_fill(({values})[1], ARRAY[CAST(:count AS int)])"
        values = f"CASE cardinality({values}) WHEN 1 THEN {same} ELSE {values} END"
    # The moment since when a group is set aside is the server's, because hosts' clocks differ; a NULL stays one.
    return f"unnest({values}) * 0 + CAST({NOW} AS float8)" if column is group.c.archived_at else f"unnest({values})"


# Complete rows


def fit(groups: Sequence[Row], payloads: Sequence[Row]) -> bool:
    """Return whether the metadata of these groups, as rows of both tables, fits into one statement."""
    texts = chain.from_iterable(map(row.__getitem__, _TEXTS) for row in groups)
    outlines = chain.from_iterable(row[1:FILE] for row in payloads)
    return sum(map(len, filter(None, chain(texts, outlines)))) <= MOST_BYTES // 4  # at most 4 bytes per character


def are_light(payload_sizes: Iterable[int]) -> bool:
    """Return whether payloads of these sizes, in bytes, are sent in the same statement as their groups."""
    return sum(payload_sizes) <= MOST_PAYLOADS


_TEXTS = [
    place for place, column in enumerate(group.columns) if column.name in ("marks", "tags", "scoped_key", "error")
]
_GROUPS = insertion(group, {})
_NAMES = (*names(group), "count")
INSERT_GROUPS = Prepared(lambda _: text(_GROUPS), *_NAMES)
INSERT_BOTH = Prepared(lambda _: text(f"WITH groups AS ({_GROUPS}) {insertion(payload, {})}"), *_NAMES, *names(payload))
