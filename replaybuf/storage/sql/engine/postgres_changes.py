"""Detection of commits by other processes to a PostgreSQL database, and notification of this process's commits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from replaybuf.storage.sql.engine.database import CommitWatch
from replaybuf.storage.sql.engine.errors import says_unknown
from replaybuf.storage.sql.engine.postgres_connect import Connection
from replaybuf.storage.sql.engine.postgres_pool import Pool

_CHANNEL = "replaybuf"
# Only the notification depends on its commit, so synchronous_commit can be off.
_ANNOUNCE = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{_CHANNEL}', '')"
# Every commit on the server changes its snapshot.
SNAPSHOT = "SELECT CAST(pg_current_snapshot() AS text)"
_LONGEST_SECONDS = 5.0
#: The seconds between two polls: of a server that may not deliver notifications, and once one has been heard.
_POLL_SECONDS, _HEARING_SECONDS = 0.5, 1.0
#: What a server without a feature means for a run.
_EFFECTS = {
    "LISTEN": "waits notice by polling, within half a second, what others have put",
    "NOTIFY": "others notice by polling what is put here",
    "pg_current_snapshot": "who waits reads the buffer twice a second",
}

_logger = logging.getLogger("replaybuf.watch")


class Notifications(CommitWatch):
    """NOTIFY as an immediate hint, and polls of the server's snapshot as the guarantee.

    A notification may be lost with its sender, and a LISTEN connection can die silently. Where a server lacks either
    feature, polling replaces it, with one warning.
    """

    seconds = _POLL_SECONDS
    announces = True

    def __init__(self, pool: Pool, hint: Callable[[], object]) -> None:
        self._pool, self._hint = pool, hint
        self._listening: Connection | None = None
        self._snapshot: str | None = None
        self._lacking: set[str] = set()

    async def look(self) -> bool:
        if (old := self._listening) is not None and (old.is_closed() or self._pool.servers.is_left(old.standing)):
            await self.close()
        if self._listening is None and "LISTEN" not in self._lacking:
            self._listening = await self._pool.take()
            if await self._has("LISTEN", self._listening.add_listener(_CHANNEL, self._heard)):
                await self.announce()  # hearing it oneself shows that notifications arrive
            else:
                await self.close()
        before = self._snapshot
        if not await self._has("pg_current_snapshot", self._look()):
            return True  # waiting calls then poll by themselves
        return self._snapshot != before

    def _heard(self, *_: object) -> None:
        self.seconds = _HEARING_SECONDS
        self._hint()

    async def _look(self) -> None:
        async with asyncio.timeout(_LONGEST_SECONDS), self._pool.lend() as connection:
            self._snapshot = await connection.fetchval(SNAPSHOT)

    async def announce(self) -> None:
        # Only a hint, and not retried: if it is lost, other processes notice the commit at their next poll.
        self.announces = await self._has("NOTIFY", self._notify())

    async def _notify(self) -> None:
        async with asyncio.timeout(_LONGEST_SECONDS), self._pool.lend() as connection:
            await connection.execute(_ANNOUNCE)

    async def _has(self, what: str, asking: Awaitable[object]) -> bool:
        """Return whether the server has the feature that is asked for; a warning is logged once if it doesn't."""
        try:
            await asking
        except Exception as error:
            if not says_unknown(error):
                raise
            if what not in self._lacking:
                self._lacking.add(what)
                _logger.warning("the server has no %s (%s): %s", what, error, _EFFECTS[what])
            return False
        return True

    async def close(self) -> None:
        connection, self._listening, self._snapshot = self._listening, None, None
        self.seconds = _POLL_SECONDS
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._pool.discard(connection)
