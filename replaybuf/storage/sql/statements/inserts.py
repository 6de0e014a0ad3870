"""INSERTs of rows given as dicts of columns, which leave out what is NULL: one by one, or together on PostgreSQL.

Together, a statement has one array parameter for each column (unnest), and is one message. An array is NULL if no row
has a value, and unnest then yields as many NULLs as there are rows: asyncpg is slow per element. The unnests are in the
SELECT list and not in FROM, where PostgreSQL would first spill large ones to a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import Column, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY

from replaybuf.storage.sql.engine.postgres_dialect import NOW
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, payload

#: A row's values by column, in the driver's form: JSON as text.
Row = dict[str, Any]

#: Bytes stored by one statement at most.
MOST_BYTES = 64 << 20
#: Larger payloads together are sent faster as rows.
_MOST_PAYLOADS = 1 << 19
#: Larger payloads are sent one by one: asyncpg's executemany makes another copy.
_LARGE = 1 << 20
#: Columns with one value for all rows in nearly all calls, which is then sent once.
_SHARED = ("worker", "put_step")
_TEXTS = ("marks", "tags", "scoped_key", "error")
_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]


def insert_groups(tx: Transaction, groups: Sequence[Row], payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_group` and `rb_payload`."""
    if not groups:
        return
    if not (tx.dialect.is_remote and _fit(groups, payloads)):
        _insert(tx, group, groups)
        insert_payloads(tx, payloads)
    elif are_light(payloads):
        tx.tuples(_INSERT_BOTH, count=len(groups), **arrays(group, groups), **arrays(payload, payloads))
    else:
        tx.tuples(_INSERT_GROUPS, count=len(groups), **arrays(group, groups))
        insert_payloads(tx, payloads)


def insert_payloads(tx: Transaction, payloads: Sequence[Row]) -> None:
    """Insert rows of `rb_payload`."""
    _insert(tx, payload, [row for row in payloads if len(row["data"]) <= _LARGE])
    for row in payloads:
        if len(row["data"]) > _LARGE:
            _insert(tx, payload, [row])


def _insert(tx: Transaction, table: Table, rows: Sequence[Row]) -> None:
    if len(rows) == 1:
        tx.change(_insertion(table, tuple(rows[0])), **rows[0])
    elif rows:
        names = tuple(dict.fromkeys(chain.from_iterable(rows)))
        tx.each(_insertion(table, names), [[row.get(name) for name in names] for row in rows])


@lru_cache(maxsize=256)
def _insertion(table: Table, names: Sequence[str]) -> str:
    """Return the INSERT of these columns; `sqlite3` takes longer to bind a None than a number."""
    # The moment since when a group is set aside is the server's, because hosts' clocks differ.
    values = (f"{{moment:{name}}}" if name == "archived_at" else f":{name}" for name in names)
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(values)})"  # noqa: S608


# Together


def arrays(table: Table, rows: Sequence[Row]) -> dict[str, list[Any] | None]:
    """Return the parameters of `insertion`: the columns of rows, None for one without a value."""
    found: dict[str, list[Any] | None] = {}
    for column in (one.name for one in table.columns):
        values = [row.get(column) for row in rows]
        if column in _SHARED and values.count(values[0]) == len(values):
            values = values[:1]
        found[f"{table.name}_{column}"] = None if values.count(None) == len(values) else values
    return found


def insertion(table: Table, made: Mapping[str, str], source: str = "") -> str:
    """Return the INSERT of `arrays` into a table; `made` has SQL for columns computed from the `source`.

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
    # The server's moment; a NULL stays one.
    return f"unnest({values}) * 0 + CAST({NOW} AS float8)" if column is group.c.archived_at else f"unnest({values})"


def _fit(groups: Sequence[Row], payloads: Sequence[Row]) -> bool:
    """Return whether the metadata of these groups fits into one statement."""
    texts: Iterable[Any] = (row.get(name) for row in groups for name in _TEXTS)
    outlines: Iterable[Any] = (row.get(name) for row in payloads for name in ("outline", "prompt"))
    return sum(map(len, filter(None, chain(texts, outlines)))) <= MOST_BYTES // 4  # at most 4 bytes per character


def are_light(payloads: Iterable[Row]) -> bool:
    """Return whether payloads are sent in the same statement as their groups."""
    return sum(len(row["data"]) for row in payloads) <= _MOST_PAYLOADS


_INSERT_GROUPS = insertion(group, {})
_INSERT_BOTH = f"WITH groups AS ({_INSERT_GROUPS}) {insertion(payload, {})}"
