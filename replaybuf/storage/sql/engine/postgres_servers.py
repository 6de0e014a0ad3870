"""Choosing the server to connect to, and detecting a server that lacks commits seen by this process.

A promoted standby begins a new timeline of its cluster. A process never returns to a lower one: that is an old primary,
without the transactions since the failover.

Every write transaction raises the commit stamp of its connection (`engine.locks`). The WAL keeps the order of
commits: a server with a process's last stamps has all its commits. So stamps are compared whenever a connection
reaches another server than before: a promoted standby, or the same server after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Iterable, Mapping

import asyncpg

from replaybuf.errors import AccessError, ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.locks import Stamp
from replaybuf.storage.sql.engine.postgres_connect import Connection, Connector, ServerState
from replaybuf.storage.sql.engine.urls import Host, hosts_of

#: How long to wait for the answers of several servers before one that answered is chosen.
_GRACE_SECONDS = 1.0
_CLOSING_SECONDS = 2.0
#: How long a connection to the followed server may take before all servers are tried.
_DIRECT_SECONDS = 2.0
#: How old commit stamps are compared: rows of connections are deleted a day later (`statements.upkeep`).
_REMEMBERED_SECONDS = 6 * 86_400
#: The connections whose last stamps are remembered, more than a store has at a time: an older commit was known before
#: one of these began, and precedes it in the WAL.
_MOST_STAMPS = 32

_logger = logging.getLogger("replaybuf.database")

_STANDBY = "is a standby"


def choose(
    states: Mapping[Host | None, ServerState | str], followed: ServerState | None, *, writes: bool
) -> Host | None:
    """Return the host to use: the primary of the highest timeline; for readers a standby where there is none.

    `states` has the state of each server in the order of the URL, or why it can't be used. Raises UnreachableError,
    AccessError.
    """
    reasons = {host: answer if isinstance(answer, str) else "" for host, answer in states.items()}
    fit = {host: state for host, state in states.items() if isinstance(state, ServerState)}
    if writes:
        reasons |= {host: _why_unfit(state, followed) for host, state in fit.items()}
        fit = {host: state for host, state in fit.items() if not reasons[host]}
    if not fit:
        raise _no_server_error(reasons)
    newest = max(state.timeline or 0 for state in fit.values())
    best = {host: state for host, state in fit.items() if (state.timeline or 0) == newest}
    for host, state in best.items():
        if followed is not None and state.started == followed.started:
            return host
    if writes and len({state.started for state in best.values()}) > 1:
        raise UnreachableError(
            f"{' and '.join(map(_host_text, best))} both say that they are the primary, and each has what the other "
            "lacks; end one of them, make it a standby of the other (pg_rewind), or name the servers of one cluster",
            reason="no primary",
        )
    return next(iter(best))


def _host_text(host: Host | None) -> str:
    return "the server" if host is None else str(host)


def _why_unfit(state: ServerState, followed: ServerState | None) -> str:
    """Return why a server takes no writes of this process, as the end of a sentence; an empty string if it does."""
    if followed is not None and state.is_superseded(followed):
        return f"is an old primary (timeline {state.timeline}; this process follows timeline {followed.timeline})"
    return _STANDBY if state.is_standby else ""


def _no_server_error(reasons: Mapping[Host | None, str]) -> UnreachableError | AccessError:
    listed = "; ".join(f"{_host_text(host)} {reason}" for host, reason in reasons.items())
    if all(reason == _STANDBY for reason in reasons.values()):
        return AccessError(
            f"{listed}, which takes no writes; name the primary in the url, or promote a standby (pg_ctl promote, or "
            "SELECT pg_promote())",
            reason="only standbys",
        )
    return UnreachableError(
        f"no primary can be reached: {listed}; start it, promote a standby (pg_ctl promote), or name the primary in "
        "the url; make an old primary a standby of the new one (pg_rewind)",
        reason="no primary",
    )


class Servers:
    """Chooses the server to connect to out of a URL's hosts; one per open store.

    `lost` describes the missing commits, once a connected server lacked commits of this process.
    """

    def __init__(self, access: Access) -> None:
        self._connector, self._writes, self._where = Connector(access), not access.read_only, access.where
        self._hosts: list[Host | None] = [*dict.fromkeys(hosts_of(access.url))] or [None]
        #: The host of the last connection, of several.
        self.last: Host | None = None
        self._meeting_lock = asyncio.Lock()
        self.followed: ServerState | None = None
        self._last_numbers: dict[str, int] = {}  # by the row of the stamp, that of the last commit last
        self.lost = ""

    async def connect(self) -> Connection:
        """Return a connection to the server that the URL asks for."""
        if self.last is not None:
            try:
                async with asyncio.timeout(_DIRECT_SECONDS):
                    return await self._connect_to([self.last])
            except Exception:
                self.last = None
        return await self._connect_to(self._hosts)

    def is_superseded(self, state: ServerState) -> bool:
        """Return whether a connection's server is an old primary, which gets no more writes of this process."""
        return self.followed is not None and state.is_superseded(self.followed)

    def accept(self) -> None:
        """Accept the state of the current server, after a restore."""
        if self.lost:
            self.lost = ""
            self._last_numbers.clear()

    def note_commit(self, stamp: Stamp) -> None:
        """Record a commit of this process."""
        self._last_numbers.pop(stamp.row, None)
        self._last_numbers[stamp.row] = stamp.number
        if len(self._last_numbers) > _MOST_STAMPS:
            del self._last_numbers[next(iter(self._last_numbers))]

    @property
    def marks(self) -> dict[str, int]:
        """The numbers that a server with all commits of this process has at least, by the rows of their stamps."""
        oldest = (time.time() - _REMEMBERED_SECONDS) * 1_000_000
        return {row: number for row, number in self._last_numbers.items() if number > oldest}

    async def _connect_to(self, hosts: Iterable[Host | None]) -> Connection:
        """Connect to all of these hosts, and return the connection to the one that is chosen."""
        tasks = {host: asyncio.ensure_future(self._open(host)) for host in hosts}
        waiting = set(tasks.values())
        try:
            while True:
                _, waiting = await asyncio.wait(waiting, timeout=_GRACE_SECONDS)
                try:
                    host = self._choose(tasks)
                    break
                except Exception:
                    if not waiting:
                        raise
            await self._meet(tasks[host].result(), host)
            self.last = host
            return tasks.pop(host).result()
        finally:
            if tasks:
                await asyncio.shield(_end(tasks.values()))

    async def _open(self, host: Host | None) -> Connection:
        connection = await self._connector.connect(host)
        try:
            await connection.ask_state()
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _choose(self, tasks: Mapping[Host | None, asyncio.Future[Connection]]) -> Host | None:
        """Return the host to use of those that have answered.

        If none has told its state, raises the driver's error for the first host that answered, or else for the first.
        """
        answers: dict[Host | None, ServerState | str] = {}
        errors = []
        for host, task in tasks.items():
            if not task.done():
                answers[host] = "does not answer"
            elif (error := task.exception()) is None:
                answers[host] = task.result().server
            else:
                answers[host] = f"can't be used ({str(error) or type(error).__name__})"
                errors.append(error)
        try:
            return choose(answers, self.followed, writes=self._writes)
        except ReplayBufError as refusal:
            has_state = any(isinstance(answer, ServerState) for answer in answers.values())
            own = type(refusal)(f"{self._where}: {refusal}", reason=refusal.reason)
            answers_of = (error for error in errors if hasattr(error, "sqlstate") or isinstance(error, ssl.SSLError))
            cause = own if has_state or not errors else next(answers_of, errors[0])
        raise cause

    # Another server than before

    async def _meet(self, connection: Connection, host: Host | None) -> None:
        """Compare the remembered commit stamps with the server's, if it isn't the same server as before."""
        state = connection.server
        if not self._writes or state.timeline is None:
            return
        async with self._meeting_lock:
            before = self.followed
            if before is not None and state[:3] == before[:3]:
                return
            if before is not None and state.is_superseded(before):  # another task has met a newer timeline meanwhile
                raise ConnectionResetError(f"{_host_text(host)} is an old primary")
            if state.timeline > 1:
                await _enter(connection, state.timeline)
            if before is not None and state.timeline > (before.timeline or 0):
                clause = "it is another server" if host is None else f"this process follows {host}"
                _logger.warning("%s: %s from now on (timeline %d)", self._where, clause, state.timeline)
            if (marks := self.marks) and not self.lost:
                stamps = dict(map(tuple, await connection.fetch(_READ_STAMPS, list(marks))))
                if any(stamps.get(row, 0) < number for row, number in marks.items()):
                    self.lost = (
                        f"{self._where}: {_host_text(host)} (timeline {state.timeline}) lacks transactions that this "
                        "process saw committed. It took over before it had them, and what this process does next would "
                        "rest on them, so nothing was changed. Go back to a step whose checkpoint is there, with its "
                        "weights: restore(step), and checkpoints() lists them; or build a new buffer, which accepts "
                        "what is there"
                    )
                    _logger.error("%s", self.lost)
            self.followed = state


async def _end(tasks: Iterable[asyncio.Future[Connection]]) -> None:
    """Cancel these attempts to connect, and close what they have opened."""
    for task in tasks:
        task.cancel()
    opened = await asyncio.gather(*tasks, return_exceptions=True)
    closing = (result.close(timeout=_CLOSING_SECONDS) for result in opened if isinstance(result, Connection))
    await asyncio.gather(*closing, return_exceptions=True)


# These writes needn't be replicated: every later commit follows them in the WAL, and on another timeline they are
# repeated.
_UNREPLICATED = "SELECT set_config('synchronous_commit', 'local', true)"
_READ_STAMPS = "SELECT name, number FROM rb_info WHERE name = ANY(CAST($1 AS text[]))"
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
