"""Wakes callers that wait for a commit, of this process or, as the engine detects it, of another one.

While a caller waits, the engine's `CommitWatch` is polled: that is the guarantee. Notifications only shorten the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from replaybuf.storage.sql.engine.database import HINT_SECONDS, Database
from replaybuf.storage.sql.engine.thread import DatabaseThread

# The first commit is published at once; those of the next milliseconds are published together.
_ANNOUNCE_SECONDS = 0.005

_logger = logging.getLogger("replaybuf.watch")


class Watch:
    """Wakes callers that wait for a commit, in any event loop."""

    def __init__(self, thread: DatabaseThread, engine: Database) -> None:
        self._thread = thread
        self._wakes = Wakes()
        self._changes = engine.changes(self._hint)
        self._next_hint = 0.0
        self._wake_timer: asyncio.TimerHandle | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._announce_task: asyncio.Task[None] | None = None
        self._is_due = False
        self._stopped = False
        self._in_poll = False

    def version(self) -> int:
        """Return a number that changes with every detected commit (any thread)."""
        return self._wakes.version

    async def wait(self, timeout: float, since: int) -> None:
        """Return when a commit was detected after version `since`, or after `timeout` seconds (any event loop)."""
        if not self._stopped:
            await self._wakes.wait(timeout, since, lambda: self._thread.post(self._start))

    def committed(self) -> None:
        """Publish a commit of this process that other callers may wait for (database's thread)."""
        self._wakes.wake()
        if self._changes.announces and not self._stopped:
            self._is_due = True
            if self._announce_task is None:
                self._announce_task = self._thread.loop.create_task(self._announce())

    async def stop(self) -> None:
        """Wake all callers and end; pending notifications are sent first (database's thread)."""
        self._stopped = True
        self._wakes.wake()
        if self._poll_task is not None:
            if not self._in_poll:
                self._poll_task.cancel()
            await asyncio.wait([self._poll_task])
        if self._announce_task is not None:
            await asyncio.wait([self._announce_task])
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        await self._changes.close()

    def _hint(self) -> None:
        """Wake callers, rate-limited, after a hint of a commit (database's thread)."""
        if self._wake_timer is None and not self._stopped:
            self._wake_timer = self._thread.loop.call_at(self._next_hint, self._wake)

    def _wake(self) -> None:
        self._wake_timer = None
        self._next_hint = self._thread.loop.time() + HINT_SECONDS
        self._wakes.wake()

    def _start(self) -> None:
        if not self._stopped and self._poll_task is None:
            self._poll_task = self._thread.loop.create_task(self._poll())

    async def _poll(self) -> None:
        try:
            while self._wakes.awaited:
                self._in_poll = True
                try:
                    if await self._changes.poll():
                        self._hint()
                except Exception as error:  # waiting callers then poll the store themselves
                    _logger.debug("can't look for changes: %s", error)
                    await self._changes.close()
                    self._wakes.wake()
                self._in_poll = False
                if not self._stopped:
                    await self._changes.pause()
        finally:
            self._poll_task = None
            if self._wakes.awaited:  # a caller came while this was ending
                self._start()

    async def _announce(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                await self._changes.announce()
                await asyncio.sleep(_ANNOUNCE_SECONDS)
        except Exception as error:  # only a hint
            _logger.debug("can't announce a commit: %s", error)
        finally:
            self._announce_task = None


class Wakes:
    """A version that grows with every change, and the callers waiting for the next one."""

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._waiting_futures: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """Increase the version and wake all waiting callers."""
        with self._lock:
            self.version += 1
            waiting, self._waiting_futures = self._waiting_futures, set()
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                future.get_loop().call_soon_threadsafe(_resolve, future)

    @property
    def awaited(self) -> bool:
        """Whether any caller waits."""
        return bool(self._waiting_futures)

    async def wait(self, timeout: float, since: int, begun: Callable[[], object] = lambda: None) -> None:
        """Return when something has changed after `version` was `since`, or after `timeout` seconds.

        `begun()` is called when no later change can be missed any more.
        """
        waiting = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.version != since:
                return
            self._waiting_futures.add(waiting)
        try:
            begun()
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiting_futures.discard(waiting)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
