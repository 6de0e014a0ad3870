"""Engines, one for each database: connections, transactions, locks, the meaning of errors, and their thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.database import Access, Database


def open_database(access: Access) -> Database:
    """Return a database, which doesn't connect yet. Only its own driver is imported."""
    if access.is_sqlite:
        from replaybuf.storage.sql.engine.sqlite import SqliteDatabase

        return SqliteDatabase(access)
    from replaybuf.storage.sql.engine.postgres import PostgresDatabase

    return PostgresDatabase(access)
