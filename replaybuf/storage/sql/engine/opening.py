"""The database for a URL."""

from __future__ import annotations

from sqlalchemy.engine import URL

from replaybuf.common.passwords import PasswordFunction
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.sqlite import SqliteDatabase
from replaybuf.storage.values import LOCK_SECONDS, RECONNECT_SECONDS


def open_database(
    url: URL,
    *,
    durability: str = "normal",
    lock_timeout: float = LOCK_SECONDS,
    reconnect_timeout: float = RECONNECT_SECONDS,
    read_only: bool = False,
    ours_only: bool = False,
    password: PasswordFunction | None = None,
) -> Database:
    """Return the database for a URL from `parse_url`. Doesn't connect yet.

    With `ours_only`, a SQLite file of another program is refused and not changed. PostgreSQL's `password` is called
    before each connection.
    """
    if url.get_backend_name() == "sqlite":
        return SqliteDatabase(
            url,
            durability=durability,
            lock_timeout=lock_timeout,
            read_only=read_only,
            ours_only=ours_only,
        )
    from replaybuf.storage.sql.engine.postgres import PostgresDatabase  # which imports a driver of its own

    return PostgresDatabase(
        url,
        lock_timeout=lock_timeout,
        reconnect_timeout=reconnect_timeout,
        read_only=read_only,
        password=password,
    )
