"""Detection of commits by other processes to a PostgreSQL database, and notification of this process's commits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.engine import URL

from replaybuf.storage.sql.engine.database import CommitWatch
from replaybuf.storage.sql.engine.errors import says_unknown, translated
from replaybuf.storage.sql.engine.postgres_connect import Connection
from replaybuf.storage.sql.engine.postgres_pool import Pool
from replaybuf.storage.sql.engine.urls import public_url

_CHANNEL = "replaybuf"
# Only the notification depends on its commit, so synchronous_commit can be off.
_ANNOUNCE = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{_CHANNEL}', '')"
# Every commit on the server changes its snapshot.
SNAPSHOT = "SELECT CAST(pg_current_snapshot() AS text)"
_LONGEST_SECONDS = 5.0
#: The seconds between two polls: of a server that may not deliver notifications, and once one has been heard.
_POLL_SECONDS, _HEARING_SECONDS = 0.5, 1.0

_logger = logging.getLogger("replaybuf.watch")


class Notifications(CommitWatch):
    """NOTIFY as an immediate hint, and polls of the server's snapshot as the guarantee.

    A notification may be lost with its sender, and a LISTEN connection can die silently. Where a server lacks either
    feature, polling replaces it, with one warning.
    """

    seconds = _POLL_SECONDS
    announces = True

    def __init__(self, url: URL, lock_timeout: float, pool: Pool, hint: Callable[[], object]) -> None:
        self._url, self._lock_timeout = url, lock_timeout
        self._pool = pool
        self._hint = hint
        self._listening: Connection | None = None
        self._snapshot: str | None = None
        self._listens = self._has_snapshots = True

    async def look(self) -> bool:
        with translated(self._url, self._lock_timeout):
            if (old := self._listening) is not None and (old.is_closed() or self._pool.servers.is_left(old.standing)):
                await self.close()
            if self._listening is None and self._listens:
                self._listens = await self._listen()
            return await self._has_changed()

    async def _listen(self) -> bool:
        """LISTEN for notifications; return whether the server supports it."""
        self._listening = await self._pool.take()
        try:
            await self._listening.add_listener(_CHANNEL, self._heard)
        except Exception as error:
            self._do_without("LISTEN", error, "waits notice by polling, within half a second, what others have put")
            await self.close()
            return False
        await self.announce()  # hearing it oneself shows that notifications arrive
        return True

    def _heard(self, *_: object) -> None:
        self.seconds = _HEARING_SECONDS
        self._hint()

    async def _has_changed(self) -> bool:
        if not self._has_snapshots:
            return True  # waiting calls then poll by themselves
        try:
            snapshot: str = await self._ask(lambda connection: connection.fetchval(SNAPSHOT))
        except Exception as error:
            self._do_without("pg_current_snapshot", error, "who waits reads the buffer twice a second")
            self._has_snapshots = False
            return True
        changed, self._snapshot = snapshot != self._snapshot, snapshot
        return changed

    def _do_without(self, what: str, error: Exception, effect: str) -> None:
        """Log once that the server lacks a feature. Reraises any other error."""
        if not says_unknown(error):
            raise error
        _logger.warning("%s has no %s (%s): %s", public_url(self._url), what, error, effect)

    async def announce(self) -> None:
        # Only a hint, and not retried: if it is lost, other processes notice the commit at their next poll.
        with translated(self._url, self._lock_timeout):
            try:
                await self._ask(lambda connection: connection.execute(_ANNOUNCE))
            except Exception as error:
                self._do_without("NOTIFY", error, "others notice by polling what is put here")
                self.announces = False

    async def close(self) -> None:
        connection, self._listening, self._snapshot = self._listening, None, None
        self.seconds = _POLL_SECONDS
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._pool.discard(connection)

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a query as a transaction of its own."""
        async with asyncio.timeout(_LONGEST_SECONDS), self._pool.lend() as connection:
            return await ask(connection)
