"""Tables, columns, indexes and views that differ from this version of replaybuf."""

from __future__ import annotations

from sqlalchemy import Index, inspect, text
from sqlalchemy.engine import Inspector

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.create import create_views, drop_views
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.views import VIEWS

#: The names of all tables, indexes and views.
TABLES = tuple(metadata.tables)
INDEXES = tuple(str(index.name) for table in metadata.tables.values() for index in table.indexes)

__all__ = [
    "INDEXES",
    "TABLES",
    "VIEWS",
    "make_indexes",
    "make_views",
    "missing_tables",
    "missing_views",
    "wrong_columns",
    "wrong_indexes",
]


def missing_tables(tx: Transaction) -> list[str]:
    """Return the names of tables that aren't there."""
    return sorted(set(TABLES) - set(inspect(tx.connection).get_table_names()))


def wrong_columns(tx: Transaction) -> list[str]:
    """Return the columns that are missing or changed."""
    inspector = inspect(tx.connection)
    return [
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for columns in [{row["name"]: row for row in inspector.get_columns(table.name)}]
        for column in table.columns
        if column.name not in columns or columns[column.name]["nullable"] != column.nullable
    ]


def wrong_indexes(tx: Transaction) -> dict[str, str]:
    """Return the names of wrong indexes, each with what is wrong."""
    return {str(index.name): why for index, why in _wrong_indexes(tx)}


def make_indexes(tx: Transaction) -> dict[str, str]:
    """Create missing indexes and recreate wrong ones; return what was wrong with them."""
    made = {}
    for index, why in _wrong_indexes(tx):
        tx.execute(text(f"DROP INDEX IF EXISTS {index.name}"))
        index.create(tx.connection)
        made[str(index.name)] = why
    return made


def _wrong_indexes(tx: Transaction) -> list[tuple[Index, str]]:
    inspector = inspect(tx.connection)
    invalid = tx.dialect.invalid_indexes(tx.connection)
    wrong = []
    for table in metadata.tables.values():
        there = _indexes_of(inspector, table.name)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            if index.name not in there:
                wrong.append((index, "was missing"))
            elif there[index.name] != (_columns_of(index), bool(index.unique), _is_partial(index)):
                wrong.append((index, "was not as it was made"))
            elif index.name in invalid:
                wrong.append((index, "was invalid"))
    return wrong


def _indexes_of(inspector: Inspector, table: str) -> dict[str | None, tuple[list[str], bool, bool]]:
    return {
        row["name"]: (
            [str(name).split(" ")[0] for name in row.get("expressions") or row["column_names"]],
            bool(row["unique"]),
            any(
                name.endswith("_where") and value is not None for name, value in row.get("dialect_options", {}).items()
            ),
        )
        for row in inspector.get_indexes(table)
    }


def _columns_of(index: Index) -> list[str]:
    return [column.name for column in index.columns]


def _is_partial(index: Index) -> bool:
    return index.dialect_options["postgresql"]["where"] is not None


def missing_views(tx: Transaction) -> list[str]:
    """Return the names of views that aren't there."""
    return sorted(set(VIEWS) - set(inspect(tx.connection).get_view_names()))


def make_views(tx: Transaction) -> list[str]:
    """Recreate the views if any are missing, and return the missing ones."""
    if missing := missing_views(tx):
        drop_views(tx.connection)
        create_views(tx.connection)
    return missing
