"""Choosing the server to connect to, and detecting a server that lacks commits seen by this process.

Every write transaction raises the commit stamp of its connection (`engine.commit_stamp`). The WAL keeps the order of
commits: a server with a process's last stamps has all its commits. So stamps are compared whenever a connection
reaches another server than before: a promoted standby, or the same server after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

import asyncpg
from sqlalchemy.engine import URL

from replaybuf.errors import ConfigError, ReplayBufError
from replaybuf.storage.sql.engine.commit_stamp import Stamp
from replaybuf.storage.sql.engine.errors import is_telling
from replaybuf.storage.sql.engine.postgres_connect import Connection, Connector
from replaybuf.storage.sql.engine.servers import AskedServer, Standing, choose
from replaybuf.storage.sql.engine.urls import Host, hosts_of, public_url, session_attrs

#: How long to wait for other servers' answers after a suitable one has answered.
_GRACE_SECONDS = 1.0
_CLOSING_SECONDS = 2.0
#: How long a connection to the followed server may take before all servers are tried.
_DIRECT_SECONDS = 2.0
#: How long commit stamps are remembered: rows of connections are deleted a day later (`statements.upkeep`).
_REMEMBERED_SECONDS = 6 * 86_400

_logger = logging.getLogger("replaybuf.database")


class Seen:
    """The last commits of this process: the stamp of each connection's row."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}  # a stamp, and the time when its commit was known

    def add(self, stamp: Stamp, began: float) -> None:
        """Record the commit of a transaction that began at `began`, a time of the monotonic clock.

        Stamps known before `began` precede it in the WAL, and are dropped.
        """
        self._last = {row: seen for row, seen in self._last.items() if seen[1] >= began}
        self._last[stamp.row] = stamp.number, time.monotonic()

    def clear(self) -> None:
        self._last.clear()

    @property
    def marks(self) -> dict[str, int]:
        """The last stamp of each connection."""
        oldest = time.monotonic() - _REMEMBERED_SECONDS
        return {row: number for row, (number, at) in self._last.items() if at > oldest}


class Servers:
    """Chooses the server to connect to out of a URL's hosts; one per open store.

    `lost` describes the missing commits, once a connected server lacked commits of this process.
    """

    def __init__(self, url: URL, connector: Connector, *, writes: bool) -> None:
        self._connector, self._writes, self._where = connector, writes, public_url(url)
        attrs = session_attrs(url)
        if writes and attrs in ("read-only", "standby", "prefer-standby"):
            raise ConfigError(
                f"the PostgreSQL url: target_session_attrs={attrs} is for readers; an open buffer writes, and needs "
                "read-write or primary"
            )
        hosts: list[Host | None] = [*dict.fromkeys(hosts_of(url))]
        self._hosts = hosts or [None]
        # Readers' `target_session_attrs` are the driver's.
        self._asks = writes or (bool(hosts) and attrs is None)
        #: The host of the last connection, of several.
        self.last: Host | None = None
        self._meeting = asyncio.Lock()
        self.followed: Standing | None = None
        self.seen = Seen()
        self.lost = ""

    async def connect(self) -> Connection:
        """Return a connection to the server that the URL asks for."""
        if not self._asks:
            return await self._connector.connect()
        if self.last is not None:
            try:
                async with asyncio.timeout(_DIRECT_SECONDS):
                    return await self._connect_to([self.last])
            except Exception:
                self.last = None
        return await self._connect_to(self._hosts)

    def is_left(self, standing: Standing) -> bool:
        """Return whether a connection's server is an old primary, which gets no more writes of this process."""
        return self.followed is not None and standing.is_left(self.followed)

    def accept(self) -> None:
        """Accept the state of the current server, after a restore."""
        if self.lost:
            self.lost = ""
            self.seen.clear()

    async def _connect_to(self, hosts: Sequence[Host | None]) -> Connection:
        opened: dict[Host | None, Connection] = {}
        try:
            chosen = self._choose(await self._ask_all(hosts, opened))
            await self._meet(opened[chosen.host], chosen)
            connection = opened.pop(chosen.host)
        finally:
            if opened:
                await asyncio.shield(asyncio.gather(*(one.end(_CLOSING_SECONDS) for one in opened.values())))
        self.last = chosen.host
        return connection

    def _choose(self, found: Sequence[AskedServer]) -> AskedServer:
        return choose(found, self.followed, self._where, writes=self._writes)

    async def _ask_all(self, hosts: Sequence[Host | None], opened: dict[Host | None, Connection]) -> list[AskedServer]:
        """Connect to all hosts and read their roles; hosts that are slower than a suitable one are skipped.

        Raises the driver's error for a single host; for several, the first one that explains why none can be used.
        """
        tasks = {asyncio.ensure_future(self._open(host, opened)): host for host in hosts}
        pending, found, errors = set(tasks), dict[Host | None, AskedServer](), list[Exception]()
        try:
            while pending:
                patience = _GRACE_SECONDS if self._would_do(found) else None
                done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    host = tasks[task]
                    try:
                        found[host] = AskedServer(host, task.result())
                    except Exception as error:
                        errors.append(error)
                        problem = f"can't be used ({str(error) or type(error).__name__})"
                        found[host] = AskedServer(host, problem=problem)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not self._would_do(found):
            for failed in errors:
                if len(hosts) == 1 or is_telling(failed):
                    raise failed
        return [found.get(host) or AskedServer(host, problem="does not answer") for host in hosts]

    def _would_do(self, found: Mapping[Host | None, AskedServer]) -> bool:
        try:
            self._choose([*found.values()])
        except ReplayBufError:
            return False
        return True

    async def _open(self, host: Host | None, opened: dict[Host | None, Connection]) -> Standing:
        opened[host] = connection = await self._connector.connect(host)
        return await connection.ask_standing()

    # Another server than before

    async def _meet(self, connection: Connection, chosen: AskedServer) -> None:
        """Compare the remembered commit stamps with the server's, if it isn't the same server as before."""
        standing = connection.standing
        if not self._writes or standing.timeline is None:
            return
        async with self._meeting:
            before = self.followed
            if before is not None and (standing.timeline, standing.instance) == (before.timeline, before.instance):
                return
            if before is not None and standing.is_left(before):  # another task has met a newer timeline meanwhile
                raise ConnectionResetError(f"{chosen} is an old primary")
            if standing.timeline > 1:
                await _enter(connection, standing.timeline)
            if before is not None and standing.timeline > (before.timeline or 0):
                who = "it is another server" if chosen.host is None else f"this process follows {chosen}"
                _logger.warning("%s: %s from now on (timeline %d)", self._where, who, standing.timeline)
            if (marks := self.seen.marks) and not self.lost:
                there = dict(map(tuple, await connection.fetch(_MARKS, list(marks))))
                if any(there.get(row, 0) < number for row, number in marks.items()):
                    self.lost = self._commits_lost(chosen, standing, marks, there)
                    _logger.error("%s", self.lost)
            self.followed = standing

    def _commits_lost(
        self, chosen: AskedServer, standing: Standing, marks: dict[str, int], there: dict[str, int]
    ) -> str:
        newest = max(there.values(), default=0)
        known = f"; the last one that is there began at {_time(newest)}" if newest else ""
        return (
            f"{self._where}: {chosen} (timeline {standing.timeline}) lacks transactions that this process saw "
            f"committed, the last of them begun at {_time(max(marks.values()))}{known}. It took over before it had "
            "them, and what this process does next would rest on them, so nothing was changed. Go back to a step whose "
            "checkpoint is there, with its weights: restore(step), and checkpoints() lists them; or build a new "
            "buffer, which accepts what is there"
        )


# These writes needn't be replicated: every later commit follows them in the WAL, and on another timeline they are
# repeated.
_UNREPLICATED = "SELECT set_config('synchronous_commit', 'local', true)"
_MARKS = "SELECT name, value FROM rb_counter WHERE name = ANY($1)"
# Sequence numbers of lost transactions must not be reused, since they identify leases. The first writing
# process on a new timeline advances the sequences, before other writers continue there.
_ENTER = f"""
WITH local AS MATERIALIZED ({_UNREPLICATED}),
    new AS (INSERT INTO rb_info (name, value) VALUES ($1, '') ON CONFLICT (name) DO NOTHING RETURNING name)
SELECT setval(CAST(oid AS regclass), nextval(CAST(oid AS regclass))
    + CASE relname WHEN 'rb_uid' THEN 1000000 ELSE 10000 END)
FROM local, pg_class, new WHERE relkind = 'S' AND relname LIKE 'rb\\_%' AND pg_table_is_visible(oid)
"""  # noqa: S608


async def _enter(connection: Connection, timeline: int) -> None:
    """Record a new timeline of the database, and advance the sequences."""
    try:
        await connection.fetch(_ENTER, f"timeline {timeline}")
    except (asyncpg.UndefinedTableError, asyncpg.ReadOnlySQLTransactionError):
        return  # no tables yet, or a read-only server
    except asyncpg.InsufficientPrivilegeError as error:
        _logger.warning("numbers of groups may be given a second time after a failover: %s", error)


def _time(microseconds: int) -> str:
    whole, part = divmod(microseconds, 1_000_000)
    return f"{time.strftime('%H:%M:%S', time.gmtime(whole))}.{part // 1000:03d} UTC"
