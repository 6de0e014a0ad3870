"""Heartbeats: activity, waits and events of this process, written every few seconds in the background.

Calls only count in memory. A heartbeat writes the counts, the waits and reported events: within a second or so after
the first activity, and after a wait has begun or ended, every `_NEWS_SECONDS` after any activity, every `_WAIT_SECONDS`
during a wait, and every `_SIGN_SECONDS` otherwise; not more often, since each commit to a SQLite file wakes all waiting
processes. A wait that times out is written before its error is raised (`flush`), since the process may exit with it. A
process without puts, draws and waits writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial

from replaybuf.errors import ReplayBufError
from replaybuf.storage.reports import Waiting, WorkerEvent
from replaybuf.storage.sql.schema.tables import HISTORY_SECONDS
from replaybuf.storage.sql.statements.new_rows import EncodedGroup
from replaybuf.storage.sql.statements.presence import Activity, record_minute, write_beat
from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import NewGroup
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.segments import count_of

# Waits without a heartbeat for 15 seconds count as those of dead processes.
_SOON_SECONDS, _NEWS_SECONDS, _WAIT_SECONDS, _SIGN_SECONDS = 1.0, 5.0, 10.0, 30.0
#: Lock timeout of a heartbeat in seconds; its content is kept for the next one.
_PATIENCE = 1.0
#: Names of workers that stay in heartbeats, and waits that are shown, per process.
_MOST_NAMES, _MOST_WAITS = 200, 100

_logger = logging.getLogger("replaybuf.presence")


class Presence:
    """The activity of this process's workers since the buffer was opened, and their waits."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._engine = transactions.engine
        self._start = time.time()
        self._workers: dict[str, Activity] = {}  # the most recent one last
        self._has_changed = False  # whether there is activity that isn't in the store
        self._waits: dict[int, Waiting] = {}
        self._events: deque[WorkerEvent] = deque(maxlen=_MOST_WAITS)  # the latest ones, if there are more
        self._writing = asyncio.Lock()  # of the database's loop
        self._stored_waits: set[int] = set()  # the numbers of the waits in the store
        self._beat_at = time.monotonic() - _SIGN_SECONDS  # the first one comes soon
        self._recorded_minute = 0
        self._has_complained = False

    # Database's thread

    def of(self, worker: str | None) -> Activity:
        """Return the activity of a worker, to be counted up; for None, one that is discarded."""
        if worker is None:
            return Activity()
        self._has_changed = True
        self._workers[worker] = activity = self._workers.pop(worker, None) or Activity()
        return activity

    def count_puts(self, stored: Iterable[EncodedGroup]) -> None:
        """Count groups that were put and stored."""
        for encoded in stored:
            self.count_put(encoded.group, encoded.tokens)

    def count_put(self, new: NewGroup, tokens: int = 0) -> None:
        """Count a group that was put, stored or not; without `tokens` if it wasn't."""
        activity = self.of(new.worker)
        activity.groups += new.status is not Status.FILLING
        count = count_of(new.rollouts, new.segments)
        arrived = count - len(new.parts)  # the others were counted when they were put
        activity.rollouts += max(0, arrived)
        activity.tokens += tokens if not new.parts else tokens * max(0, arrived) // count
        if new.status is Status.FAILED:
            activity.failures += 1

    # Any thread

    def publish_wait(self, waiting: Waiting) -> None:
        """Show a wait, from the next heartbeat on, until it is withdrawn, with its current `reason` (any thread)."""
        self._waits[waiting.number] = waiting

    def withdraw_wait(self, waiting: Waiting) -> None:
        """Stop showing a wait."""
        self._waits.pop(waiting.number, None)

    def report(self, event: WorkerEvent) -> None:
        """Write an event with the next heartbeat."""
        self._events.append(event)

    # In the background

    async def beat(self) -> None:
        """Write a heartbeat if one is due. Raises nothing: the next one may succeed."""
        now = time.monotonic()
        if now - self._beat_at < _SOON_SECONDS:
            return
        waits = self._shown_waits()
        news = bool(self._events) or self._stored_waits != {wait.number for wait in waits}
        counted = self._has_changed and now - self._beat_at >= _NEWS_SECONDS
        waiting = bool(waits) and now - self._beat_at >= _WAIT_SECONDS
        sign = bool(self._workers) and now - self._beat_at >= _SIGN_SECONDS
        if news or counted or waiting or sign:
            await self.flush()

    async def flush(self) -> None:
        """Write a heartbeat at once. Raises nothing: the next one may succeed."""
        self._beat_at = time.monotonic()
        try:
            await self._write()
            await self._record_minute()
            self._has_complained = False
        except Exception as error:
            self._beat_at += _NEWS_SECONDS - _SIGN_SECONDS  # an idle worker isn't to look dead for one failure
            self._log_failure(error)

    async def end(self) -> None:
        """Record that the workers of this process have ended, and their waits. Raises nothing."""
        if not (self._workers or self._events):
            return
        self._waits.clear()
        try:
            await self._write(ended=True)
        except Exception as error:
            self._log_failure(error)

    def _shown_waits(self) -> list[Waiting]:
        return list(self._waits.values())[:_MOST_WAITS]

    async def _write(self, *, ended: bool = False) -> None:
        async with self._writing:
            waits = self._shown_waits()
            has_changed, self._has_changed = self._has_changed, False
            events = [self._events.popleft() for _ in range(len(self._events))]
            for name in (*(waiting.worker for waiting in waits), *(event.worker for event in events)):
                self._workers.setdefault(name, Activity())
            workers = dict(self._workers)
            for name in _drawing_workers(waits, events):
                self._workers[name].draws = True
            try:
                write = partial(write_beat, since=self._start, workers=workers, waits=waits, events=events, ended=ended)
                await self._engine.write(write, self._transactions.scope, brief=True, patience=_PATIENCE)
            except BaseException:
                self._has_changed |= has_changed
                # In the same deque: other threads may be about to append to it.
                self._events.extendleft(events[::-1][: _MOST_WAITS - len(self._events)])
                raise
            self._stored_waits = {waiting.number for waiting in waits}
            for name in [*self._workers][:-_MOST_NAMES]:
                del self._workers[name]

    async def _record_minute(self) -> None:
        minute = int(time.time() // HISTORY_SECONDS)
        if minute == self._recorded_minute:
            return
        if await self._engine.write(record_minute, self._transactions.scope, patience=_PATIENCE):
            self._recorded_minute = minute  # else another process is recording it: the next heartbeat checks

    def _log_failure(self, error: Exception) -> None:
        """Log one warning of an unknown error; puts and draws raise the others, too."""
        is_known = isinstance(error, ReplayBufError)
        level = logging.DEBUG if is_known or self._has_complained else logging.WARNING
        self._has_complained |= not is_known
        _logger.log(level, "workers and waits can't be recorded at present: %s", error, exc_info=not is_known)


def _drawing_workers(waits: Iterable[Waiting], events: Iterable[WorkerEvent]) -> set[str]:
    """Return the workers that draw: of waits for groups, and of draws that timed out."""
    return {event.worker for event in events if event.draws} | {w.worker for w in waits if w.wait.kind == "groups"}
