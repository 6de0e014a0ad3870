"""The database of an access."""

from __future__ import annotations

from replaybuf.storage.sql.engine.database import Access, Database
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase


def open_database(access: Access) -> Database:
    """Return a database, which doesn't connect yet."""
    if access.is_sqlite:
        return SqliteDatabase(access)
    from replaybuf.storage.sql.engine.postgres import PostgresDatabase  # which imports a driver of its own

    return PostgresDatabase(access)
