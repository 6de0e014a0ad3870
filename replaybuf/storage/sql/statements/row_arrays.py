"""Bulk INSERT on PostgreSQL with one array parameter per column (unnest): one statement, and one message.

An array is NULL where no row has a value, and is unnested to as many as the others: asyncpg takes its time for each
element. They are unnested in a SELECT's list and not in its FROM, where PostgreSQL would write large ones to a file
first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Column, Table, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY

from replaybuf.storage.sql.engine.transaction import Prepared, Row
from replaybuf.storage.sql.schema.tables import group, payload

#: The places of columns in rows of `rb_payload`.
DATA, SEGMENT = (list(payload.columns.keys()).index(name) for name in ("data", "segment"))
#: The most bytes that one statement stores.
MOST_BYTES = 64 << 20
#: More bytes of payloads than these are sent quicker as rows.
MOST_PAYLOADS = 1 << 19
#: Columns of which one value stands for all rows: nearly always they have the same.
_SHARED = ("worker", "put_step")
_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]

Arrays = list[list[Any] | None]


def columns(rows: Sequence[Row]) -> Arrays:
    """Return the columns of rows, None for those without a value."""
    empty = (None,) * len(rows)
    return [None if column == empty else list(column) for column in zip(*rows, strict=True)]


def of_groups(rows: Sequence[Row], without: Container[str] = ()) -> Arrays:
    """Return the columns of rows of `rb_group`, but for those `without`, with one value for all where they share it."""
    arrays = dict(zip(group.columns.keys(), columns(rows), strict=True))
    for name in _SHARED:
        values = arrays[name]
        if values is not None and values.count(values[0]) == len(values):
            arrays[name] = values[:1]
    return [values for name, values in arrays.items() if name not in without]


def names(table: Table, without: Container[str] = ()) -> list[str]:
    """Return the names of the parameters for the columns of a table, but for those `without`."""
    return [f"{table.name}_{column.name}" for column in table.columns if column.name not in without]


def insertion(table: Table, made: Mapping[str, str], source: str = "") -> str:
    """Return the INSERT of the arrays `names` into a table; `made` has SQL for columns that come from the `source`.

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
    return f"unnest({values})"


# Rows that are complete


def fit(groups: Sequence[Row], payloads: Sequence[Row]) -> bool:
    """Return whether one statement may store the metadata of these groups: rows of both tables."""
    texts = chain.from_iterable(map(row.__getitem__, _TEXTS) for row in groups)
    outlines = chain.from_iterable(row[1:DATA] for row in payloads)
    return sum(map(len, filter(None, chain(texts, outlines)))) <= MOST_BYTES // 4  # bytes a character


def are_light(payload_sizes: Iterable[int]) -> bool:
    """Return whether payloads of these sizes, in bytes, belong into the same statement."""
    return sum(payload_sizes) <= MOST_PAYLOADS


_TEXTS = [
    place for place, column in enumerate(group.columns) if column.name in ("marks", "tags", "scoped_key", "error")
]
_GROUPS = insertion(group, {})
_NAMES = (*names(group), "count")
INSERT_GROUPS = Prepared(lambda _: text(_GROUPS), *_NAMES)
INSERT_BOTH = Prepared(lambda _: text(f"WITH groups AS ({_GROUPS}) {insertion(payload, {})}"), *_NAMES, *names(payload))
