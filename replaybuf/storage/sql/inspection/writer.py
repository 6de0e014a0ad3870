"""Opening a database to mend or upgrade it, without other writers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from replaybuf.errors import NotADatabaseError, SchemaError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.sql.engine.sqlite_files import refuse_network_filesystem
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.revisions import HEAD, REVISIONS, check_revision

T = TypeVar("T")

_LOCK_TIMEOUT = 30.0
_LOG_TIMEOUT_MS = 2000


@contextmanager
def open_writer(reader: Reader) -> Iterator[Writer]:
    """Yield a writer for the database of a reader. Opening a SQLite file for writing changes its journal."""
    with asyncio.Runner() as runner:
        engine = open_database(reader.url, durability="full", lock_timeout=_LOCK_TIMEOUT)
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

    def empty_log(self) -> bool:
        """Copy a SQLite file's log into the file and restart it; return False while another process reads from it."""
        assert isinstance(self._engine, SqliteDatabase)
        return self._runner.run(_empty_log(self._engine))


async def _empty_log(engine: SqliteDatabase) -> bool:
    def work(connection: sqlite3.Connection) -> bool:
        connection.execute(f"PRAGMA busy_timeout = {_LOG_TIMEOUT_MS}")
        return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    return await engine.outside(work)


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
