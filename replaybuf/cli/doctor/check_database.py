"""Checks of a SQLite file, its folder and its disk, and of the schema of any database."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from replaybuf.cli.doctor import Check, CheckContext, Finding, fine, problem, repairable, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.storage.places.filesystems import filesystem_type, is_network
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.user_sql import read_columns
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.revisions import HEAD, State, state_of
from replaybuf.storage.sql.schema.views import VIEWS

SAVE_THE_REST = "stop the run, and save what can be read: docs/outages.md, What is left of a damaged file"

#: Free space on the disk below which the next puts may fail.
LITTLE_SPACE = 64 * 1024 * 1024
#: Bytes. The WAL is checkpointed into the database whenever it has grown by at most a sixteenth of that
#: (`engine.sqlite_connection.ALONE_PAGES`), unless a reader blocks the checkpoint.
LARGE_LOG = 256 << 20
_MOST_MESSAGES = 100

# The file


def _find_files(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether this user may write the file and the files beside it, and whether SQLite can rely on them."""
    assert context.path is not None
    path, kind = context.path, filesystem_type(context.path)
    companions = [Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal")]
    closed = [str(one) for one in (path, *companions) if one.exists() and not os.access(one, os.R_OK | os.W_OK)]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        closed.append(f"{path.parent} (where the log is made)")
    if closed:
        return [problem(f"not writable: {some(closed)}", "chmod u+rw, or the user that the run has")]
    if is_network(kind):
        what = f"on a network file system ({kind}), where the write-ahead log is unsafe"
        return [problem(what, "a local disk, or PostgreSQL")]
    return [fine(f"{path.name} and what is beside it can be written")]


def _find_disk(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check the free space on the disk, and the sizes of the database and its WAL."""
    assert context.path is not None
    path, log = context.path, Path(f"{context.path}-wal")
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    logged = log.stat().st_size if log.exists() else 0
    what = f"{units.size(free)} free on the disk, the database has {units.size(size)}, its log {units.size(logged)}"
    if free < LITTLE_SPACE:
        return [problem(what, "free some space: puts fail when there is none (what was committed is safe)")]
    if free < size / 10:
        return [warning(what, "free some space, or set a capacity")]
    if logged >= LARGE_LOG:
        return [warning(what, "end what reads from it for so long; the next run that closes it empties the log")]
    return [fine(what)]


# REINDEX mends an index that differs from its table.
_OF_AN_INDEX = re.compile(r"missing from index |wrong # of entries in index |non-unique entry in index |out of order")


def _find_integrity(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Run SQLite's own check of all pages; a quick one doesn't compare indexes with their tables."""
    name = "quick_check" if context.quick else "integrity_check"
    messages = _messages(tx, name)
    if not messages:
        return [fine(f"PRAGMA {name} found nothing")]
    found = f"PRAGMA {name}: {some(messages, 3)}"
    return [repairable(found) if all(map(_OF_AN_INDEX.search, messages)) else problem(found, SAVE_THE_REST)]


def _messages(tx: Transaction, pragma: str) -> list[str]:
    rows = tx.values(f"PRAGMA {pragma}({_MOST_MESSAGES})")
    return [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]


def _repair_integrity(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Rebuild indexes that differ from their tables."""
    messages = _messages(tx, "integrity_check")
    if not messages or not all(map(_OF_AN_INDEX.search, messages)):
        return []
    tx.run("REINDEX")
    return ["made all indexes anew"]


# The schema


def _find_revision(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check the revision of the schema."""
    found = tx.revision()
    match state_of(found):
        case State.CURRENT:
            return [fine(f"schema {HEAD}")]
        case State.MISSING if context.path is None:
            return [warning("no replaybuf tables yet", "the first run makes them; if there was one, check the name")]
        case State.MISSING:
            return [problem("no replaybuf tables", "check the name, or wait until a run has opened it")]
        case State.OLDER:
            mend = f"close all users of it, then: replaybuf doctor {context.where} --upgrade"
            return [problem(f"schema {found} of an older replaybuf, wanted {HEAD}", mend)]
        case State.NEWER:
            newer = f"schema {found}, which this replaybuf doesn't know (newest known {HEAD})"
            return [problem(newer, "upgrade replaybuf here, to the version that its run has")]


def _find_tables(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all tables exist, with their columns."""
    nullable = read_columns(tx)
    wrong = [
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for column in table.columns
        if nullable.get((table.name, column.name)) != column.nullable
    ]
    if wrong:
        mend = "restore the database from a snapshot or a backup"
        return [problem(f"columns that are missing or not as they were made: {some(wrong)}", mend)]
    return [fine(f"{len(metadata.tables)} tables with their columns")]


_USABLE_INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index'",
    "postgresql": """SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indisvalid AND c.relnamespace = current_schema()::regnamespace""",
}
_VIEWS = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'view'",
    "postgresql": "SELECT viewname FROM pg_views WHERE schemaname = current_schema()",
}


def _missing(tx: Transaction) -> list[str]:
    """Return the names of the indexes and views that are missing, and of indexes that were not finished."""
    indexes = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    usable, views = tx.values(_USABLE_INDEXES[tx.dialect_name]), tx.values(_VIEWS[tx.dialect_name])
    return sorted(indexes.difference(usable)) + sorted(set(VIEWS).difference(views))


def _find_indexes(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether all indexes and views exist."""
    if missing := _missing(tx):
        return [repairable(f"missing, or not finished: {some(missing)}")]
    return [fine(f"all indexes, and the views {', '.join(VIEWS)}")]


def _repair_indexes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Create the indexes and views that are missing."""
    missing = _missing(tx)
    for table in metadata.tables.values():
        for index in table.indexes:
            if index.name in missing:
                tx.run(f"DROP INDEX IF EXISTS {index.name}")
                create_index(tx, index)
    if set(VIEWS) & set(missing):
        drop_views(tx)
        create_views(tx)
    return [f"made {', '.join(missing)}"] if missing else []


FILE = (
    Check("files", _find_files),
    Check("disk", _find_disk),
    Check("integrity", _find_integrity, [_repair_integrity]),
)
REVISION = Check("revision", _find_revision)
SCHEMA = (Check("tables", _find_tables), Check("indexes", _find_indexes, [_repair_indexes]))
