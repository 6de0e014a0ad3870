"""Whether the tables, columns, indexes and views are those of this version of replaybuf."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Index, inspect, text
from sqlalchemy.engine import Inspector

from replaybuf.doctor.finding import Check, Finding, Look, fine, problem, repairable, some
from replaybuf.storage.sql.schema.create import HEAD, REVISIONS, create_views, current_revision, drop_views
from replaybuf.storage.sql.schema.tables import metadata
from replaybuf.storage.sql.schema.views import VIEWS

_REVISION, _TABLES, _INDEXES, _VIEWS = "revision", "tables", "indexes", "views"


def look_at_revision(connection: Connection, look: Look) -> Sequence[Finding]:
    """The revision of the schema. Without the right one no other check makes sense."""
    revision = current_revision(connection)
    if revision == HEAD:
        return [fine(_REVISION, f"schema {HEAD}")]
    if revision is None:
        return [problem(_REVISION, "no replaybuf tables", "check the name, or wait until a run has opened it")]
    if revision in REVISIONS:
        mend = f"close all users of it, then: replaybuf db upgrade {look.where}"
        return [problem(_REVISION, f"schema {revision} of an older replaybuf, wanted {HEAD}", mend)]
    text_ = f"schema {revision}, which this replaybuf doesn't know (newest known {HEAD})"
    return [problem(_REVISION, text_, "pip install -U replaybuf")]


def look_at_tables(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether all tables are there, with their columns."""
    inspector = inspect(connection)
    there = set(inspector.get_table_names())
    mend = "restore the database from a snapshot or a backup"
    if missing := sorted(metadata.tables.keys() - there):
        return [problem(_TABLES, f"missing: {', '.join(missing)}", mend)]
    wrong = [
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for columns in [{row["name"]: row for row in inspector.get_columns(table.name)}]
        for column in table.columns
        if column.name not in columns or columns[column.name]["nullable"] != column.nullable
    ]
    if wrong:
        return [problem(_TABLES, f"columns that are missing or not as they were made: {some(wrong)}", mend)]
    return [fine(_TABLES, f"{len(metadata.tables)} tables with their columns")]


def look_at_indexes(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether all indexes are there, valid and over the right columns."""
    wrong = _wrong_indexes(connection)
    if not wrong:
        return [fine(_INDEXES, f"{sum(len(table.indexes) for table in metadata.tables.values())} indexes")]
    return [repairable(_INDEXES, some([f"{index.name} {why}" for index, why in wrong]))]


def repair_indexes(connection: Connection, look: Look) -> Sequence[str]:
    """Make the indexes that are missing or not as they should be."""
    done = []
    for index, why in _wrong_indexes(connection):
        connection.execute(text(f"DROP INDEX IF EXISTS {index.name}"))
        index.create(connection)
        done.append(f"made the index {index.name}, which {why}")
    return done


def _wrong_indexes(connection: Connection) -> list[tuple[Index, str]]:
    inspector = inspect(connection)
    invalid = _invalid_indexes(connection)
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


def _invalid_indexes(connection: Connection) -> set[str]:
    """Those of PostgreSQL whose building was broken off."""
    if connection.dialect.name != "postgresql":
        return set()
    query = "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE NOT i.indisvalid"
    return set(connection.execute(text(query)).scalars())


def look_at_views(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether the views for people are there."""
    if missing := _missing_views(connection):
        return [repairable(_VIEWS, f"missing: {', '.join(missing)}")]
    return [fine(_VIEWS, " and ".join(VIEWS))]


def repair_views(connection: Connection, look: Look) -> Sequence[str]:
    """Make the views anew."""
    if not (missing := _missing_views(connection)):
        return []
    drop_views(connection)
    create_views(connection)
    return [f"made the views {', '.join(missing)}"]


def _missing_views(connection: Connection) -> list[str]:
    return sorted(set(VIEWS) - set(inspect(connection).get_view_names()))


REVISION = Check(_REVISION, look_at_revision)
CHECKS = (
    Check(_TABLES, look_at_tables),
    Check(_INDEXES, look_at_indexes, repair_indexes),
    Check(_VIEWS, look_at_views, repair_views),
)
