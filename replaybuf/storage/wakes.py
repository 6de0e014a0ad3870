"""Waking callers that wait for a change of a store, in any event loop of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Wakes:
    """A number that grows with every change, and the callers waiting for the next one."""

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """Wake all waiting callers: something has changed."""
        with self._lock:
            self.version += 1
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                future.get_loop().call_soon_threadsafe(_resolve, future)

    @property
    def awaited(self) -> bool:
        """Whether anyone waits."""
        return bool(self._waiting)

    async def wait(self, timeout: float, since: int, begun: Callable[[], object] = lambda: None) -> None:
        """Return when something has changed after `version` was `since`, or after `timeout` seconds.

        `begun()` is called once it waits and can no longer miss a change.
        """
        waiting = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.version != since:
                return
            self._waiting.add(waiting)
        try:
            begun()
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiting.discard(waiting)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
