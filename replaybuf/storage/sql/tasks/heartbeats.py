"""Presence: what this process tells others of itself, every few seconds, in the background.

Calls only count in memory. A beat writes the counts, the waits and reported events: within a second or so when a wait
has begun or ended, every `_NEWS_SECONDS` if anything was counted, every `_WAIT_SECONDS` while anybody waits, and every
`_SIGN_SECONDS` otherwise. Commits to a SQLite file wake all that wait there, so there are no more. A wait that ends by
its timeout is written before its error is raised (`flush`), for the process may end of it. A process that has neither
put nor drawn nor waited writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterable
from functools import partial

from replaybuf.errors import ReplayBufError
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.reports import EventKind, Waiting, WorkerEvent, kind_of_wait
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.transaction import Scope
from replaybuf.storage.sql.schema.records import HISTORY_SECONDS
from replaybuf.storage.sql.statements.new_rows import EncodedGroup
from replaybuf.storage.sql.statements.presence import Activity, Beat, Process, is_noted, note_minute, write_beat
from replaybuf.storage.values import NewGroup
from replaybuf.worker_name import host_name

# Waits of which nothing was heard for 15 seconds count as those of the dead.
_SOON_SECONDS, _NEWS_SECONDS, _WAIT_SECONDS, _SIGN_SECONDS = 1.0, 5.0, 10.0, 30.0
#: Within how many seconds the processes begin a minute, one after the other.
_APART_SECONDS = 10.0
#: Seconds that a beat waits for a lock; the next one tells what this one had to.
_PATIENCE = 1.0
#: Seconds for which beats fail before the log has a warning.
_COMPLAIN_SECONDS = 60.0
#: The names that are kept seen though they do nothing, and the waits that are shown, of one process.
_MOST_NAMES, _MOST_WAITS = 200, 100

_logger = logging.getLogger("replaybuf.presence")


class Presence:
    """What the workers of this process have done since the last beat, and their waits."""

    def __init__(self, engine: Database, scope: Scope) -> None:
        self._engine = engine
        self._scope = scope
        self._process = Process(host_name(), os.getpid(), time.time())
        self._done: dict[str, Activity] = {}
        self._names: dict[str, None] = {}  # the most recent one last
        self._waits: dict[int, Waiting] = {}
        self._events: deque[WorkerEvent] = deque(maxlen=_MOST_WAITS)  # of more, the last ones are told
        self._limits_noted: set[bool] = set()  # of a worker that draws, of any
        self._writing = asyncio.Lock()  # of the database's loop
        self._shown: set[int] = set()  # the numbers of waits in the store
        self._beat_at = self._sign_at = 0.0
        self._minute = 0
        # If all began a minute at once, all would try to note it.
        self._behind = random.uniform(0.0, _APART_SECONDS)
        self._failing_since: float | None = None
        self._complained = False

    # Database's thread

    def of(self, worker: str | None) -> Activity:
        """Return what a worker did since the last beat, to be added to; of None, what nobody asks for."""
        if worker is None:
            return Activity()
        done = self._done.get(worker)
        if done is None:
            done = self._done[worker] = Activity()
        return done

    def count_puts(self, stored: Iterable[EncodedGroup]) -> None:
        """Count groups that were put, and stored."""
        for one in stored:
            self.count_put(one.group, one.tokens)

    def count_put(self, new: NewGroup, tokens: int = 0) -> None:
        """Count a group that was put, stored or not; the tokens of one that wasn't are nobody's."""
        done = self.of(new.worker)
        done.groups += 1
        done.rollouts += len(new.rollouts)
        done.tokens += tokens
        if new.status is Status.FAILED:
            done.failures += 1

    # Any thread

    def announce(self, waiting: Waiting) -> None:
        """Show a wait, from the next beat on."""
        self._waits[waiting.number] = waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Show a wait no longer."""
        self._waits.pop(waiting.number, None)

    def report(self, event: WorkerEvent) -> None:
        """Note an event with the next beat."""
        self._events.append(event)

    # In the background

    async def beat(self) -> None:
        """Write what there is to tell, if it is time. Raises nothing: the next beat may succeed."""
        now = time.monotonic()
        if now - self._beat_at < _SOON_SECONDS:
            return
        waits = self._shown_waits()
        news = bool(self._events) or self._shown != {one.number for one in waits}
        counted = bool(self._done) and now - self._beat_at >= _NEWS_SECONDS
        waiting = bool(waits) and now - self._beat_at >= _WAIT_SECONDS
        sign = bool(self._names) and now - self._sign_at >= _SIGN_SECONDS
        if not (news or counted or waiting or sign or (self._done and not self._names)):
            return
        await self._beat(all_names=sign)

    async def flush(self) -> None:
        """Write at once what there is to tell. Raises nothing: the next beat may succeed."""
        await self._beat(all_names=False)

    async def _beat(self, *, all_names: bool) -> None:
        self._beat_at = time.monotonic()
        try:
            await self._write(all_names=all_names)
            await self._note_minute()
            self._failing_since = None
            self._complained = False
        except Exception as error:
            self._failed(error)

    async def end(self) -> None:
        """Say that the workers of this process have ended, and none of them waits. Raises nothing."""
        if not (self._names or self._done or self._shown or self._events):
            return
        self._waits.clear()
        try:
            await self._write(all_names=True, ended=True)
        except Exception as error:
            self._failed(error)

    def _shown_waits(self) -> list[Waiting]:
        return list(self._waits.values())[:_MOST_WAITS]

    async def _write(self, *, all_names: bool, ended: bool = False) -> None:
        async with self._writing:
            waits = self._shown_waits()
            done, self._done = self._done, {}
            events = [self._events.popleft() for _ in range(len(self._events))]
            active = [*done, *(one.worker for one in waits), *(one.worker for one in events)]
            for name in active:
                self._names.pop(name, None)
                self._names[name] = None
            while len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]
            named = self._names if all_names else ()
            workers = {name: done.get(name) or Activity() for name in (*named, *active)}
            numbers = {one.number for one in waits}
            draws = any(one.taken for one in done.values()) or any(one.wait.kind == "groups" for one in waits)
            draws = draws or any(
                kind_of_wait(one.detail) == "groups" for one in events if one.kind == EventKind.GAVE_UP
            )
            noted = {draws, False}
            beat = Beat(workers, waits, sorted(self._shown - numbers), events, ended, noted - self._limits_noted)
            try:
                write = partial(write_beat, process=self._process, beat=beat)
                await self._engine.write(write, self._scope, brief=True, patience=_PATIENCE, fenced=False)
            except BaseException:
                for name, counts in done.items():
                    self.of(name).add(counts)
                self._events = deque([*events, *self._events], _MOST_WAITS)
                raise
            self._limits_noted |= noted
            self._shown = numbers
            if all_names:
                self._sign_at = time.monotonic()

    async def _note_minute(self) -> None:
        minute = int((time.time() - self._behind) // HISTORY_SECONDS)
        if minute == self._minute:
            return
        noted = await self._engine.read(is_noted, self._scope)
        if noted or await self._engine.write(note_minute, self._scope, patience=_PATIENCE, fenced=False):
            self._minute = minute  # else another process is at it: the next beat will see it

    def _failed(self, error: Exception) -> None:
        """Complain once: at once of what nobody expects, else of what lasts (who puts or draws has the error, too)."""
        now, known = time.monotonic(), isinstance(error, ReplayBufError)
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        complain = not self._complained and (not known or now - since >= _COMPLAIN_SECONDS)
        self._complained |= complain
        level = logging.WARNING if complain else logging.DEBUG
        _logger.log(
            level, "who works and waits here can't be told to others at the moment: %s", error, exc_info=not known
        )
