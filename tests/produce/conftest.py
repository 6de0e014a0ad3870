"""Buffers, prompts, agent loops and clocks for the tests of production, and a look at what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import heapq
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from replaybuf import Prompt, ReplayBuffer, RolloutState, Sampler, Status, StorageItem
from replaybuf.produce import Generated, ProduceStrategy, ProduceSummary, generations
from tests.stores import TASK, build, until


@pytest.fixture
async def buffer(url: str) -> AsyncIterator[ReplayBuffer]:
    """A buffer that keeps filtered groups, so that every prompt can be accounted for."""
    async with build(url, unfit=1000) as buffer:
        yield buffer


@pytest.fixture
def sampler(buffer: ReplayBuffer) -> Sampler:
    return sampler_of(buffer, prompt_repeat_k=2)


@pytest.fixture
async def _nothing_left(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> None:
    """A test that has an event loop leaves no task behind, and nothing for asyncio to complain of."""
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("_nothing_left")


@dataclass
class Script:
    """What happens to one group: so many tokens for each rollout, a pause of so many seconds before each.

    `failures`: so many calls raise `error`; `status`: that of the rollouts in the end; `deaf`: it doesn't notice a
    pause; `stubborn`: nor that it is cancelled; `returns`: what it returns, of the group.
    """

    tokens: int = 3
    seconds: float = 0.001
    failures: int = 0
    error: Callable[[], BaseException] = lambda: ValueError("no luck")
    status: Status = Status.COMPLETED
    reward: Callable[[int], float] = float
    deaf: bool = False
    stubborn: bool = False
    returns: Callable[[list[RolloutState]], Any] = lambda group: group


@dataclass
class ScriptedLoop:
    """Generates by script: `scripts` by group id, and `default` for the others. `sleep` waits for so many seconds."""

    default: Script = field(default_factory=Script)
    scripts: dict[int, Script] = field(default_factory=dict)
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    calls: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)  # the groups, as their generation began
    running: int = 0
    most: int = 0  # at the same time
    paused: bool = True
    pauses: int = 0

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> Any:
        number = int(group[0].group_id)  # type: ignore[arg-type]
        script = self.scripts.get(number, self.default)
        self.calls[number] += 1
        self.order.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._generate(group, script, self.calls[number], partial)
        finally:
            self.running -= 1
        return script.returns(group)

    async def _generate(self, group: list[RolloutState], script: Script, call: int, partial: bool) -> None:
        if call <= script.failures:
            await self._wait(script)
            raise script.error()
        for place, rollout in enumerate(group):
            if rollout.status == Status.COMPLETED:
                continue
            if not partial or rollout.response_ids is None:
                rollout.response_ids, rollout.response = [], ""
            while len(rollout.response_ids) < script.tokens and (script.deaf or not self.paused):
                await self._wait(script)
                rollout.response_ids.append(len(rollout.response_ids))
            rollout.response = "".join(map(str, rollout.response_ids))
            is_done = len(rollout.response_ids) >= script.tokens
            rollout.status = script.status if is_done else Status.ABORTED
            rollout.reward = script.reward(place) if is_done else None

    async def _wait(self, script: Script) -> None:
        try:
            await self.sleep(script.seconds)
        except asyncio.CancelledError:
            if not script.stubborn:
                raise

    async def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    async def resume(self) -> None:
        self.paused = False


@dataclass
class Told:
    """What `on_group` was told."""

    groups: list[Generated] = field(default_factory=list)

    def __call__(self, generated: Generated) -> None:
        self.groups.append(generated)

    @property
    def statuses(self) -> Counter[str]:
        return Counter(str(generated.status) for generated in self.groups)


def prompts(size: int) -> list[dict[str, Any]]:
    """A dataset of prompts that can be told apart."""
    return [{"prompt": f"question {number}"} for number in range(size)]


def sampler_of(buffer: ReplayBuffer, size: int = 60, **options: Any) -> Sampler:
    """A sampler of so many prompts, once each."""
    return Sampler(buffer, prompts(size), TASK, **({"epochs": 1} | options))


def forever(**options: Any) -> Script:
    """A script that never ends by itself."""
    return Script(tokens=10**9, **({"seconds": 0.005} | options))


def prompt(number: int) -> RolloutState:
    return RolloutState(rollout_id=number, message=[{"role": "user", "content": str(number)}], prompt_ids=[number])


def complete(group: list[RolloutState], text: str = "done") -> list[RolloutState]:
    for rollout in group:
        rollout.response, rollout.status = (rollout.response or "") + text, Status.COMPLETED
    return group


def numbers(prompts: list[Any]) -> list[int]:
    return [int(drawn_prompt.group[0].rollout_id) for drawn_prompt in prompts]


class Shuffled:
    """A dataset that is iterated: every epoch in another order, of which it is told."""

    def __init__(self, size: int) -> None:
        self._size, self._epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[RolloutState]:
        order = list(range(self._size))
        random.Random(self._epoch).shuffle(order)
        return map(prompt, order)


def indexed(size: int) -> list[RolloutState]:
    return [prompt(number) for number in range(size)]


def ledger_of(buffer: ReplayBuffer, dataset: Any, task_name: str, **options: Any) -> Sampler:
    """A sampler of rollouts, or groups of them, as they are, read once; what was interrupted begins anew."""
    return Sampler(
        buffer, dataset, task_name, **({"make_group": _as_it_is, "epochs": 1, "partial_rollouts": False} | options)
    )


def _as_it_is(item: Any, number: int) -> list[Any]:
    return list(item) if isinstance(item, list) else [item]


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
    rollouts = [getattr(entry, "item", None) or getattr(entry, "group", None) or entry for entry in groups]
    return [int(group[0].group_id) for group in rollouts]


async def leased(buffer: ReplayBuffer, task: str = TASK) -> int:
    """How many groups are leased."""
    tasks: Any = (await buffer.metrics(distributions=False))["tasks"]
    return int(tasks[task]["leased"]) if task in tasks else 0


async def until_waiting(sampler: Sampler, count: int) -> None:
    """Wait until so many prompts are to be handed out again."""

    async def they_are() -> bool:
        return (await sampler.counts()).waiting == count

    await until(they_are)


async def take(buffer: ReplayBuffer, size: int) -> list[list[Any]]:
    """A batch, which has to be there."""
    batch, counts = await buffer.take_batch({TASK: size})
    assert counts == {TASK: size}
    return batch[TASK]


async def assert_accounted(sampler: Sampler) -> None:
    """Nothing is in flight, and every prompt that was drawn is in the buffer, once (nothing was taken)."""
    buffer, task = sampler.buffer, sampler.task_name
    ids_found = ids(await items_of(buffer, task=task))
    assert await leased(buffer, task) == 0
    assert sorted(ids_found) == list(range((await sampler.counts()).drawn))


def questions(groups: Any) -> list[str]:
    """What the prompts of `scripted.prompts` ask."""
    return [drawn_prompt.group[0].message[0]["content"].removeprefix("question ") for drawn_prompt in groups]


async def drawn(sampler: Sampler, count: int) -> list[Prompt]:
    """So many prompts, or all that are left."""
    result: list[Prompt] = []
    while len(result) < count and (further := await sampler.draw(count - len(result))):
        result += further
    return result


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
        self._sleepers = [sleeper for sleeper in self._sleepers if not sleeper[2].done()]
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
