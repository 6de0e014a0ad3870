"""One connection to PostgreSQL: its settings, files and password, and the state kept per connection.

asyncpg reads certificates and password files anew for each connection, and a password function is called for each.
Client (`engine.thread`) and server notice within `SILENCE_SECONDS` that the other is silent (a cut network, a host
without power), so that the client doesn't wait forever for an answer, and the server holds no locks for a dead client.
"""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from replaybuf.common import passwords
from replaybuf.errors import UnreachableError
from replaybuf.storage.sql.engine import thread
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.locks import Stamp, next_stamp
from replaybuf.storage.sql.engine.urls import Host, driver_arguments

#: Idle-in-transaction timeout: a transaction with a silent client (a stopped process) is rolled back, to free its
#: locks. The longest pause of a working client is a snapshot's write of a batch to a slow disk.
_IDLE_SECONDS = 300


class ServerState(NamedTuple):
    """A server's role and timeline; None for values that it doesn't report. A standby has no timeline here.

    `started` is the same for connections by different addresses, until the server's next start.
    """

    timeline: int | None = None
    is_standby: bool = False
    started: datetime | None = None
    process: int | None = None

    def is_superseded(self, followed: ServerState) -> bool:
        """Return whether this is an old primary, superseded by the followed server; it gets no more writes."""
        return self.timeline is not None and followed.timeline is not None and self.timeline < followed.timeline


_ASK_STATE = """
SELECT CASE WHEN pg_is_in_recovery() THEN NULL
       ELSE CAST(CAST('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) AS bit(32)) AS bigint) END,
    pg_is_in_recovery(), pg_postmaster_start_time(), pg_backend_pid()
"""


class Connector:
    """Makes connections, whose password comes from `password`, or else from the environment's function."""

    def __init__(self, access: Access) -> None:
        url, password = access.url, access.password
        if password is None and not url.password and (setting := os.environ.get(passwords.VARIABLE)):
            password = passwords.password_function(setting)
        self._where, self._password = access.where, password
        idle, interval, count = thread.keepalive()
        settings = {
            "jit": "off",
            "lock_timeout": str(max(1, int(access.lock_timeout * 1000))),
            "tcp_keepalives_idle": str(idle),
            "tcp_keepalives_interval": str(interval),
            "tcp_keepalives_count": str(count),
            "tcp_user_timeout": str(thread.SILENCE_SECONDS * 1000),
            "idle_in_transaction_session_timeout": str(_IDLE_SECONDS * 1000),
            # Every BEGIN has the isolation level and READ ONLY: a database or role may have other defaults, and a
            # connection pooler such as PgBouncer may drop a connection's settings. (Reads use the server's own
            # synchronous_commit.)
            "default_transaction_read_only" if access.read_only else "synchronous_commit": "on",
        }
        self._arguments = driver_arguments(url, settings) | {"connection_class": Connection}

    async def connect(self, host: Host | None = None) -> Connection:
        """Connect to one of the URL's hosts, or as the driver chooses. Raises asyncpg's errors, and ReplayBufError."""
        options = dict(self._arguments)
        if host is not None:
            options |= {"host": host.name, "port": host.port}
        if self._password is not None:
            try:
                options["password"] = await passwords.ask(self._password, options["timeout"])
            except passwords.NoPasswordError as error:
                raise UnreachableError(f"can't connect to {self._where}: {error}", reason="credentials") from error
        try:
            connection: Connection = await asyncpg.connect(**options)
        except UnicodeDecodeError:  # which has the bytes of the file
            raise UnreachableError(
                f"can't connect to {self._where}: a file of its passwords or settings is no text in UTF-8",
                reason="credentials",
            ) from None
        return connection


class Connection(asyncpg.Connection):
    """asyncpg's connection, with numbered transactions (`next_stamp`) and its server's role and timeline."""

    __slots__ = ("_stamp", "has_written", "server", "used_at")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stamp: Stamp | None = None
        #: Whether its running transaction has sent any statement but queries.
        self.has_written = False
        #: The server's role and timeline when the connection was made, as far as it was asked.
        self.server = ServerState()
        #: When it was given back to its pool, by the monotonic clock.
        self.used_at = 0.0

    async def ask_state(self) -> None:
        """Ask the server for its role and timeline, and remember them."""
        with contextlib.suppress(  # a server that only speaks PostgreSQL's protocol has no WAL
            asyncpg.SyntaxOrAccessError, asyncpg.FeatureNotSupportedError, asyncpg.ObjectNotInPrerequisiteStateError
        ):
            row: Any = await self.fetchrow(_ASK_STATE)
            self.server = ServerState(*row)

    def next_stamp(self) -> Stamp:
        """Return the stamp of the next transaction."""
        self._stamp = next_stamp(self._stamp)
        return self._stamp

    def same_server(self) -> str:
        """Return a statement that fails if another server answers than at connect; empty where that can't happen.

        A pooler may switch to another server and keep its clients' connections.
        """
        timeline, process = self.server.timeline, self.server.process
        if timeline is None or process == self.get_server_pid():
            return ""
        return _SAME_SERVER.format(timeline=f"{timeline:08X}")


# This text also appears in the server's log, after "invalid input syntax for type integer:".
_OTHER_SERVER = "replaybuf: another server than before answers on this connection"
_SAME_SERVER = f"""SELECT CASE
    WHEN pg_is_in_recovery() THEN CAST(concat('{_OTHER_SERVER}: a standby at ', pg_last_wal_replay_lsn()) AS int)
    WHEN left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) = '{{timeline}}' THEN 1
    ELSE CAST(concat('{_OTHER_SERVER}: a primary at ', pg_current_wal_insert_lsn()) AS int) END;"""


def is_other_server(error: BaseException) -> bool:
    """Return whether an error was raised by the statement of `Connection.same_server`."""
    return getattr(error, "sqlstate", None) == "22P02" and _OTHER_SERVER in str(error)
