"""Wakes callers that wait for a commit, of this process or, as the engine detects it, of another one.

While a caller waits, the engine's `CommitWatch` is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.thread import DatabaseThread

_logger = logging.getLogger("replaybuf.watch")

#: Between two polls: at least, after a commit (all meanwhile wake callers once, who then read the store), and after an
#: error, in seconds.
_SHORTEST_GAP, _GAP_AFTER_COMMIT, _GAP_AFTER_ERROR = 0.002, 0.02, 1.0


class Watch:
    """Wakes callers that wait for a commit, in any event loop."""

    def __init__(self, thread: DatabaseThread, engine: Database) -> None:
        self._thread = thread
        self._wakes = Wakes()
        self._changes = engine.changes()
        self._poll_task: asyncio.Task[None] | None = None
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
        """Wake callers after a commit of this process (any thread)."""
        self._wakes.wake()

    async def stop(self) -> None:
        """Wake all callers and end (database's thread)."""
        self._stopped = True
        self._wakes.wake()
        if self._poll_task is not None:
            if not self._in_poll:
                self._poll_task.cancel()
            await asyncio.wait([self._poll_task])

    def _start(self) -> None:
        if not self._stopped and self._poll_task is None:
            self._poll_task = self._thread.loop.create_task(self._poll())

    async def _poll(self) -> None:
        quiet_since = self._thread.loop.time()
        try:
            while self._wakes.awaited:
                self._in_poll = True
                began = self._thread.loop.time()
                try:
                    has_changed = await self._changes.poll()
                    now = self._thread.loop.time()
                    gap = _GAP_AFTER_COMMIT if has_changed else self._gap(now - quiet_since, now - began)
                except Exception as error:  # waiting callers then poll the store themselves
                    _logger.debug("can't look for changes: %s", error)
                    has_changed, now, gap = True, self._thread.loop.time(), _GAP_AFTER_ERROR
                if has_changed:
                    quiet_since = now
                    self._wakes.wake()
                self._in_poll = False
                if not self._stopped:
                    await asyncio.sleep(gap)
        finally:
            self._poll_task = None
            if self._wakes.awaited:  # a caller came while this was ending
                self._start()

    def _gap(self, quiet: float, took: float) -> float:
        """Return the seconds until the next poll, after so many without a commit and a poll that took so long.

        A commit is seen late by a twentieth of the time that it was waited for, at most, and polls take a tenth of the
        time.
        """
        return max(min(self._changes.longest_gap, max(_SHORTEST_GAP, quiet / 20)), 10 * took)


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
