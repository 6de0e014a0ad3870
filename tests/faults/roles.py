"""The processes of a run that is shot at: producers, a trainer that leases, one that takes, one that refreshes.

What a ledger says of a number was on the disk before the next thing was done: `begin` before a put and `put` after it,
`acking` before an acknowledgement and `acked` after it, and so on. `FILE` arguments are files that say when to end.
"""

from __future__ import annotations

import asyncio
import os
import random

from replaybuf import LeaseLostError, Prompt, PromptLedger, ReplayBuffer, Status
from tests.faults.ledger import Ledger
from tests.stores import build, group, number_of, numbers_of

LEASED, TAKEN = "leased", "taken"
TASKS = (LEASED, TAKEN)
STEPS = 1_000
LEASE_SECONDS = 0.7


def opened(url: str) -> ReplayBuffer:
    """Whoever comes by ends leases, by its own rules: no group is set aside however often its trainer dies."""
    return build(url, max_deliveries=0)


async def produce(ledger: Ledger, url: str, stop: str, first: int, seed: int) -> None:
    """Put groups of both tasks, eight at a time, until FILE exists; numbers from `first` on."""
    async with opened(url) as buffer:
        number = first
        chance = random.Random(seed)
        while not os.path.exists(stop):  # noqa: ASYNC240
            chosen = range(number, number + 8)
            number += 8
            ledger.write("begin", *chosen)
            await asyncio.gather(*(_put(ledger, buffer, n, chance) for n in chosen))
            await asyncio.sleep(0.01)


async def _put(ledger: Ledger, buffer: ReplayBuffer, number: int, chance: random.Random) -> None:
    text = "x" * chance.choice((10, 1000, 30_000))
    await buffer.put(
        group(number, 2, text=text),
        TASKS[number % 2],
        model_step=number % 50,
        current_train_step=51,
        tags={"n": number},
        priority=chance.random(),
    )
    ledger.write("put", number)


async def train(ledger: Ledger, url: str, done: str, seed: int) -> None:
    """Lease batches and acknowledge them; some are given back, some are left to run out. To the end, when FILE exists.

    Nothing of this task is left then.
    """
    async with opened(url) as buffer:
        chance = random.Random(seed)
        while True:
            last = os.path.exists(done)  # noqa: ASYNC240
            lease = await buffer.lease_batch({LEASED: chance.randint(1, 6)}, seconds=LEASE_SECONDS)
            found = numbers_of(lease.batch[LEASED])
            ledger.write("delivered", *found)
            await asyncio.sleep(0.01)
            fate = 0.0 if last else chance.random()
            if fate > 0.9:
                await lease.give_back(failed="bad luck")
            elif fate > 0.85:
                lease.stop()
            elif found:
                ledger.write("acking", *found)
                try:
                    await lease.acknowledge()
                    ledger.write("acked", *found)
                except LeaseLostError:  # on a machine that stood still for so long
                    ledger.write("late", *found)
            elif last and not await _left(buffer, LEASED):
                return


async def _left(buffer: ReplayBuffer, task: str) -> int:
    """How many groups of a task there are, whatever their status, leased ones too."""
    numbers = (await buffer.metrics(distributions=False))["tasks"][task]
    return int(sum(numbers["buffered"].values()) + numbers["leased"])


async def generate(ledger: Ledger, url: str, prompts: int, epochs: int, seed: int) -> None:
    """Generate for the prompts of a dataset until all are finished; some are given back, some saved half-way."""
    async with opened(url) as buffer:
        chance = random.Random(seed)
        source = PromptLedger(
            buffer,
            range(prompts),
            LEASED,
            make_group=lambda item, number: group(item, 2, status=Status.INIT),
            epochs=epochs,
            partial_rollouts=True,
            seconds=LEASE_SECONDS,
        )
        while drawn := await source.draw(chance.randint(1, 4), timeout=60):
            ledger.write("drawn", *(number_of(prompt.group) for prompt in drawn))
            for prompt in drawn:
                await _generate(ledger, prompt, chance)


async def _generate(ledger: Ledger, prompt: Prompt, chance: random.Random) -> None:
    number, fate = number_of(prompt.group), chance.random()
    try:
        await asyncio.sleep(0.02 * chance.random())
        if fate > 0.9:
            await prompt.give_back(failed="bad luck")
            return
        if fate > 0.6:
            await prompt.save()
        for rollout in prompt.group:
            rollout.status = Status.COMPLETED
        await prompt.finish()
        ledger.write("finished", number)
    except LeaseLostError:  # on a machine that stood still for so long
        ledger.write("late", number)


async def take(ledger: Ledger, url: str, done: str, size: int) -> None:
    """Take batches, until FILE exists and nothing is left."""
    async with opened(url) as buffer:
        while True:
            last = os.path.exists(done)  # noqa: ASYNC240
            found = numbers_of(await buffer.get(size, TAKEN))
            ledger.write("acked", *found)
            if last and not found:
                return
            await asyncio.sleep(0.01)


async def refresh(ledger: Ledger, url: str, done: str) -> None:
    """Move on from step to step, and change priorities and tags, until FILE exists. Nothing expires by it."""
    async with opened(url) as buffer:
        step = 51
        while not os.path.exists(done):  # noqa: ASYNC240
            step += 1
            limits = dict.fromkeys(TASKS, 1_000_000)
            expired = await buffer.refresh_staleness(task_stale_thresholds=limits, current_train_step=step)
            assert not any(expired.values())
            await buffer.update({"task_name": LEASED, "staleness": {"$gt": 60}}, priority=2.0, tags={"old": True})
            ledger.write("step", step)
            await asyncio.sleep(0.02)


async def save(ledger: Ledger, url: str, done: str, folder: str) -> None:
    """Save a snapshot again and again, until FILE exists."""
    async with opened(url) as buffer:
        while not os.path.exists(done):  # noqa: ASYNC240
            await buffer.save(folder)
            ledger.write("saved")
            await asyncio.sleep(0.05)
