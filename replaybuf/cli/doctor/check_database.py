"""Checks of the database itself: a SQLite file and its disk, and the schema."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from replaybuf.cli.doctor import REPAIR, Examination, Finding, fine, in_one_transaction, problem, verdict, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.storage.places.filesystems import filesystem_type, is_network
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.user_sql import read_columns
from replaybuf.storage.sql.schema import HEAD, State, state_of
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views
from replaybuf.storage.sql.schema.tables import metadata
from replaybuf.storage.sql.schema.views import VIEWS

SAVE_THE_REST = "stop the run, and save what can be read: docs/outages.md, What is left of a damaged file"

#: Free space on the disk below which the next puts may fail.
LITTLE_SPACE = 64 * 1024 * 1024
#: Bytes. The WAL is checkpointed into the database whenever it has grown by at most a sixteenth of that
#: (`engine.sqlite`), unless a reader blocks the checkpoint.
LARGE_LOG = 256 << 20
_MOST_MESSAGES = 100


def check_files(about: Examination) -> Iterator[Finding]:
    """Check whether this user may write the SQLite file and those next to it, and whether SQLite can rely on them."""
    assert about.reader.path is not None
    path, kind = about.reader.path, filesystem_type(about.reader.path)
    files = [path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal"))]
    closed = [str(file) for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        closed.append(f"{path.parent} (where the log is made)")
    if closed:
        yield problem(f"not writable: {some(closed)}", "chmod u+rw, or the user that the run has")
    elif is_network(kind):
        what = f"on a network file system ({kind}), where the write-ahead log is unsafe"
        yield problem(what, "a local disk, or PostgreSQL")
    else:
        yield fine(f"{path.name} and the files next to it can be written")


def check_disk(about: Examination) -> Iterator[Finding]:
    """Check the free space on the disk, and the sizes of the database and its WAL."""
    assert about.reader.path is not None
    path, log = about.reader.path, Path(f"{about.reader.path}-wal")
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    logged = log.stat().st_size if log.exists() else 0
    what = f"{units.size(free)} free on the disk, the database has {units.size(size)}, its log {units.size(logged)}"
    if free < LITTLE_SPACE:
        yield problem(what, "free some space: puts fail when there is none (what was committed is safe)")
    elif free < size / 10:
        yield warning(what, "free some space, or set a capacity")
    elif logged >= LARGE_LOG:
        yield warning(what, "end what reads from it for so long; the next run that closes it empties the log")
    else:
        yield fine(what)


# REINDEX mends an index that differs from its table.
_OF_AN_INDEX = re.compile(r"missing from index |wrong # of entries in index |non-unique entry in index |out of order")


@in_one_transaction
def check_integrity(tx: Transaction, about: Examination) -> Finding:
    """Run SQLite's own check of all pages; a quick one doesn't compare indexes with their tables."""
    name = "quick_check" if about.quick else "integrity_check"
    rows = tx.values(f"PRAGMA {name}({_MOST_MESSAGES})")
    messages = [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]
    found = f"PRAGMA {name}: {some(messages, 3)}" if messages else ""
    mend = (REPAIR, _reindex) if all(map(_OF_AN_INDEX.search, messages)) else (SAVE_THE_REST, None)
    return verdict(found, f"PRAGMA {name} found nothing", *mend, groups_missing=True)


def _reindex(tx: Transaction) -> str:
    tx.run("REINDEX")
    return "made all indexes again"


# The schema


@in_one_transaction
def check_revision(tx: Transaction, about: Examination) -> Finding:
    """Check the revision of the schema."""
    found = tx.revision()
    match state_of(found):
        case State.CURRENT:
            return fine(f"schema {HEAD}")
        case State.MISSING if about.reader.path is None:
            mend = "the first run makes them, if its role may: try it with --probe; if there was one, check the name"
            return warning("no replaybuf tables yet", mend)
        case State.MISSING:
            return problem("no replaybuf tables", "check the name, or wait until a run has opened it")
        case State.OLDER:
            mend = f"close all users of it, then: replaybuf doctor {about.reader.where} --upgrade"
            return problem(f"schema {found} of an older replaybuf, wanted {HEAD}", mend)
        case State.NEWER:
            newer = f"schema {found}, which this replaybuf doesn't know (newest known {HEAD})"
            return problem(newer, "upgrade replaybuf here, to the version that its run has")


@in_one_transaction
def check_tables(tx: Transaction, about: Examination) -> Finding:
    """Check whether all tables exist, with their columns."""
    nullable = read_columns(tx)
    wrong = [
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for column in table.columns
        if nullable.get((table.name, column.name)) != column.nullable
    ]
    what = f"columns that are missing or not as they were made: {some(wrong)}" if wrong else ""
    mend = "restore the database from a snapshot or a backup"
    return verdict(what, f"{len(metadata.tables)} tables with their columns", mend)


_USABLE_INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index'",
    "postgresql": """SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indisvalid AND c.relnamespace = current_schema()::regnamespace""",
}
_VIEWS = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'view'",
    "postgresql": "SELECT viewname FROM pg_views WHERE schemaname = current_schema()",
}
_INDEXES = {str(index.name): index for table in metadata.tables.values() for index in table.indexes}


@in_one_transaction
def check_indexes(tx: Transaction, about: Examination) -> Finding:
    """Check whether all indexes and views exist, and whether all indexes were finished."""
    missing = [*_lost_indexes(tx), *_lost_views(tx)]
    what = f"missing, or not finished: {some(missing)}" if missing else ""
    return verdict(what, f"all indexes, and all {len(VIEWS)} views", cure=_make_indexes)


def _lost_indexes(tx: Transaction) -> list[str]:
    return sorted(_INDEXES.keys() - set(tx.values(_USABLE_INDEXES[tx.dialect.name])))


def _lost_views(tx: Transaction) -> list[str]:
    return sorted(set(VIEWS).difference(tx.values(_VIEWS[tx.dialect.name])))


def _make_indexes(tx: Transaction) -> str:
    lost, views = _lost_indexes(tx), _lost_views(tx)
    for name in lost:
        tx.run(f"DROP INDEX IF EXISTS {name}")
        create_index(tx, _INDEXES[name])
    if views:
        drop_views(tx)
        create_views(tx)
    return f"made {', '.join([*lost, *views])}"
