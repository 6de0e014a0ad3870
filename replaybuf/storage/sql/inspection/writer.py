"""Opens a database for repairs and upgrades, without other writers; removes buffers; finds what is loaded where.

The schema is upgraded by the alembic chain in `migrations`, over SQLAlchemy connections, which only alembic and its
scripts need.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, NullPool, create_engine, event, update
from sqlalchemy.ext.asyncio import create_async_engine

from replaybuf.errors import ConfigError, InputError, LockedError, StorageError
from replaybuf.storage.sql.copies.snapshot_file import BUFFER, read_snapshot_facts, snapshot_file
from replaybuf.storage.sql.engine import locks, open_database
from replaybuf.storage.sql.engine.database import Access, Database
from replaybuf.storage.sql.engine.driver_errors import translated
from replaybuf.storage.sql.engine.sqlite_connection import connect
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE, SqliteTransaction
from replaybuf.storage.sql.engine.sqlite_files import refuse_network_filesystem
from replaybuf.storage.sql.engine.thread import KeepaliveLoop
from replaybuf.storage.sql.engine.transaction import Transaction, after_commit, on_commit, on_statement
from replaybuf.storage.sql.engine.urls import is_memory, url_or_path
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.schema import HEAD, REVISIONS, check_schema
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import DIGEST, info

T = TypeVar("T")

_LOCKED_SECONDS = 0.2


@contextmanager
def open_writer(reader: Reader) -> Iterator[Writer]:
    """Yield a writer for the database of a reader. Opening a SQLite file for writing changes its journal mode."""
    with asyncio.Runner(loop_factory=KeepaliveLoop) as runner:
        engine = open_database(Access(reader.url, durability="full"))
        try:
            yield Writer(engine, runner)
        finally:
            runner.run(engine.dispose())


class Writer:
    """Runs functions in exclusive write transactions of a database."""

    def __init__(self, engine: Database, runner: asyncio.Runner) -> None:
        self._engine, self._runner = engine, runner

    def write(self, function: Callable[[Transaction], T]) -> T:
        """Run `function(tx)` in a transaction, commit it, and return the result."""
        return self._runner.run(self._engine.write(function, alone=True))

    def excludes_others(self) -> bool:
        """Return whether a transaction that is to be alone keeps out another one, as a restore needs."""

        async def work(engine: Database) -> bool:
            async with engine.transaction(write=True, alone=True):
                try:
                    await engine.write(lambda tx: None, patience=_LOCKED_SECONDS)
                except LockedError:
                    return True
            return False

        # SQLite has one writer at a time, and this process one connection to write.
        return self._engine.dialect is SQLITE or self._runner.run(work(self._engine))


def upgrade_database(reader: Reader) -> tuple[str | None, str]:
    """Upgrade the schema, or create it in an empty database; return the revisions before and after.

    Raises StorageError for another application's database, and for a newer schema.
    """
    # Checked before it is opened for writing, which changes the journal mode of a SQLite file.
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
        asyncio.run(over_sqlalchemy(Access(reader.url, durability="full"), upgrade))
    return before, HEAD


def _check_owner(tx: Transaction, where: str) -> None:
    revision = tx.revision()
    if revision is None and (tables := tx.values("{tables}")):
        names = ", ".join(sorted(tables)[:3])
        raise StorageError(
            f"{where} belongs to something else (it has tables {names}); nothing was changed", reason="not a database"
        )
    if revision not in REVISIONS:
        check_schema(tx, where)


_OWN_LANES = "lane IN (SELECT id FROM rb_lane WHERE buffer = :buffer)"
#: The rows of a buffer other than groups and checkpoints, and their conditions.
_TRACES = (
    ("rb_past", f"{_OWN_LANES} AND removed_at IS NULL"),  # of draws; others wait for the sweep, with their payloads
    ("rb_tally", _OWN_LANES),
    ("rb_annotation", "draw IN (SELECT id FROM rb_batch WHERE buffer = :buffer)"),
    *(
        (f"rb_{name}", "buffer = :buffer")
        for name in ("lane", "worker", "batch", "event", "history", "cursor", "prompt")
    ),
    ("rb_buffer", "name = :buffer"),
)


def forget_buffer(reader: Reader, name: str) -> None:
    """Remove all rows of a buffer that no process has open: lanes, counts, draws, workers, events, cursors.

    Raises InputError, and removes nothing, if it has groups or checkpoints.
    """

    def forget(tx: Transaction) -> None:
        groups = tx.value(f"SELECT count(*) FROM rb_group WHERE {_OWN_LANES}", buffer=name)  # noqa: S608
        if groups or tx.value("SELECT count(*) FROM rb_checkpoint WHERE buffer = :buffer", buffer=name):
            raise InputError(f"buffer {name} has {groups} groups, or checkpoints: it isn't forgotten")
        for table, of_buffer in _TRACES:
            tx.change(f"DELETE FROM {table} WHERE {of_buffer}", buffer=name)  # noqa: S608

    with open_writer(reader) as writer:
        writer.write(forget)


def saved_buffer(folder: Path) -> tuple[Path, str, str | None]:
    """Return the file of a snapshot, its name of the buffer, and its policy, None for any.

    Raises SnapshotError or StorageError.
    """
    file = snapshot_file(folder)
    facts = asyncio.run(read_snapshot_facts(str(file)))
    return file, facts[BUFFER], facts.get("policy")


def target_at(url: str) -> Access:
    """Return the access to a database that groups are loaded into, perhaps to a SQLite file that doesn't exist yet."""
    access = Access(url_or_path(url))
    if is_memory(access.url):
        raise ConfigError("a SQLite database in memory would be gone with this command; give a file or a server")
    return access


def exists(target: Access) -> bool:
    """Return whether the database has replaybuf's tables; False for a missing SQLite file."""
    if target.path is not None and not os.path.exists(target.path):
        return False
    try:
        open_reader(target.url.render_as_string(hide_password=False)).read(lambda tx: None)
    except StorageError as error:
        if error.reason != "not a database":
            raise
        return False
    return True


async def over_sqlalchemy(access: Access, work: Callable[[Connection], T]) -> T:
    """Run `work(connection)` in a write transaction that blocks all other writers, and commit it."""
    with translated(access):
        if access.is_sqlite:
            engine = create_engine("sqlite://", creator=lambda: connect(access), poolclass=NullPool)
            with engine.connect() as connection:
                return _transact(connection, work, "BEGIN IMMEDIATE")
        from replaybuf.storage.sql.engine.postgres_servers import Servers

        servers = Servers(access)
        remote = create_async_engine(
            "postgresql+asyncpg://",
            connect_args={"async_creator_fn": lambda **_: servers.connect(), "prepared_statement_cache_size": 0},
            poolclass=NullPool,
        )
        async with remote.connect() as other:
            timeout = f"SET LOCAL lock_timeout = {round(access.lock_timeout * 1000)}"
            # A missing synchronous standby would block the commit for ever. If it takes over without the upgrade, its
            # older schema is detected by every process.
            local_commit = "SET LOCAL synchronous_commit = local"
            return await other.run_sync(_transact, work, timeout, local_commit, locks.first(alone=True))


def _transact(connection: Connection, work: Callable[[Connection], T], *begin: str) -> T:
    def tell(_connection: Any, _cursor: Any, sql: str, values: Any, _context: Any, many: bool) -> None:
        on_statement(sql, values, many=many)

    event.listen(connection, "before_cursor_execute", tell)
    for statement in begin:
        connection.exec_driver_sql(statement)
    result = work(connection)
    on_commit()
    connection.commit()
    after_commit()
    return result


def transaction_of(connection: Connection) -> Transaction:
    """Return the running transaction of a connection of SQLAlchemy, from `over_sqlalchemy`."""
    raw: Any = connection.connection.driver_connection
    if connection.dialect.name == SQLITE.name:
        return SqliteTransaction(raw)
    from replaybuf.storage.sql.engine.postgres_transaction import PostgresTransaction

    return PostgresTransaction(raw)


def migrations_folder() -> Path:
    """Return the alembic scripts: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[3]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise StorageError("the migration scripts are missing from this installation; reinstall replaybuf", reason="schema")


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the alembic chain up to `revision` on this connection, in its transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
    # The snapshot's rows are no longer those that were saved.
    connection.execute(update(info).where(info.c.name == DIGEST).values(value=""))
