"""Checks of the database itself: a SQLite file and its disk, or the servers of a URL; the schema of both."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from replaybuf.cli.doctor import Examination, Finding, fine, in_one_transaction, problem, repairable, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.errors import ReplayBufError
from replaybuf.storage.places.filesystems import filesystem_type, is_network
from replaybuf.storage.sql.engine.errors import says_unknown
from replaybuf.storage.sql.engine.outage import ASK as ASK_STANDBYS
from replaybuf.storage.sql.engine.outage import WHAT_TO_DO, Synchronous
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import Host, hosts_of, url_at
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.user_sql import read_columns
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.revisions import HEAD, State, state_of
from replaybuf.storage.sql.schema.tables import uid_sequence
from replaybuf.storage.sql.schema.views import VIEWS

SAVE_THE_REST = "stop the run, and save what can be read: docs/outages.md, What is left of a damaged file"

#: Free space on the disk below which the next puts may fail.
LITTLE_SPACE = 64 * 1024 * 1024
#: Bytes. The WAL is checkpointed into the database whenever it has grown by at most a sixteenth of that
#: (`engine.sqlite`), unless a reader blocks the checkpoint.
LARGE_LOG = 256 << 20
_MOST_MESSAGES = 100

# A SQLite file


def check_files(about: Examination) -> Iterator[Finding]:
    """Check whether this user may write the file and those next to it, and whether SQLite can rely on them."""
    assert about.reader.path is not None
    path, kind = about.reader.path, filesystem_type(about.reader.path)
    files = [path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal"))]
    closed = [str(one) for one in files if one.exists() and not os.access(one, os.R_OK | os.W_OK)]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        closed.append(f"{path.parent} (where the log is made)")
    if closed:
        yield problem(f"not writable: {some(closed)}", "chmod u+rw, or the user that the run has")
    elif is_network(kind):
        what = f"on a network file system ({kind}), where the write-ahead log is unsafe"
        yield problem(what, "a local disk, or PostgreSQL")
    else:
        yield fine(f"{path.name} and what is beside it can be written")


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
def check_integrity(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Run SQLite's own check of all pages; a quick one doesn't compare indexes with their tables."""
    name = "quick_check" if about.quick else "integrity_check"
    rows = tx.values(f"PRAGMA {name}({_MOST_MESSAGES})")
    messages = [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]

    def cure() -> str:
        tx.run("REINDEX")
        return "made all indexes again"

    if not messages:
        yield fine(f"PRAGMA {name} found nothing")
    else:
        found = f"PRAGMA {name}: {some(messages, 3)}"
        of_indexes = all(map(_OF_AN_INDEX.search, messages))
        yield repairable(found, cure) if of_indexes else problem(found, SAVE_THE_REST)


# A server, and each server of a URL

_LACKING = """
SELECT r || ' on ' || t FROM unnest(CAST(:tables AS text[])) t, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) r
WHERE NOT has_table_privilege(t, r)
UNION ALL SELECT 'USAGE on ' || s FROM CAST(:sequence AS text) s WHERE NOT has_sequence_privilege(s, 'USAGE')"""


@in_one_transaction
def check_access(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether this user has the privileges that a run needs."""
    [(user, standby)] = tx.tuples("SELECT current_user, pg_is_in_recovery()")
    if standby:
        yield problem("the server is a standby, which can't be written", "give the URL of the primary")
    elif lacking := tx.values(_LACKING, tables=sorted(metadata.tables), sequence=uid_sequence.name):
        mend = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}, and USAGE on sequences"
        yield problem(f"the user {user} lacks {some(lacking, 3)}", mend)
    else:
        yield fine(f"the user {user} may read and write all tables")


#: Seconds after which a commit that waits for a standby is a finding.
WAITING_SECONDS = 1.0


@in_one_transaction
def check_replication(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether the synchronous standbys that commits wait for are connected."""
    if tx.value("SELECT pg_is_in_recovery()"):
        yield fine("the server is a standby: commits are made elsewhere")
        return
    try:
        found = Synchronous(*tx.table(ASK_STANDBYS.format(seconds=WAITING_SECONDS))[1][0])
    except Exception as error:
        if not says_unknown(error):
            raise
        yield fine("the server doesn't say whether commits wait for standbys")
        return
    said = f"commits wait for a synchronous standby: {found}"
    if found.waiting:
        said += f"; {units.number_of(found.waiting, 'commit')} of this user's wait at the moment"
    if not found.wanted:
        yield fine("commits wait for no standby (synchronous_standby_names is empty)")
    elif found.standbys < found.wanted:
        yield problem(said, WHAT_TO_DO)
    else:
        yield warning(said, WHAT_TO_DO) if found.waiting else fine(said)


class Server(NamedTuple):
    """The version and the role of a server."""

    version: str
    is_standby: bool


def check_hosts(about: Examination) -> Iterator[Finding]:
    """Report the role of each server in the URL, or why it can't be used; nothing for a URL that names one server."""
    if hosts := list(dict.fromkeys(hosts_of(about.reader.url))):
        with ThreadPoolExecutor(len(hosts)) as threads:
            answers = list(threads.map(lambda host: _ask(about.reader, host), hosts))
        yield from servers_of(dict(zip(map(str, hosts), answers, strict=True)))


def _ask(reader: Reader, host: Host) -> Server | ReplayBufError:
    ask = "SELECT current_setting('server_version'), pg_is_in_recovery()"
    try:
        one = open_reader(url_at(reader.url, host).render_as_string(hide_password=False))
        return one.read_any(lambda tx: Server(*tx.tuples(ask)[0]))
    except ReplayBufError as error:
        return error


def servers_of(servers: dict[str, Server | ReplayBufError]) -> Iterator[Finding]:
    """Yield the findings about the servers of a cluster, given by address: their roles, and any split brain."""
    primaries: list[str] = []
    standbys: list[str] = []
    for name, one in servers.items():
        if isinstance(one, Server):
            (standbys if one.is_standby else primaries).append(name)
            yield fine(f"{name} is a {'standby' if one.is_standby else 'primary'}, PostgreSQL {one.version}")
        else:
            mend = "start it, or correct its host and port in the url: no failover goes there as it is"
            yield warning(f"{name} can't be used: {one}", mend)
    if len(primaries) > 1:
        mend = "end the one that was replaced, or make it a standby (pg_rewind): docs/outages.md, Two primaries"
        yield problem(f"{' and '.join(primaries)} both say that they are the primary", mend)
    elif standbys and not primaries:
        mend = "promote a standby (pg_ctl promote), start the primary, or name it in the url"
        yield problem("none of the servers is a primary: no run can write", mend)


# The schema


@in_one_transaction
def check_revision(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check the revision of the schema."""
    found = tx.revision()
    match state_of(found):
        case State.CURRENT:
            yield fine(f"schema {HEAD}")
        case State.MISSING if about.reader.path is None:
            mend = "the first run makes them, if its role may: try it with --probe; if there was one, check the name"
            yield warning("no replaybuf tables yet", mend)
        case State.MISSING:
            yield problem("no replaybuf tables", "check the name, or wait until a run has opened it")
        case State.OLDER:
            mend = f"close all users of it, then: replaybuf doctor {about.reader.where} --upgrade"
            yield problem(f"schema {found} of an older replaybuf, wanted {HEAD}", mend)
        case State.NEWER:
            newer = f"schema {found}, which this replaybuf doesn't know (newest known {HEAD})"
            yield problem(newer, "upgrade replaybuf here, to the version that its run has")


@in_one_transaction
def check_tables(tx: Transaction, about: Examination) -> Iterator[Finding]:
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
        yield problem(f"columns that are missing or not as they were made: {some(wrong)}", mend)
    else:
        yield fine(f"{len(metadata.tables)} tables with their columns")


_USABLE_INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index'",
    "postgresql": """SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indisvalid AND c.relnamespace = current_schema()::regnamespace""",
}
_VIEWS = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'view'",
    "postgresql": "SELECT viewname FROM pg_views WHERE schemaname = current_schema()",
}


@in_one_transaction
def check_indexes(tx: Transaction, about: Examination) -> Iterator[Finding]:
    """Check whether all indexes and views exist, and whether all indexes were finished."""
    indexes = {str(index.name): index for table in metadata.tables.values() for index in table.indexes}
    usable, views = tx.values(_USABLE_INDEXES[tx.dialect_name]), tx.values(_VIEWS[tx.dialect_name])
    lost = sorted(indexes.keys() - set(usable))
    missing = [*lost, *sorted(set(VIEWS).difference(views))]

    def cure() -> str:
        for name in lost:
            tx.run(f"DROP INDEX IF EXISTS {name}")
            create_index(tx, indexes[name])
        if missing != lost:
            drop_views(tx)
            create_views(tx)
        return f"made {', '.join(missing)}"

    if missing:
        yield repairable(f"missing, or not finished: {some(missing)}", cure)
    else:
        yield fine(f"all indexes, and the views {', '.join(VIEWS)}")
