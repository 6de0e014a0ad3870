"""Who waits for the model: other tasks and threads of this process."""

from __future__ import annotations

import time
from contextlib import suppress

from replaybuf.errors import InputError
from replaybuf.rules.circumstances import TRAINER, Circumstances, TrainState
from replaybuf.storage.reports import Waiting, WorkerEvent
from tests.reference.state import Memory


class Presence(Memory):
    """The waits under way, which those who wait hear of in their errors."""

    @property
    def presence(self) -> Presence:
        return self

    def publish_wait(self, waiting: Waiting) -> None:
        with self._lock:
            self._waits[waiting.number] = waiting

    def withdraw_wait(self, waiting: Waiting) -> None:
        with self._lock:
            self._waits.pop(waiting.number, None)

    def report(self, event: WorkerEvent) -> None:
        """Nobody could ask later: there are no events."""

    async def flush(self) -> None:
        """Nothing is kept back."""

    async def circumstances(self) -> Circumstances:
        tallies = await self.tallies()
        with self._lock:
            waits = [waiting.wait for waiting in self._waits.values()]
            published = self._cursors.get(TRAINER)
        trainer = None
        if published is not None:
            with suppress(InputError):  # withdrawn
                trainer = TrainState.decode(published.value)
        return Circumstances(time.time(), tallies, waits=waits, trainer=trainer)
