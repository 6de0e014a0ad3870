"""Time that is written down beforehand: it moves on when the strategy waits, and by one step at a time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf.produce import generations
from tests.produce.scripted import Script, ScriptedLoop

_REAL_SECONDS = 0.0005


class Clock:
    """A clock for `ScriptedLoop.sleep`.

    It wakes who sleeps one after the other, in the order of their times, then of their falling asleep; the next one
    only when the one before sleeps again or has ended, with all that the store had to do. So the order in which groups
    are done depends on the script alone, whatever the machine and the store are busy with.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        self._tasks: list[asyncio.Task[Any]] = []

    async def sleep(self, seconds: float) -> None:
        """Sleep by this clock."""
        task = asyncio.current_task()
        assert task is not None
        if task not in self._tasks:
            self._tasks.append(task)
        self._count += 1
        waking = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, self._count, waking))
        await waking

    async def run_until(self, holds: Callable[[], bool]) -> None:
        """Let time pass, until something holds."""
        await self._settle()
        while not holds():
            self._wake_next()
            await self._settle()

    def _wake_next(self) -> None:
        self.now, _, waking = heapq.heappop(self._sleepers)
        waking.set_result(None)

    async def _settle(self) -> None:
        """Wait until all sleep or have ended."""
        await asyncio.sleep(0)  # who was begun just now falls asleep first
        while self._awake():  # noqa: ASYNC110
            await asyncio.sleep(_REAL_SECONDS)

    def _awake(self) -> int:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._sleepers = [one for one in self._sleepers if not one[2].done()]
        heapq.heapify(self._sleepers)
        return len(self._tasks) - len(self._sleepers)

    def governs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let time pass whenever a strategy waits for one of its groups, or for all of them in a pause."""
        wait = generations.Generations.wait
        clock = self

        async def wait_by_the_clock(running: generations.Generations, timeout: float) -> None:
            await clock.run_until(lambda: any(task.done() for task in running._tasks))
            await wait(running, timeout)

        monkeypatch.setattr(generations.Generations, "wait", wait_by_the_clock)

    async def drain(self) -> None:
        """Let time pass until nobody sleeps any more: for the `pause` of a loop that sleeps by this clock."""
        await self.run_until(lambda: not self._sleepers)


class ClockedLoop(ScriptedLoop):
    """A scripted loop that goes by a clock."""

    def __init__(self, clock: Clock, default: Script | None = None, scripts: dict[int, Script] | None = None) -> None:
        super().__init__(default or Script(seconds=1), scripts or {}, sleep=clock.sleep)
        self.clock = clock

    async def pause(self) -> None:
        """All wake and see it, one after the other."""
        await super().pause()
        await self.clock.drain()
