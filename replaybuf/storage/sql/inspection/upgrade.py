"""Upgrading the schema by the alembic chain in `migrations`, over connections of SQLAlchemy.

Nothing else uses those: alembic needs them, and its scripts read the schema by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, NullPool, create_engine, delete, event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import create_async_engine

from replaybuf.errors import SchemaError
from replaybuf.storage.sql.engine import locks
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.hooks import after_commit, on_commit, on_statement
from replaybuf.storage.sql.engine.postgres_connect import connector
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES
from replaybuf.storage.sql.engine.sqlite_connection import connect_to_write
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE
from replaybuf.storage.sql.engine.transaction import Row, Session, Transaction
from replaybuf.storage.sql.schema.tables import DIGEST, info
from replaybuf.storage.values import LOCK_SECONDS

T = TypeVar("T")


async def over_sqlalchemy(url: URL, work: Callable[[Connection], T], lock_timeout: float = LOCK_SECONDS) -> T:
    """Run `work(connection)` in a write transaction that keeps out all other writers, and commit it."""
    with translated(url, lock_timeout):
        if url.get_backend_name() == "sqlite":
            engine = create_engine(
                "sqlite://", creator=lambda: connect_to_write(str(url.database), lock_timeout), poolclass=NullPool
            )
            with engine.connect() as connection:
                return _transact(connection, work, "BEGIN IMMEDIATE")
        from replaybuf.storage.sql.engine.postgres_pool import one_server

        url, options, connects = connector(await one_server(url, lock_timeout=lock_timeout))
        options.pop("application_name", None)
        if "statement_cache_size" in options:  # of SQLAlchemy, too
            options["prepared_statement_cache_size"] = options["statement_cache_size"]
        remote = create_async_engine(
            url, connect_args={"async_creator_fn": connects.connect, **options}, poolclass=NullPool
        )
        async with remote.connect() as other:
            bound = f"SET LOCAL lock_timeout = {round(lock_timeout * 1000)}"
            # A synchronous standby that is away would be waited for without an end. One that takes over without the
            # upgrade has an older schema, which everybody notices.
            here = "SET LOCAL synchronous_commit = local"
            return await other.run_sync(_transact, work, bound, here, locks.first(None, alone=True))


def _transact(connection: Connection, work: Callable[[Connection], T], *begin: str) -> T:
    event.listen(connection, "before_cursor_execute", _on_statement)
    for statement in begin:
        connection.exec_driver_sql(statement)
    result = work(connection)
    on_commit()
    connection.commit()
    after_commit()
    return result


def _on_statement(_connection: Any, _cursor: Any, sql: str, values: Any, _context: Any, many: bool) -> None:
    on_statement(sql, values, many=many)


class _SqlalchemySession(Session):
    """Runs statements on a connection of SQLAlchemy."""

    def __init__(self, connection: Connection) -> None:
        self.dialect = dialect_of(connection)
        self._connection = connection

    def fetch(self, sql: str, values: Row = ()) -> Sequence[Row]:
        result = self._connection.exec_driver_sql(sql, tuple(values))
        return result.fetchall() if result.returns_rows else ()

    def change(self, sql: str, values: Row = ()) -> int:
        return self._connection.exec_driver_sql(sql, tuple(values)).rowcount

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        self._connection.exec_driver_sql(sql, [tuple(row) for row in rows])

    def table(self, sql: str, values: Row = (), most: int | None = None) -> tuple[list[str], Sequence[Row]]:
        result = self._connection.exec_driver_sql(sql, tuple(values))
        if not result.returns_rows:
            return [], []
        return list(result.keys()), result.fetchall() if most is None else result.fetchmany(most)


def dialect_of(connection: Connection) -> Dialect:
    """Return the dialect of the database of a connection."""
    return POSTGRES if connection.dialect.name == POSTGRES.name else SQLITE


def transaction_of(connection: Connection) -> Transaction:
    """Return the transaction of a connection of SQLAlchemy."""
    return Transaction(_SqlalchemySession(connection))


def migrations_folder() -> Path:
    """Return the alembic scripts: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[3]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaError("the migration scripts are missing from this installation; reinstall replaybuf")


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the alembic chain up to `revision` on this connection, in its transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
    # The rows of a snapshot are no longer those that were saved.
    connection.execute(delete(info).where(info.c.name == DIGEST))
