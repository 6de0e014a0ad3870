"""Noticing what other processes commit to PostgreSQL, and telling them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.engine import URL

from replaybuf.storage.sql.engine.database import CommitWatch
from replaybuf.storage.sql.engine.errors import says_unknown, translated
from replaybuf.storage.sql.engine.postgres_pool import Pool, is_closed
from replaybuf.storage.sql.engine.urls import public_url

_CHANNEL = "replaybuf"
# Nothing but the announcement depends on its commit, which needn't wait for the disk.
_ANNOUNCE = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{_CHANNEL}', '')"
# Every commit on the server changes its snapshot.
SNAPSHOT = "SELECT CAST(pg_current_snapshot() AS text)"
_LONGEST_SECONDS = 5.0

_logger = logging.getLogger("replaybuf.watch")


class Notifications(CommitWatch):
    """NOTIFY as an immediate hint, and the server's snapshot as the guarantee.

    An announcement may be lost with its sender, and a LISTEN connection can die silently. What a server lacks of this
    is done without, and said once.
    """

    seconds = 0.5
    announces = True

    def __init__(self, url: URL, lock_timeout: float, pool: Pool, hint: Callable[[], object]) -> None:
        self._url, self._lock_timeout = url, lock_timeout
        self._pool = pool
        self._hint = hint
        self._listening: Any = None
        self._snapshot: str | None = None
        self._listens = self._has_snapshots = True

    async def look(self) -> bool:
        with translated(self._url, self._lock_timeout):
            if self._listening is not None and self._is_left(self._listening):
                await self.close()
            if self._listening is None and self._listens:
                self._listens = await self._listen()
            return await self._has_changed()

    async def _listen(self) -> bool:
        """Listen to announcements; return whether the server lets us."""
        self._listening = await self._pool.take()
        try:
            await self._listening.add_listener(_CHANNEL, self._heard)
        except Exception as error:
            self._do_without("LISTEN", error, "waits notice by polling, within half a second, what others have put")
            await self.close()
            return False
        return True

    async def _has_changed(self) -> bool:
        if not self._has_snapshots:
            return True  # who waits looks for itself
        try:
            snapshot: str = await self._ask(lambda connection: connection.fetchval(SNAPSHOT))
        except Exception as error:
            self._do_without("pg_current_snapshot", error, "who waits reads the buffer twice a second")
            self._has_snapshots = False
            return True
        changed, self._snapshot = snapshot != self._snapshot, snapshot
        return changed

    def _do_without(self, what: str, error: Exception, effect: str) -> None:
        """Say once that the server lacks something. Raises any error that doesn't say so."""
        if not says_unknown(error):
            raise error
        _logger.warning("%s has no %s (%s): %s", public_url(self._url), what, error, effect)

    def _is_left(self, connection: Any) -> bool:
        return is_closed(connection) or self._pool.servers.is_left(connection.standing)

    def _heard(self, *_: Any) -> None:
        self._hint()

    async def announce(self) -> None:
        # Only a hint, and not repeated: if it is lost, the others notice at their next look.
        with translated(self._url, self._lock_timeout):
            try:
                await self._ask(lambda connection: connection.execute(_ANNOUNCE))
            except Exception as error:
                self._do_without("NOTIFY", error, "others notice by polling what is put here")
                self.announces = False

    async def close(self) -> None:
        connection, self._listening, self._snapshot = self._listening, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await self._pool.discard(connection)

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the answer to what is a transaction of its own."""
        async with asyncio.timeout(_LONGEST_SECONDS), self._pool.lend() as connection:
            return await ask(connection)
