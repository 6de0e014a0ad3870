"""Reports of long waits and their reasons, in the log and in the views that all processes read."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from replaybuf.common import units
from replaybuf.rules.circumstances import Wait
from replaybuf.storage.reports import EventKind, Waiting, WorkerEvent
from replaybuf.storage.sql.backend import SQLStorage

#: Seconds before the first warning of a wait in the log, and between warnings.
REPORT_SECONDS = 30.0
#: Seconds after which a wait is published to other processes, and its timeout recorded as an event; seconds between
#: updates of its reason.
SHOW_SECONDS, REASON_SECONDS = 1.0, 10.0
# The longest delay of a timeout error by recording its event.
_FLUSH_SECONDS = 2.0

_logger = logging.getLogger("replaybuf.waits")


class WaitReport(Waiting):
    """One wait of a worker, in the log and in the view `waiters`. A wait of less than `SHOW_SECONDS` isn't reported.

    `wait` is its current description; `activity` begins its warnings in the log. The caller closes it.
    """

    def __init__(self, storage: SQLStorage, activity: str, wait: Wait) -> None:
        super().__init__(wait, storage.worker, reason="")
        self._storage, self._activity = storage, activity
        self._began_at = time.monotonic()
        self._log_at, self._show_at = self._began_at + REPORT_SECONDS, self._began_at + SHOW_SECONDS

    @property
    def pause(self) -> float:
        """The seconds until the next `update` is due; 0 if it is."""
        return max(0.0, min(self._log_at, self._show_at) - time.monotonic())

    @property
    def due(self) -> bool:
        """Whether it is time for an `update`."""
        return not self.pause

    def update(self, reason: str, numbers: str = "") -> None:
        """Report the reason why the wait isn't over; the log gets the sentence with `numbers`."""
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + REPORT_SECONDS
            _logger.warning("%s for %.0f s: %s", self._activity, now - self._began_at, numbers or reason)
        if now < self._show_at:
            return
        self._show_at = now + REASON_SECONDS
        self.reason = reason
        self._storage.presence.publish_wait(self)

    @property
    def is_long(self) -> bool:
        """Whether the wait has lasted long enough to be published."""
        since = self.wait.since
        return since is not None and time.time() - since >= SHOW_SECONDS

    async def timed_out(self, reason: str, task_name: str | None = None) -> None:
        """Record the timeout of the wait and its `reason`, at once, since the process may exit on the error.

        `task_name` is the task that the reason is about, if any: the event then has the number of its groups that the
        wait needed. Waits shorter than `SHOW_SECONDS` aren't recorded.
        """
        self.close()
        if self.is_long:
            wait, now = self.wait, time.time()
            groups = sum(wait.wants.values()) if task_name is None else wait.wants.get(task_name, 0)
            subject = "the trainer" if wait.kind == "trainer" else wait.kind
            detail = f"after {units.age(now - (wait.since or now))} of waiting for {subject}: {reason}"
            event = WorkerEvent(EventKind.GAVE_UP, self.worker, now, groups, detail, task_name, wait.kind == "groups")
            self._storage.presence.report(event)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await self._storage.flush()

    def close(self) -> None:
        """Withdraw the finished wait from the view."""
        if self.reason:
            self._storage.presence.withdraw_wait(self)
