"""Noticing what other processes commit.

SQLite: the file's data version, asked for every 20 ms while someone waits. PostgreSQL: NOTIFY as a hint that comes at
once, and a look every half second as the guarantee, because a LISTEN connection can die without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.wakes import Wakes

POLL_SECONDS = {"sqlite": 0.02, "postgresql": 0.5}
CHANNEL = "replaybuf"
_NOTIFY_SECONDS = 0.005

_logger = logging.getLogger("replaybuf.watch")


class Watch:
    """Wakes those who wait for a change, in any event loop."""

    def __init__(self, thread: DatabaseThread, database: Database) -> None:
        self._thread = thread
        self._database = database
        self._wakes = Wakes()
        self._polling: asyncio.Task[None] | None = None
        self._notifying: asyncio.Task[None] | None = None
        self._due = False
        self._stopped = False
        self._looking = False
        self._connection: AsyncConnection | None = None
        self._listening: Any = None
        self._version: int | None = None
        self._commits = 0
        self._seen_commits = -1

    def version(self) -> int:
        """A number that is another one after every change that was noticed (any thread)."""
        return self._wakes.version

    async def wait(self, timeout: float, since: int) -> None:
        """Return when a change was noticed after `version` was `since`, or after `timeout` seconds (any event loop)."""
        if not self._stopped:
            await self._wakes.wait(timeout, since, lambda: self._thread.post(self._start))

    def committed(self) -> None:
        """This process has committed something that others may wait for (database's thread)."""
        self._commits += 1
        self._wakes.wake()
        if self._database.dialect == "postgresql" and not self._stopped:
            self._due = True
            if self._notifying is None:
                self._notifying = self._thread.loop.create_task(self._notify())

    async def stop(self) -> None:
        """Wake everyone and end; what others may wait for is announced first (database's thread)."""
        self._stopped = True
        self._wakes.wake()
        if self._polling is not None:
            if not self._looking:
                self._polling.cancel()
            await asyncio.wait([self._polling])
        if self._notifying is not None:
            await asyncio.wait([self._notifying])
        await self._disconnect()

    def _start(self) -> None:
        if self._polling is None and not self._stopped:
            self._polling = self._thread.loop.create_task(self._poll())

    async def _poll(self) -> None:
        try:
            while self._wakes.awaited:
                self._looking = True
                try:
                    if await self._look():
                        self._wakes.wake()
                except Exception as error:  # whatever it is, those who wait look for themselves
                    _logger.debug("can't look for changes: %s", error)
                    await self._disconnect()
                    self._wakes.wake()
                self._looking = False
                if not self._stopped:
                    await asyncio.sleep(POLL_SECONDS[self._database.dialect])
        finally:
            self._polling = None
            if self._wakes.awaited:  # someone came while this was ending
                self._start()

    async def _look(self) -> bool:
        """Whether anything may have been committed since the last look."""
        if self._database.dialect == "postgresql":
            if self._connection is not None and self._listening.is_closed():
                await self._disconnect()
            if self._connection is None:
                await self._listen()
            return True
        changed, self._seen_commits = self._commits != self._seen_commits, self._commits
        if self._database.memory:
            return changed
        if self._connection is None:
            self._connection = await self._database.connect()
        version = await self._connection.run_sync(_data_version)
        changed, self._version = version != self._version or changed, version
        return changed

    async def _listen(self) -> None:
        self._connection = await self._database.connect()
        raw: Any = await self._connection.get_raw_connection()
        await raw.driver_connection.add_listener(CHANNEL, lambda *_: self._wakes.wake())
        self._listening = raw.driver_connection

    async def _disconnect(self) -> None:
        connection, self._connection, self._version = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.invalidate()
                await connection.close()

    async def _notify(self) -> None:
        # Commits of the next few milliseconds share one NOTIFY: it takes a lock that all committing sessions share.
        try:
            while self._due:
                await asyncio.sleep(_NOTIFY_SECONDS)
                self._due = False
                # Only a hint: if it is lost, the others notice half a second later.
                await self._database.read(_send_notify, repeat=False)
        except ReplayBufError as error:
            _logger.debug("can't notify: %s", error)
        finally:
            self._notifying = None


def _send_notify(connection: Connection) -> None:
    connection.execute(text(f"NOTIFY {CHANNEL}"))


def _data_version(connection: Any) -> int:
    driver = connection.connection
    cursor = driver.cursor()
    try:
        cursor.execute("PRAGMA data_version")
        return int(cursor.fetchone()[0])
    finally:
        cursor.close()
