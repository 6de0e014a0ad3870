"""What a wait tells others while it lasts: its reason, in the log and, where the store can, to other processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from replaybuf.rules.circumstances import Wait
from replaybuf.storage.presence import Waiting, gave_up
from replaybuf.storage.sql.backend import SQLStorage

#: Seconds after which a wait is reported in the log, and between reports.
REPORT_SECONDS = 30.0
#: Seconds after which other processes are shown a wait, and from which on its end by a timeout is an event; seconds
#: between two looks for its reason.
SHOW_SECONDS, REASON_SECONDS = 1.0, 10.0
# The end of a wait is written for at most so long before its error is raised.
_FLUSH_SECONDS = 2.0

_logger = logging.getLogger("replaybuf.waits")


class Reports:
    """The reports of one wait in the log, one every REPORT_SECONDS. They begin with `what` it waits for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._next = self._began + REPORT_SECONDS

    @property
    def due(self) -> bool:
        """Whether it is time for one."""
        return time.monotonic() >= self._next

    @property
    def pause(self) -> float:
        """The seconds until the next report."""
        return max(0.0, self._next - time.monotonic())

    def tell(self, missing: str) -> None:
        """Report what is missing."""
        now = time.monotonic()
        self._next = now + REPORT_SECONDS
        _logger.warning("%s for %.0f s: %s", self._what, now - self._began, missing)


class Telling:
    """One wait, as others hear of it. Nothing is made of one that is over within `SHOW_SECONDS`.

    `wait()` describes it, for the worker of this name.
    """

    def __init__(self, storage: SQLStorage, what: str, worker: str, wait: Callable[[], Wait]) -> None:
        self._storage = storage
        self._reports = Reports(what)
        self._worker = worker
        self._wait = wait
        self._shown: Waiting | None = None
        self._next = time.monotonic() + SHOW_SECONDS

    @property
    def wait(self) -> Wait:
        """The wait as it is now."""
        return self._wait()

    @property
    def due(self) -> bool:
        """Whether it is time to say why the wait isn't over."""
        return self._reports.due or time.monotonic() >= self._next

    @property
    def pause(self) -> float:
        """The seconds until it is."""
        return min(self._reports.pause, max(0.0, self._next - time.monotonic()))

    def tell(self, reason: str, numbers: str = "") -> None:
        """Say why the wait isn't over; the log gets the numbers, too."""
        if self._reports.due:
            self._reports.tell(numbers or reason)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + REASON_SECONDS
        if self._shown is not None:
            self._shown.wait, self._shown.reason = self.wait, reason
        else:
            self._shown = Waiting(self.wait, self._worker, self._storage.rules.limits, reason)
            self._storage.announce(self._shown)

    @property
    def is_long(self) -> bool:
        """Whether the wait is so old that others are shown it."""
        return _is_long(self.wait)

    async def give_up(self, reason: str, task_name: str | None = None) -> None:
        """Note that the wait ends by its timeout, and why it isn't over; of the task, if it is about one."""
        self.close()
        await give_up(self._storage, self.wait, self._worker, reason, task_name)

    def close(self) -> None:
        """Note that the wait is over."""
        if self._shown is not None:
            self._storage.withdraw(self._shown)


async def give_up(storage: SQLStorage, wait: Wait, worker: str, reason: str, task_name: str | None = None) -> None:
    """Write that a wait ends by its timeout: the process may end of it, and could tell nobody any more.

    Nothing is made of a wait that others weren't shown.
    """
    if _is_long(wait):
        storage.report(gave_up(wait, worker, time.time(), reason, task_name))
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await storage.flush()


def _is_long(wait: Wait) -> bool:
    return wait.since is not None and time.time() - wait.since >= SHOW_SECONDS
