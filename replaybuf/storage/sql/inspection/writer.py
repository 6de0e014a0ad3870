"""Opening a database to mend or upgrade it, without other writers; snapshots, and where they go; buffers forgotten."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import text

from replaybuf.errors import ConfigError, InputError, NotADatabaseError, SchemaError
from replaybuf.progress import OnProgress
from replaybuf.storage.sql.copies.snapshot import copy_to
from replaybuf.storage.sql.copies.snapshot_file import read_snapshot_facts
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.server_function import bring_up
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.sql.engine.sqlite_files import is_wal, refuse_network_filesystem
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.engine.urls import is_memory, public_url, url_or_path
from replaybuf.storage.sql.inspection.reader import LOCK_TIMEOUT, Reader, ReadTransaction, open_reader
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.revisions import HEAD, REVISIONS, check_revision
from replaybuf.storage.sql.statements.fence import joined
from replaybuf.storage.sql.statements.put_at_once import FUNCTIONS

T = TypeVar("T")

_LOG_TIMEOUT_MS = 2000


@contextmanager
def open_writer(reader: Reader) -> Iterator[Writer]:
    """Yield a writer for the database of a reader. Opening a SQLite file for writing changes its journal."""
    with asyncio.Runner() as runner:
        engine = open_database(reader.url, durability="full")
        try:
            yield Writer(engine, runner)
        finally:
            runner.run(engine.dispose())


class Writer:
    """Runs functions in write transactions of a database, each whole or not at all, while nobody else writes."""

    def __init__(self, engine: Database, runner: asyncio.Runner) -> None:
        self._engine, self._runner = engine, runner

    def write(self, function: Callable[[Transaction], T]) -> T:
        """Run `function(tx)` in a transaction, commit it, and return the result."""
        return self._runner.run(self._engine.write(function, alone=True))

    def run(self, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work(engine)`."""
        return self._runner.run(work(self._engine))

    def empty_log(self) -> bool:
        """Copy a SQLite file's log into the file and restart it; return False while another process reads from it."""

        def work(connection: sqlite3.Connection) -> bool:
            connection.execute(f"PRAGMA busy_timeout = {_LOG_TIMEOUT_MS}")
            return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

        assert isinstance(self._engine, SqliteDatabase)
        return self._runner.run(self._engine.outside(work))


def upgrade_database(reader: Reader) -> tuple[str | None, str]:
    """Upgrade the schema, or create it in an empty database; return the revisions before and after.

    Raises NotADatabaseError for a database of something else, and SchemaError for a newer one.
    """
    # Before it is opened for writing, which changes the journal of a SQLite file.
    reader.read_any(lambda tx: _check_owner(tx, reader.where))
    if reader.path is not None:
        refuse_network_filesystem(str(reader.url.database))

    def create(tx: Transaction) -> str | None:
        before = tx.revision()
        if before is None:
            create_schema(tx, reader.where)
        return before

    with open_writer(reader) as writer:
        before = writer.write(create)
    if before not in (None, HEAD):
        from replaybuf.storage.sql.inspection.upgrade import over_sqlalchemy, upgrade

        asyncio.run(over_sqlalchemy(reader.url, upgrade))
    if reader.path is None:
        with open_writer(reader) as writer:
            writer.run(partial(bring_up, functions=FUNCTIONS, replaces=True))
    after = reader.read_any(lambda tx: tx.revision())
    if after != HEAD:
        raise SchemaError(f"{reader.where} is at revision {after} after the upgrade, wanted {HEAD}")
    return before, after


def _check_owner(tx: ReadTransaction, where: str) -> None:
    revision, whole = tx.revision(), tx.of(DEFAULT)
    if revision is None and (tables := whole.dialect.tables(whole)):
        some = ", ".join(sorted(tables)[:3])
        raise NotADatabaseError(f"{where} belongs to something else (it has tables {some}); nothing was changed")
    if revision not in REVISIONS:
        check_revision(revision, where)


def save_snapshot(
    reader: Reader, name: str, file: str, about: Mapping[str, str], tell: OnProgress, *, whole: bool = True
) -> None:
    """Write a snapshot of a buffer, with facts about it, and with all payloads if it is to be `whole`."""
    # Who copies what is kept apart notes that in the database, so that it isn't written over meanwhile.
    notes = whole and reader.path is None and bool(reader.read(lambda tx: tx.places()[0]))

    async def save() -> None:
        read_only = opens_read_only(reader) and not notes
        engine = open_database(reader.url, lock_timeout=LOCK_TIMEOUT, read_only=read_only)
        try:
            scope = await engine.read(joined, Scope(name))
            await copy_to(engine, scope, file, about, tell, whole=whole)
        finally:
            await engine.dispose()

    asyncio.run(save())


def opens_read_only(reader: Reader) -> bool:
    """Return whether the database is to be opened read-only by who only reads: unless it is a SQLite file with a log.

    The last connection to such a file removes the log, unless it is read-only: then an empty one would be left behind.
    """
    return not (reader.path is not None and os.access(reader.path, os.W_OK) and is_wal(reader.path))


_OF_LANES = "lane IN (SELECT id FROM rb_lane WHERE buffer = :buffer)"
_OF_WORKERS = "worker_id IN (SELECT id FROM rb_worker WHERE buffer = :buffer)"
#: What a buffer has without groups and checkpoints, and whose it is.
_TRACES = (
    *(("rb_tally", _OF_LANES), ("rb_activity", _OF_WORKERS), ("rb_waiter", _OF_WORKERS)),
    *((f"rb_{name}", "buffer = :buffer") for name in ("lane", "worker", "batch", "event", "history", "cursor")),
    ("rb_buffer", "name = :buffer"),
)


def forget_buffer(reader: Reader, name: str) -> None:
    """Remove all traces of a buffer that nobody has open: lanes, counts, draws, workers, events, cursors.

    Raises InputError, and removes nothing, if it has groups or checkpoints.
    """

    def forget(tx: Transaction) -> None:
        groups = tx.value(f"SELECT count(*) FROM rb_group WHERE {_OF_LANES}", buffer=name)  # noqa: S608
        if groups or tx.value("SELECT count(*) FROM rb_checkpoint WHERE buffer = :buffer", buffer=name):
            raise InputError(f"buffer {name} has {groups} groups, or checkpoints: it isn't forgotten")
        for table, of_buffer in _TRACES:
            tx.execute(text(f"DELETE FROM {table} WHERE {of_buffer}"), {"buffer": name})  # noqa: S608

    with open_writer(reader) as writer:
        writer.write(forget)


def policy_of(file: str) -> str | None:
    """Return the policy of a snapshot, None for any. Raises SnapshotError or SchemaError when it isn't a snapshot."""
    return asyncio.run(read_snapshot_facts(file)).get("policy")


@dataclass(frozen=True, slots=True)
class Target:
    """A database to load a snapshot into, possibly a SQLite file that doesn't exist yet. `where` has no password."""

    url: str
    where: str

    @classmethod
    def at(cls, url: str) -> Target:
        """Return the database of a URL or path. Connects to nothing yet."""
        parsed = url_or_path(url)
        if is_memory(parsed):
            raise ConfigError("a SQLite database in memory would be gone with this command; give a file or a server")
        return cls(parsed.render_as_string(hide_password=False), public_url(parsed))


def exists(target: Target) -> bool:
    """Return whether the database has replaybuf's tables; a SQLite file that isn't there has none."""
    path = url_or_path(target.url).database
    if target.url.startswith("sqlite") and not (path and os.path.exists(path)):
        return False
    try:
        open_reader(target.url).read(lambda tx: None)
    except NotADatabaseError:
        return False
    return True
