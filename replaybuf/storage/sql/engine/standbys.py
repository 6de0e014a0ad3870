"""Commits that wait for a synchronous standby: detected, logged, and abandoned after a time.

PostgreSQL waits for the standby after the commit is in the primary's own WAL: without a limit, and with all locks of
the transaction. If the wait is interrupted (a cancelled statement, a lost connection), the commit stays on the primary,
visible to all. Later commits follow it in the WAL, and wait for both. So a confirmed commit is on the standby, and one
whose wait was abandoned is in doubt until a later commit was replicated (`engine.commit_stamp.READ_STAMP`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from replaybuf.common.units import number_of
from replaybuf.storage.sql.engine.errors import StandbyWaitEnded
from replaybuf.storage.sql.engine.outage import Outage

if TYPE_CHECKING:  # it needs asyncpg, which the doctor of a SQLite file doesn't
    from replaybuf.storage.sql.engine.postgres_servers import Servers

#: After this time a commit is slow, and a query asks whether it waits for a standby. Shorter waits are ordinary.
SLOW_SECONDS = 2.0
#: Commits that wait longer for a standby explain why other transactions are slow, or wait for locks.
_TELLING_SECONDS = 0.5
#: Timeout of the query for them.
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE = 30.0

_logger = logging.getLogger("replaybuf.database")

#: Query of a primary's `Synchronous`. Roles without rights to other roles' sessions see only their own.
ASK = """
SELECT coalesce(current_setting('synchronous_standby_names', true), ''),
    (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'),
    (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'
        AND query_start < clock_timestamp() - make_interval(secs => {seconds}))
"""
_NUMBER = re.compile(r"(?:(?:FIRST|ANY)\s*)?(\d+)\s*\(", re.IGNORECASE)

#: Advice for users whose commits wait.
WHAT_TO_DO = (
    "start the standby, with a name (application_name in its primary_conninfo) that is in this list, and look at its "
    "disk and network; or let commits wait for none: ALTER SYSTEM SET synchronous_standby_names = ''; "
    "SELECT pg_reload_conf()"
)


class Synchronous(NamedTuple):
    """Synchronous replication as reported by a primary.

    `names` is `synchronous_standby_names`, `standbys` the number of connected standbys of any kind, and `waiting` the
    number of commits that wait for long.
    """

    names: str
    standbys: int
    waiting: int

    @property
    def wanted(self) -> int:
        """The number of standbys that must have a commit."""
        found = _NUMBER.match(self.names.strip())
        return int(found[1]) if found else 1 if self.names.strip() else 0

    def __str__(self) -> str:
        """The configured and the connected standbys, as the rest of a sentence."""
        are = "is" if self.standbys == 1 else "are"
        asked = f"synchronous_standby_names = '{self.names}' asks for {number_of(self.wanted, 'standby')}"
        return f"{asked}, and {self.standbys} {are} connected"


class CommitWaits:
    """Detects a store's commits that wait for a synchronous standby."""

    def __init__(self, where: str, outage: Outage, servers: Servers) -> None:
        self._where = where
        self._outage = outage
        self._servers = servers
        self._asking = asyncio.Lock()
        self._answer: tuple[float, str] = (-SLOW_SECONDS, "")  # time and result of the last query
        self._said = False

    @asynccontextmanager
    async def bounded(self, since: float | None = None, *, patient: bool = True) -> AsyncIterator[None]:
        """Abandon a wait for a standby in this block when the time for attempts that began at `since` is over.

        Without `since` it begins now; with `patient` false, the wait ends as soon as its cause is known. A commit that
        is slow for another reason isn't interrupted. Raises StandbyWaitEnded.
        """
        began = time.monotonic()
        watching: list[asyncio.Task[str]] = []
        limit = asyncio.timeout(None)

        def watch() -> None:
            start = (began if since is None else since) if patient else began - self._outage.seconds
            watching.append(asyncio.create_task(self._watch(limit, start)))

        slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, watch)
        try:
            async with limit:
                yield
                if limit.expired():
                    await asyncio.sleep(0)  # lets the pending cancellation arrive
        except TimeoutError:
            if not limit.expired():
                raise
            waited = time.monotonic() - began
            raise StandbyWaitEnded(f"{watching[0].result()}; it waited for {waited:.0f} s") from None
        finally:
            slow.cancel()
            for task in watching:
                task.cancel()
            self._outage.release(limit)

    async def why(self) -> str:
        """Return a sentence about commits that currently wait for a standby; an empty string if none does."""
        async with self._asking:
            if time.monotonic() >= self._answer[0] + SLOW_SECONDS:
                found = await self._ask()
                self._answer = time.monotonic(), found
                if found and not self._said:
                    _logger.warning("%s: %s", self._where, found)
                self._said = bool(found)
            return self._answer[1]

    async def _watch(self, limit: asyncio.Timeout, since: float) -> str:
        """Bound a commit that waits for a standby, and return the sentence about it."""
        pause = SLOW_SECONDS
        while not (said := await self.why()):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._outage.restrict(limit, since)
        return said

    async def _ask(self) -> str:
        # On a separate connection: all of the pool may be in use by waiting commits.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = await self._servers.connect()
                try:
                    row: Any = await connection.fetchrow(ASK.format(seconds=_TELLING_SECONDS))
                    found = Synchronous(*row)
                finally:
                    connection.terminate()
            if found.waiting:
                return f"the commit waits for a synchronous standby: {found}; {WHAT_TO_DO}"
        return ""
