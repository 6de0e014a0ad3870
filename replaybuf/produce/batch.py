"""The production of one batch: groups in flight until enough are completed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from replaybuf.errors import NotReadyError, ProduceError
from replaybuf.produce.generations import Generations
from replaybuf.produce.sampler import Again
from replaybuf.rules.limits import Level
from replaybuf.rules.transitions import level_of
from replaybuf.values.rollouts.rollout import Status

_POLL_SECONDS = 1.0


class Batch(Generations):
    """A batch that is being produced: `ahead` groups beyond it, too.

    The groups `again` of the buffer come before new prompts (None: the sampler's), and `rest` after them.
    """

    ahead = 0
    again: Sequence[Again] | None = None
    rest: Sequence[Again] = ()

    async def produce(self) -> None:
        """Generate until the batch is complete."""
        self.summary.reused = await self._ready()
        await self.resume()
        async with self.ending():
            await self._fill()
            await self.pause()

    async def _fill(self) -> None:
        """Keep groups in flight until the batch is complete."""
        deadline, waits = time.monotonic() + self.patience, self.buffer.waits
        should_continue = self.strategy.should_continue
        while True:
            seen = waits.version()
            self.check()  # before the count, which includes the groups that are done
            completed = await self._ready()
            if not should_continue(completed, self.size):
                return
            self.check_waste(self._missing(completed))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                await self.pause()  # which may complete the missing groups
                completed = await self._ready()
                if not should_continue(completed, self.size):
                    return
                raise NotReadyError(f"after {self.patience:g} s: task {self.task_name}: {self._missing(completed)}")
            wanted = await self._wanted(completed)
            if wanted > 0 and await self.start(wanted, self.again, self.rest):
                continue  # until enough groups are in flight, or no prompt is left
            if self:
                await self.wait(min(remaining, _POLL_SECONDS))
            elif wanted > 0:
                await self._check_exhausted(completed)
                await waits.changed(seen, min(remaining, _POLL_SECONDS))

    async def _ready(self) -> int:
        return await self.buffer.count(self.task_name, Status.COMPLETED)

    def _missing(self, completed: int) -> str:
        return f"{completed} of {self.size} completed groups"

    async def _wanted(self, completed: int) -> int:
        """Return the number of groups to start now."""
        wanted = self.size + self.ahead - completed - len(self)
        slow = self.buffer.limits.slows_puts
        level = level_of(await self.buffer.tallies(), self.task_name) if slow else Level()
        wanted = self.bounded(wanted, level, len(self))
        return wanted if self else max(1, wanted)  # should_continue asked for more

    async def _check_exhausted(self, completed: int) -> None:
        """Raise ProduceError if no prompt is left to draw, and none is in flight elsewhere."""
        again = None if self.again is None else [*self.again, *self.rest]
        counts = await self.sampler.counts(again)
        if not counts.in_flight and not counts.waiting and await self._ready() <= completed:
            text = f"task {self.task_name}: {self._missing(completed)}, and {self.sampler.why_none}"
            raise ProduceError(text, reason="exhausted")
