"""Laws of production with a ledger, and clocks for it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf import Prompt, ReplayBuffer, Sampler, Status, StorageItem
from replaybuf.produce import ProduceStrategy, ProduceSummary, generations
from tests.produce.conftest import Script, ScriptedLoop, ledger_of
from tests.stores import TASK

LONG = 600.0


def use(buffer: ReplayBuffer, **options: Any) -> Sampler:
    return ledger_of(buffer, **({"dataset": [], "task_name": TASK} | options))


async def produce(
    strategy: ProduceStrategy,
    loop: Any,
    sampler: Any,
    size: Any,
    *,
    train_step: int = 1,
    model_step: int = 0,
    timeout: float | None = 30,
) -> ProduceSummary:
    """A batch of these steps."""
    return await strategy.produce_batch(
        loop, sampler, size, train_step=train_step, model_step=model_step, timeout=timeout
    )


async def items_of(buffer: ReplayBuffer, status: Status | None = None, task: str = TASK) -> list[StorageItem]:
    """The groups that are in the buffer and not leased."""
    query = {"task_name": task} | ({} if status is None else {"status": str(status)})
    return [item async for item in buffer.find(query)]


def ids(groups: Any) -> list[int]:
    """The group ids of items, prompts or groups."""
    rollouts = [getattr(one, "item", None) or getattr(one, "group", None) or one for one in groups]
    return [int(group[0].group_id) for group in rollouts]


async def leased(buffer: ReplayBuffer, task: str = TASK) -> int:
    """How many groups are leased."""
    tasks: Any = (await buffer.metrics(distributions=False))["tasks"]
    return int(tasks[task]["leased"]) if task in tasks else 0


async def take(buffer: ReplayBuffer, size: int) -> list[list[Any]]:
    """A batch, which has to be there."""
    batch, counts = await buffer.take_batch({TASK: size})
    assert counts == {TASK: size}
    return batch[TASK]


async def assert_accounted(sampler: Sampler) -> None:
    """Nothing is in flight, and every prompt that was drawn is in the buffer, once (nothing was taken)."""
    buffer, task = sampler.buffer, sampler.task_name
    found = ids(await items_of(buffer, task=task))
    assert await leased(buffer, task) == 0
    assert sorted(found) == list(range((await sampler.counts()).drawn))


def questions(groups: Any) -> list[str]:
    """What the prompts of `scripted.prompts` ask."""
    return [one.group[0].message[0]["content"].removeprefix("question ") for one in groups]


async def drawn(sampler: Sampler, count: int) -> list[Prompt]:
    """So many prompts, or all that are left."""
    found: list[Prompt] = []
    while len(found) < count and (more := await sampler.draw(count - len(found))):
        found += more
    return found


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
