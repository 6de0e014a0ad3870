"""asyncpg's own connection, below SQLAlchemy's: for what each put and take sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from replaybuf.storage.sql.engine.prepared import Driver, Row, announce

if TYPE_CHECKING:
    import asyncpg


class PostgresDriver(Driver):
    """Runs statements on a connection of asyncpg, which keeps them prepared.

    The transaction has begun, or a statement is one by itself. Errors are asyncpg's; raises OSError when the connection
    can't be used any more.
    """

    __slots__ = ("_adapted",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._adapted: Any = connection.connection.dbapi_connection

    def fetch(self, sql: str, values: Row) -> Sequence[Row]:
        announce(self._connection, sql, values)
        rows: Sequence[Row] = self._adapted.run_async(lambda raw: _fetch(raw, sql, values))
        return rows


async def _fetch(raw: asyncpg.Connection[Any], sql: str, values: Row) -> Sequence[Row]:
    try:
        return await raw.fetch(sql, *values)
    except Exception as error:
        if raw.is_closed() and not isinstance(error, OSError):
            raise ConnectionResetError(str(error)) from error
        raise


async def send(raw: asyncpg.Connection[Any], message: str) -> None:
    """Send one message, and wait for its answer. Raises OSError when the connection can't be used any more."""
    try:
        await raw.execute(message)
    except Exception as error:
        if isinstance(error, OSError) or isinstance(getattr(error, "sqlstate", None), str):
            raise
        raise ConnectionResetError(str(error)) from error  # it ended while nothing was asked


async def commit(raw: asyncpg.Connection[Any], last: Sequence[str] = ()) -> None:
    """Commit the transaction of a connection, after its last statements, in one message."""
    await send(raw, "".join(f"{statement};" for statement in (*last, "COMMIT")))
