"""What holds for the prompts of a run whatever happens to it, and how tests look at it."""

from __future__ import annotations

from typing import Any

from replaybuf import Prompt, ReplayBuffer, Status, StorageItem
from replaybuf.produce import ProduceStrategy, ProduceSummary, Sampler
from tests.stores import TASK


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
