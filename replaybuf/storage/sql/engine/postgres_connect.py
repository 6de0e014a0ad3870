"""One connection to PostgreSQL: made with the current certificates and password, with the state kept per connection."""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.engine import URL

from replaybuf import passwords
from replaybuf.errors import ConfigError, StorageError, UnreachableError
from replaybuf.passwords import PasswordFunction
from replaybuf.storage.sql.engine.commit_stamp import Stamp, next_stamp
from replaybuf.storage.sql.engine.postgres_dialect import OLDEST_VERSION
from replaybuf.storage.sql.engine.servers import UNKNOWN
from replaybuf.storage.sql.engine.tls import OPTIONS, tls_of
from replaybuf.storage.sql.engine.urls import driver_options, is_local, public_url

#: Default of `connect_timeout`, in seconds, for a connection and for a password function's answer.
CONNECT_SECONDS = 10


@dataclass(frozen=True, slots=True, repr=False)
class Connector:
    """Makes connections with a URL's certificates and passwords."""

    where: str
    tls: Mapping[str, str]
    passfile: str | None
    function: PasswordFunction | None
    writes: bool

    async def connect(self, **options: Any) -> asyncpg.Connection[Any]:
        """Connect as `asyncpg.connect` does. Raises its errors, and ReplayBufError."""
        seconds = float(options["timeout"])
        try:
            async with asyncio.timeout(seconds):
                options |= await self._read(options)
            if self.function is not None:
                options["password"] = await passwords.ask(self.function, seconds)
        except (ConfigError, passwords.NoPasswordError) as error:
            raise UnreachableError(f"can't connect to {self.where}: {error}", reason="credentials") from error
        except TimeoutError as error:
            what = "the files of its certificates or its password could not be read"
            raise UnreachableError(
                f"can't connect to {self.where}: {what} within {seconds:g} s", reason="credentials"
            ) from error
        connection: asyncpg.Connection[Any] = await asyncpg.connect(**options)
        version = connection.get_server_version()
        if self.writes and version.major < OLDEST_VERSION // 10_000:
            connection.terminate()
            raise StorageError(
                f"{self.where} is PostgreSQL {version.major}.{version.micro}, which is too old: replaybuf needs "
                f"{OLDEST_VERSION // 10_000} or newer (reading works)"
            )
        return connection

    async def _read(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return connect arguments read from files: TLS, and the password unless it is known from elsewhere."""
        local = is_local(options.get("host"))
        found: dict[str, Any] = {"ssl": False if local else await passwords.in_thread(partial(tls_of, self.tls))}
        path = self.passfile or passwords.default_passfile()
        known = self.function is not None or options.get("password") or "PGPASSWORD" in os.environ
        if path is not None and not known:
            password = await passwords.in_thread(partial(self._from_file, path, options))
            found |= {} if password is None else {"password": password}
        return found

    def _from_file(self, path: str | Path, options: Mapping[str, Any]) -> str | None:
        user = options.get("user") or os.environ.get("PGUSER") or getpass.getuser()
        database = options.get("database") or os.environ.get("PGDATABASE") or user
        places = _places(options)
        found = passwords.password_in(path, places, database, user)
        if found is None and self.passfile is not None:
            line = ":".join((*places[0], database, user))
            raise ConfigError(f"passfile: {path} has no line for {line} (host:port:database:user:password, * for any)")
        return found


def _places(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return hosts and ports in a password file's form."""
    host = options.get("host") or os.environ.get("PGHOST") or "localhost"
    hosts = host.split(",") if isinstance(host, str) else list(host)
    port = options.get("port") or os.environ.get("PGPORT") or 5432
    ports = list(port) if isinstance(port, (list, tuple)) else str(port).split(",")
    return [(one, str(ports[at if len(ports) > 1 else 0])) for at, one in enumerate(hosts)]


def connector(
    url: URL, *, password: PasswordFunction | None = None, writes: bool = True
) -> tuple[URL, dict[str, Any], Connector]:
    """Return a URL without options, the options as arguments of asyncpg, and the Connector for them.

    Without `password`, and with none in the URL, the environment's password function is used, if it names one.
    """
    where = public_url(url)
    url, options = driver_options(url)
    if password is None and not url.password and (named := os.environ.get(passwords.VARIABLE)):
        password = passwords.password_function(named)
    tls = {name: options.pop(name) for name in ("ssl", *OPTIONS) if name in options}
    options.setdefault("timeout", CONNECT_SECONDS)
    return url, options, Connector(where, tls, options.pop("passfile", None), password, writes)


class Connection(asyncpg.Connection):
    """asyncpg's connection, with numbered transactions (`next_stamp`) and its server's role and timeline."""

    __slots__ = ("_stamp", "standing")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stamp: Stamp | None = None
        #: The server's role and timeline when the connection was made.
        self.standing = UNKNOWN

    def next_stamp(self) -> Stamp:
        """Return the stamp of the next transaction."""
        self._stamp = next_stamp(self._stamp)
        return self._stamp

    def same_server(self) -> str:
        """Return a statement that fails if another server answers than at connect; empty where that can't happen.

        A pooler may switch to another server and keep its clients' connections.
        """
        timeline, process = self.standing.timeline, self.standing.process
        if timeline is None or process == self.get_server_pid():
            return ""
        return _SAME_SERVER.format(timeline=f"{timeline:08X}")


# This text also appears in the server's log, after "invalid input syntax for type integer:".
_OTHER = "replaybuf: another server than before answers on this connection"
_SAME_SERVER = f"""SELECT CASE
    WHEN pg_is_in_recovery() THEN CAST(concat('{_OTHER}: a standby at ', pg_last_wal_replay_lsn()) AS int)
    WHEN left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) = '{{timeline}}' THEN 1
    ELSE CAST(concat('{_OTHER}: a primary at ', pg_current_wal_insert_lsn()) AS int) END;"""


def is_other_server(error: BaseException) -> bool:
    """Return whether an error was raised by the statement of `Connection.same_server`."""
    return getattr(error, "sqlstate", None) == "22P02" and _OTHER in str(error)
