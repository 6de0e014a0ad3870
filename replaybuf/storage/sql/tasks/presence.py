"""Presence: what this process tells others of itself, every few seconds, in the background.

Calls only count in memory. A beat writes the counts, the waits and those that gave up: within a second or so when a
wait has begun or ended, every `_NEWS_SECONDS` if anything was counted, every `_WAIT_SECONDS` while anybody waits, and
every `_SIGN_SECONDS` otherwise. Commits to a SQLite file wake all that wait there, so there are no more. A process
that has neither put nor drawn nor waited writes nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable

from replaybuf.errors import ReplayBufError
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.presence import GaveUp, Waiting
from replaybuf.storage.sql.engine.port import Engine
from replaybuf.storage.sql.engine.transaction import Scope
from replaybuf.storage.sql.schema.records import HISTORY_SECONDS
from replaybuf.storage.sql.statements.encoded import EncodedGroup
from replaybuf.storage.sql.statements.presence import Activity, Beat, Process, is_noted, note_minute, write_beat
from replaybuf.worker_name import host_name

# Waits of which nothing was heard for 15 seconds count as those of the dead.
_SOON_SECONDS, _NEWS_SECONDS, _WAIT_SECONDS, _SIGN_SECONDS = 1.0, 5.0, 10.0, 30.0
#: Seconds that a beat waits for a lock; the next one tells what this one had to.
_PATIENCE = 1.0
#: Seconds for which beats fail before the log has a warning.
_COMPLAIN_SECONDS = 60.0
#: The names that are kept seen though they do nothing, and the waits that are shown, of one process.
_MOST_NAMES, _MOST_WAITS = 200, 100

_logger = logging.getLogger("replaybuf.presence")


class Presence:
    """What the workers of this process have done since the last beat, and their waits."""

    def __init__(self, engine: Engine, scope: Scope) -> None:
        self._engine = engine
        self._scope = scope
        self._process = Process(host_name(), os.getpid(), time.time())
        self._done: dict[str, Activity] = {}
        self._names: dict[str, None] = {}  # the most recent one last
        self._waits: dict[int, Waiting] = {}
        self._gave_up: deque[GaveUp] = deque(maxlen=_MOST_WAITS)  # of more, the last ones are told
        self._shown: set[int] = set()  # the numbers of waits in the store
        self._beat_at = self._sign_at = 0.0
        self._minute = 0
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
        """Count groups that were put."""
        for one in stored:
            new = one.group
            done = self.of(new.worker)
            done.groups += 1
            done.rollouts += len(new.rollouts)
            done.tokens += one.tokens
            if new.status is Status.FAILED:
                done.failures += 1

    # Any thread

    def announce(self, waiting: Waiting) -> None:
        """Show a wait, from the next beat on."""
        self._waits[waiting.number] = waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Show a wait no longer."""
        self._waits.pop(waiting.number, None)

    def give_up(self, gave_up: GaveUp) -> None:
        """Tell with the next beat that a wait ended by its timeout."""
        self._gave_up.append(gave_up)

    # In the background

    async def beat(self) -> None:
        """Write what there is to tell, if it is time. Raises nothing: the next beat may succeed."""
        now = time.monotonic()
        if now - self._beat_at < _SOON_SECONDS:
            return
        waits = list(self._waits.values())[:_MOST_WAITS]
        news = bool(self._gave_up) or self._shown != {one.number for one in waits}
        counted = bool(self._done) and now - self._beat_at >= _NEWS_SECONDS
        waiting = bool(waits) and now - self._beat_at >= _WAIT_SECONDS
        sign = bool(self._names) and now - self._sign_at >= _SIGN_SECONDS
        if not (news or counted or waiting or sign or (self._done and not self._names)):
            return
        self._beat_at = now
        try:
            await self._write(waits, all_names=sign)
            await self._note_minute()
            self._failing_since = None
            self._complained = False
        except Exception as error:
            self._failed(error)

    async def end(self) -> None:
        """Say that the workers of this process have ended, and none of them waits. Raises nothing."""
        if not (self._names or self._done or self._shown or self._gave_up):
            return
        try:
            await self._write([], all_names=True, ended=True)
        except Exception as error:
            self._failed(error)

    async def _write(self, waits: list[Waiting], *, all_names: bool, ended: bool = False) -> None:
        done, self._done = self._done, {}
        gave_up = [self._gave_up.popleft() for _ in range(len(self._gave_up))]
        active = [*done, *(one.worker for one in waits), *(one.worker for one in gave_up)]
        for name in active:
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]
        named = self._names if all_names else ()
        workers = {name: done.get(name) or Activity() for name in (*named, *active)}
        numbers = {one.number for one in waits}
        beat = Beat(workers, waits, sorted(self._shown - numbers), gave_up, ended)
        try:
            await self._engine.write(
                lambda tx: write_beat(tx, self._process, beat), self._scope, brief=True, patience=_PATIENCE
            )
        except BaseException:
            for name, counts in done.items():
                self.of(name).add(counts)
            self._gave_up = deque([*gave_up, *self._gave_up], _MOST_WAITS)
            raise
        self._shown = numbers
        if all_names:
            self._sign_at = time.monotonic()

    async def _note_minute(self) -> None:
        minute = int(time.time() // HISTORY_SECONDS)
        if minute != self._minute:
            if not await self._engine.read(is_noted, self._scope):
                await self._engine.write(note_minute, self._scope, patience=_PATIENCE)
            self._minute = minute

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
