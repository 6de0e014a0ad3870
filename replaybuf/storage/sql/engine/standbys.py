"""Commits that wait for a synchronous standby: noticed, said, and given up after a time.

PostgreSQL waits for the standby when the commit is in the primary's own WAL already: without an end, and with all locks
of the transaction. A wait that is ended (a cancelled statement, a connection that is gone) leaves the commit on the
primary, for all to see. What is committed after it is behind it in the WAL, and waits for both. So whoever was told of
a commit has it on the standby, and a wait that was given up is in doubt until another commit was waited for
(`engine.outage.was_committed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from replaybuf.storage.sql.engine.errors import StandbyWaitEnded
from replaybuf.storage.sql.engine.outage import Outage
from replaybuf.units import number_of

#: After how long a commit is slow, and the server is asked whether it waits for a standby. Shorter waits are ordinary.
SLOW_SECONDS = 2.0
#: From when on commits that wait are a reason for others to be slow, or to wait for locks.
_TELLING_SECONDS = 0.5
#: How long the server may take to answer that.
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE = 30.0

_logger = logging.getLogger("replaybuf.database")

#: Asks a primary for its `Synchronous`. Roles that may not see other roles' sessions see their own ones.
ASK = """
SELECT coalesce(current_setting('synchronous_standby_names', true), ''),
    (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'),
    (SELECT CASE WHEN bool_or(sync_state IS NULL) THEN NULL ELSE
        count(*) FILTER (WHERE state = 'streaming' AND sync_state IN ('sync', 'quorum')) END FROM pg_stat_replication),
    (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'
        AND query_start < clock_timestamp() - make_interval(secs => {seconds}))
"""
_NUMBER = re.compile(r"(?:(?:FIRST|ANY)\s*)?(\d+)\s*\(", re.IGNORECASE)

#: What to do when too few are there, and when they are there and behind.
START_ONE = (
    "start the standby, with a name (application_name in its primary_conninfo) that is in this list; or let commits "
    "wait for none: ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf()"
)
HASTEN = "look at the disk and the network of the standby, and at pg_stat_replication on the primary"


class Synchronous(NamedTuple):
    """What a primary says of its synchronous standbys.

    `names` is its `synchronous_standby_names`, `standbys` how many of any kind are connected, `there` how many of those
    commits can wait for (None if the role may not see that), and `waiting` how many commits wait for longer than asked.
    """

    names: str
    standbys: int
    there: int | None
    waiting: int

    @property
    def wanted(self) -> int:
        """How many standbys must have a commit."""
        found = _NUMBER.match(self.names.strip())
        return int(found[1]) if found else 1 if self.names.strip() else 0

    @property
    def is_short(self) -> bool:
        """Whether fewer are there than commits wait for; False where that isn't known."""
        return (self.standbys if self.there is None else self.there) < self.wanted

    def __str__(self) -> str:
        """What is asked for and what is there, as the rest of a sentence."""
        asked = f"synchronous_standby_names = '{self.names}' asks for {number_of(self.wanted, 'standby')}"
        if self.there is None:
            return f"{asked}, and {self.standbys} of any kind {_are(self.standbys)} connected"
        others = f" ({self.standbys} of any kind)" if self.standbys > self.there else ""
        return f"{asked}, and {self.there} {_are(self.there)} connected{others}"

    @property
    def what_to_do(self) -> str:
        """What somebody should do who waits."""
        return START_ONE if self.is_short or self.there is None else HASTEN


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


class CommitWaits:
    """What the commits of a store share about standbys that they wait for. `connect` makes a connection to ask on."""

    def __init__(self, where: str, outage: Outage, connect: Callable[[], Awaitable[Any]]) -> None:
        self._where = where
        self._outage = outage
        self._connect = connect
        self._asking = asyncio.Lock()
        self._answer: tuple[float, str] = (-SLOW_SECONDS, "")  # when it was asked last, and what was found
        self._since: float | None = None

    @asynccontextmanager
    async def bounded(self, since: float | None = None, *, patient: bool = True) -> AsyncIterator[None]:
        """Give up a wait for a standby in this block when the time for attempts is over that began at `since`.

        Without `since` it begins now; one that isn't `patient` gives up as soon as it is known for what it waits. A
        commit that is slow for another reason goes on. Raises StandbyWaitEnded.
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

    def end(self) -> None:
        """Note that a commit was answered."""
        if self._since is not None:
            since, self._since = self._since, None
            _logger.info(
                "%s: commits wait for no standby any more, after %.1f s", self._where, time.monotonic() - since
            )

    async def why(self) -> str:
        """Return the sentence about commits that wait for a standby at the moment; nothing if none does."""
        async with self._asking:
            if time.monotonic() >= self._answer[0] + SLOW_SECONDS:
                found = await self._ask()
                self._answer = time.monotonic(), found
                if found and self._since is None:
                    self._since = time.monotonic()
                    _logger.warning("%s: %s", self._where, found)
            return self._answer[1]

    async def _watch(self, limit: asyncio.Timeout, since: float) -> str:
        """Let a wait for a standby end in time, and return what is said of it."""
        pause = SLOW_SECONDS
        while not (said := await self.why()):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._outage.restrict(limit, since)
        return said

    async def _ask(self) -> str:
        # On a connection of its own: those of the pool may all be in use, by commits that wait.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = await self._connect()
                try:
                    found = Synchronous(*await connection.fetchrow(ASK.format(seconds=_TELLING_SECONDS)))
                finally:
                    connection.terminate()
            if found.waiting:
                return f"the commit waits for a synchronous standby: {found}; {found.what_to_do}"
        return ""
