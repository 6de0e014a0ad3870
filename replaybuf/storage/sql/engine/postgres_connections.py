"""Connections to PostgreSQL: their settings, and how each side notices that the other is gone.

Both sides notice within `SILENCE_SECONDS` when the other falls silent (a cut network, a host without power), so that
the client doesn't wait for an answer that will never come, and the server holds no locks for a client that is gone.
"""

from __future__ import annotations

import socket
from typing import Any

from sqlalchemy import Connection, event, exc
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from replaybuf.storage.sql.engine import sizes
from replaybuf.storage.sql.engine.identity import MARKING
from replaybuf.storage.sql.engine.sqlite_connections import JSON_OPTIONS
from replaybuf.storage.sql.engine.urls import driver_options

#: How long the other side may be silent when it should answer, before a TCP connection is given up.
SILENCE_SECONDS = 20
#: A transaction whose client does nothing for this long (a stopped process) is rolled back, to free its locks. The
#: longest pause of a working one is while a snapshot writes a batch to a slow disk.
_IDLE_SECONDS = 300
#: Of all transactions that don't ask for another. After waiting for a lock, a statement has to see what was committed
#: meanwhile: fences, counts and the creation of the schema rest on that.
ISOLATION: IsolationLevel = "READ COMMITTED"
#: How many connections a store opens at most; half of them stay open.
MOST_CONNECTIONS = 16
_WROTE = "replaybuf_wrote"


def postgres_pool(url: URL, *, lock_timeout: float, read_only: bool) -> AsyncEngine:
    """Return SQLAlchemy's engine for a PostgreSQL URL. Connects to nothing yet."""
    url, options = driver_options(url)
    settings = {"application_name": options.pop("application_name", "replaybuf"), "jit": "off"}
    settings |= {"lock_timeout": str(max(1, int(lock_timeout * 1000))), **_server_settings()}
    if not read_only:  # readers see the server's own settings
        settings["synchronous_commit"] = "on"
    else:
        settings["default_transaction_read_only"] = "on"
    # The level and READ ONLY are said in every BEGIN: a database or role may have other defaults, and a connection
    # pooler such as PgBouncer may drop the settings that a connection asks for.
    engine = create_async_engine(
        url,
        **JSON_OPTIONS,
        isolation_level=ISOLATION,
        pool_size=MOST_CONNECTIONS // 2,
        max_overflow=MOST_CONNECTIONS // 2,
        pool_timeout=lock_timeout,
        connect_args={"timeout": 10, "command_timeout": 600, **options, "server_settings": settings},
    )
    if read_only:
        engine.update_execution_options(postgresql_readonly=True)
    event.listen(engine.sync_engine, "connect", _watch_socket)
    event.listen(engine.sync_engine, "checkout", _check_open)
    event.listen(engine.sync_engine, "before_cursor_execute", _note_writing)
    event.listen(engine.sync_engine, "before_cursor_execute", _refuse_too_large)
    return engine


def _server_settings() -> dict[str, str]:
    idle, interval, count = _keepalive()
    return {
        "tcp_keepalives_idle": str(idle),
        "tcp_keepalives_interval": str(interval),
        "tcp_keepalives_count": str(count),
        "tcp_user_timeout": str(SILENCE_SECONDS * 1000),
        "idle_in_transaction_session_timeout": str(_IDLE_SECONDS * 1000),
    }


def _keepalive() -> tuple[int, int, int]:
    """Return after how many seconds of silence to probe the other side, at what interval, and how many times."""
    return max(1, SILENCE_SECONDS // 2), max(1, SILENCE_SECONDS // 4), 2


def _go_on(connection: Any) -> None:
    # An executemany that waits until it may send more would go on waiting when the connection is lost.
    if (protocol := getattr(connection, "_protocol", None)) is not None:
        protocol.resume_writing()


def _watch_socket(connection: Any, _record: Any) -> None:
    connection.driver_connection.add_termination_listener(_go_on)
    transport = getattr(connection.driver_connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    idle, interval, count = _keepalive()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", count),
        ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # not every system has all options
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_open(connection: Any, _record: Any, _proxy: Any) -> None:
    # The pool then makes a new one. A connection that closed unnoticed fails at the first statement, which is repeated.
    if connection.driver_connection.is_closed() or connection.driver_connection.is_in_transaction():
        raise exc.DisconnectionError


def _note_writing(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
    if not statement.startswith(("SELECT", MARKING)):
        connection.info[_WROTE] = True


def _refuse_too_large(_: Any, _cursor: Any, _statement: str, values: Any, _context: Any, many: bool) -> None:
    # The server would end the connection, and the same would be sent again and again. (Groups, which come as many rows,
    # are looked at before.)
    if not many and sizes.has_large(values):
        sizes.POSTGRES.check("what was to be stored", values)


def forget_writing(connection: Connection) -> None:
    """Reset `has_written`."""
    connection.info[_WROTE] = False


def has_written(connection: Connection) -> bool:
    """Return whether anything but queries was sent since `forget_writing`."""
    return bool(connection.info.get(_WROTE, True))
