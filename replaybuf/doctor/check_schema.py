"""Checks that the tables, columns, indexes and views are those of this version of replaybuf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from replaybuf.doctor import Check, CheckContext, Finding, fine, problem, repairable, warning
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.user_sql import read_columns
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS
from replaybuf.storage.sql.schema.revisions import HEAD, VERSION_TABLE, State, state_of
from replaybuf.units import some

if TYPE_CHECKING:
    from sqlalchemy import Index

#: The digest of the schema of a SQLite file of this version. Only if a file has another digest, its tables and indexes
#: are compared with SQLAlchemy's metadata, whose import takes longer than all checks of a small file.
SHAPE = "f65d510244f380e9e2ec1d71f0be0a8987b89aaa3dcc9b5c659a276083cfca7a"
_OURS = "rb_"


def shape_of(tx: ReadTransaction) -> tuple[str, int, int]:
    """Return a digest of replaybuf's tables, columns and indexes, and the numbers of tables and indexes.

    Only for SQLite files.
    """
    columns = [
        (*place, nullable)
        for place, nullable in read_columns(tx).items()
        if place[0].startswith(_OURS) and place[0] != VERSION_TABLE
    ]
    indexes = sorted(row for row in _indexes_there(tx) if row[0].startswith(_OURS))
    digest = sha256(json.dumps([columns, indexes]).encode()).hexdigest()
    return digest, len({table for table, *_ in columns}), len(indexes)


def _is_as_made(tx: ReadTransaction) -> tuple[int, int] | None:
    """Return the numbers of tables and indexes if their digest shows that all are unchanged, else None."""
    if tx.dialect_name != "sqlite":
        return None
    shape, tables, indexes = shape_of(tx)
    return (tables, indexes) if shape == SHAPE else None


def find_revision(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check the revision of the schema. Other checks are meaningless with a wrong one."""
    found, wanted = tx.revision(), HEAD
    match state_of(found):
        case State.CURRENT:
            return [fine(f"schema {wanted}")]
        case State.MISSING if context.path is None:
            return [warning("no replaybuf tables yet", "the first run makes them; if there was one, check the name")]
        case State.MISSING:
            return [problem("no replaybuf tables", "check the name, or wait until a run has opened it")]
        case State.OLDER:
            mend = f"close all users of it, then: replaybuf doctor {context.where} --upgrade"
            return [problem(f"schema {found} of an older replaybuf, wanted {wanted}", mend)]
        case State.NEWER:
            newer = f"schema {found}, which this replaybuf doesn't know (newest known {wanted})"
            return [problem(newer, "upgrade replaybuf here, to the version that its run has")]


# Tables and columns


def find_tables(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all tables exist, with their columns."""
    if (known := _is_as_made(tx)) is not None:
        return [fine(f"{known[0]} tables with their columns")]
    from replaybuf.storage.sql.schema.records import metadata

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


def _indexes_there(tx: ReadTransaction) -> Iterator[tuple[str, bool, bool, bool, Any]]:
    """Yield the name of each index, whether it is unique, partial and usable, and its columns."""
    for name, unique, partial, usable, columns in tx.table(_INDEXES_THERE[tx.dialect_name])[1]:
        yield name, bool(unique), bool(partial), bool(usable), columns


def wrong_indexes(tx: ReadTransaction) -> Iterator[tuple[Index, str]]:
    """Yield the indexes that are missing, changed or unusable, each with what is wrong."""
    there = {name: facts for name, *facts in _indexes_there(tx)}
    for index in _indexes():
        partial = index.dialect_options["postgresql"]["where"] is not None
        columns = ",".join(column.name for column in index.columns)
        if (name := str(index.name)) not in there:
            yield index, "was missing"
        elif there[name] == [bool(index.unique), partial, False, columns]:
            yield index, "was invalid"
        elif there[name] != [bool(index.unique), partial, True, columns]:
            yield index, "was not as it was made"


def _indexes() -> list[Index]:
    from replaybuf.storage.sql.schema.records import metadata

    indexes = (index for table in metadata.tables.values() for index in table.indexes)
    return sorted(indexes, key=lambda index: (str(index.table), str(index.name)))


def find_indexes(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all indexes exist, are valid, and have the right columns."""
    if (known := _is_as_made(tx)) is not None:
        return [fine(f"{known[1]} indexes")]
    if wrong := [f"{index.name} {why}" for index, why in wrong_indexes(tx)]:
        return [repairable(some(wrong))]
    return [fine(f"{len(_indexes())} indexes")]


# Views

_VIEWS_THERE = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'view'",
    "postgresql": "SELECT viewname FROM pg_views WHERE schemaname = current_schema()",
}


def missing_views(tx: ReadTransaction) -> list[str]:
    """Return the names of the views that are missing."""
    return sorted(set(VIEW_COLUMNS) - set(tx.values(_VIEWS_THERE[tx.dialect_name])))


def find_views(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the public views exist."""
    if missing := missing_views(tx):
        return [repairable(f"missing: {', '.join(missing)}")]
    return [fine(" and ".join(VIEW_COLUMNS))]


REVISION = Check("revision", find_revision)
CHECKS = (
    Check("tables", find_tables),
    Check("indexes", find_indexes),
    Check("views", find_views),
)
