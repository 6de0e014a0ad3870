"""Checks that the tables, columns, indexes and views are those of this version of replaybuf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Index, text

from replaybuf.doctor.findings import Check, CheckContext, Finding, fine, problem, repairable, warning
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import HEAD, ReadTransaction, State, state_of
from replaybuf.storage.sql.inspection.statement import read_columns
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.views import VIEWS
from replaybuf.units import some


def find_revision(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check the revision of the schema. Without the right one no other check makes sense."""
    found, wanted = tx.revision(), HEAD
    match state_of(found):
        case State.CURRENT:
            return [fine(f"schema {wanted}")]
        case State.MISSING if context.path is None:
            return [warning("no replaybuf tables yet", "the first run makes them; if there was one, check the name")]
        case State.MISSING:
            return [problem("no replaybuf tables", "check the name, or wait until a run has opened it")]
        case State.OLDER:
            mend = f"close all users of it, then: replaybuf db upgrade {context.where}"
            return [problem(f"schema {found} of an older replaybuf, wanted {wanted}", mend)]
        case State.NEWER:
            newer = f"schema {found}, which this replaybuf doesn't know (newest known {wanted})"
            return [problem(newer, "upgrade replaybuf here, to the version that its run has")]


# Tables and columns


def find_tables(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all tables are there, with their columns."""
    mend = "restore the database from a snapshot or a backup"
    nullable = read_columns(tx)
    tables = {table for table, _ in nullable}
    if missing := sorted(metadata.tables.keys() - tables):
        return [problem(f"missing: {', '.join(missing)}", mend)]
    wrong = [
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for column in table.columns
        if nullable.get((table.name, column.name)) != column.nullable
    ]
    if wrong:
        return [problem(f"columns that are missing or not as they were made: {some(wrong)}", mend)]
    return [fine(f"{len(metadata.tables)} tables with their columns")]


# Indexes: name, unique, partial, usable, and the columns in order

_INDEXES_THERE = {
    "sqlite": """
SELECT i.name, i."unique", i.partial, true,
    (SELECT group_concat(c.name) FROM (SELECT name FROM pragma_index_info(i.name) ORDER BY seqno) c)
FROM sqlite_master t, pragma_index_list(t.name) i WHERE t.type = 'table'""",
    "postgresql": """
SELECT c.relname, i.indisunique, i.indpred IS NOT NULL, i.indisvalid,
    (SELECT string_agg(pg_get_indexdef(i.indexrelid, CAST(k AS int), false), ',' ORDER BY k)
     FROM generate_series(1, i.indnkeyatts) k)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relnamespace = current_schema()::regnamespace""",
}


def _wrong_indexes(tx: ReadTransaction) -> Iterator[tuple[Index, str]]:
    """Yield the indexes that are missing, changed or unusable, each with what is wrong."""
    there = {
        name: (bool(unique), bool(partial), bool(usable), columns)
        for name, unique, partial, usable, columns in tx.table(_INDEXES_THERE[tx.dialect_name])[1]
    }
    for index in _indexes():
        partial = index.dialect_options["postgresql"]["where"] is not None
        columns = ",".join(column.name for column in index.columns)
        if (name := str(index.name)) not in there:
            yield index, "was missing"
        elif there[name] == (bool(index.unique), partial, False, columns):
            yield index, "was invalid"
        elif there[name] != (bool(index.unique), partial, True, columns):
            yield index, "was not as it was made"


def _indexes() -> list[Index]:
    indexes = (index for table in metadata.tables.values() for index in table.indexes)
    return sorted(indexes, key=lambda index: (str(index.table), str(index.name)))


def find_indexes(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all indexes are there, valid and over the right columns."""
    if wrong := [f"{index.name} {why}" for index, why in _wrong_indexes(tx)]:
        return [repairable(some(wrong))]
    return [fine(f"{len(_indexes())} indexes")]


def repair_indexes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Build the indexes that are missing or wrong."""
    wrong = list(_wrong_indexes(tx))
    for index, _ in wrong:
        tx.execute(text(f"DROP INDEX IF EXISTS {index.name}"))
        create_index(tx, index)
    return [f"made the index {index.name}, which {why}" for index, why in wrong]


# Views

_VIEWS_THERE = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'view'",
    "postgresql": "SELECT viewname FROM pg_views WHERE schemaname = current_schema()",
}


def _missing_views(tx: ReadTransaction) -> list[str]:
    return sorted(set(VIEWS) - set(tx.values(_VIEWS_THERE[tx.dialect_name])))


def find_views(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the views for people are there."""
    if missing := _missing_views(tx):
        return [repairable(f"missing: {', '.join(missing)}")]
    return [fine(" and ".join(VIEWS))]


def repair_views(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Create the views anew."""
    missing = _missing_views(tx)
    if missing:
        drop_views(tx)
        create_views(tx)
    return [f"made the views {', '.join(missing)}"] if missing else []


REVISION = Check("revision", find_revision)
CHECKS = (
    Check("tables", find_tables),
    Check("indexes", find_indexes, repair_indexes),
    Check("views", find_views, repair_views),
)
