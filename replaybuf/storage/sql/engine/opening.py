"""The engine for a URL."""

from __future__ import annotations

from sqlalchemy.engine import URL

from replaybuf.storage.sql.engine.port import Engine
from replaybuf.storage.sql.engine.postgres import PostgresEngine
from replaybuf.storage.sql.engine.sqlite import SqliteEngine


def open_engine(
    url: URL,
    *,
    durability: str = "normal",
    lock_timeout: float = 30.0,
    reconnect_timeout: float = 60.0,
    read_only: bool = False,
) -> Engine:
    """Return the engine for a URL from `parse_url`. Connects to nothing yet."""
    if url.get_backend_name() == "sqlite":
        return SqliteEngine(url, durability=durability, lock_timeout=lock_timeout, read_only=read_only)
    return PostgresEngine(url, lock_timeout=lock_timeout, reconnect_timeout=reconnect_timeout, read_only=read_only)
