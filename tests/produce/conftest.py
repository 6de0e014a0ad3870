"""Databases for the tests of production, and a look at what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState, Sampler, Status
from replaybuf.produce import Generated
from tests.stores import TASK, build


@pytest.fixture
async def buffer(url: str) -> AsyncIterator[ReplayBuffer]:
    """A buffer that keeps filtered groups, so that every prompt can be accounted for."""
    async with build(url, unfit=1000) as buffer:
        yield buffer


@pytest.fixture
def sampler(buffer: ReplayBuffer) -> Sampler:
    """Of 60 prompts, each twice, once."""
    return Sampler(buffer, prompts(60), TASK, prompt_repeat_k=2, epochs=1)


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
            done = len(rollout.response_ids) >= script.tokens
            rollout.status = script.status if done else Status.ABORTED
            rollout.reward = script.reward(place) if done else None

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
        return Counter(str(one.status) for one in self.groups)


def prompts(size: int) -> list[dict[str, Any]]:
    """A dataset of prompts that can be told apart."""
    return [{"prompt": f"question {number}"} for number in range(size)]


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
    return [int(one.group[0].rollout_id) for one in prompts]


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
