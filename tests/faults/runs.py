"""Whole runs in one process, which do the same every time: killed and restored, they have to give the same batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from replaybuf import FencedError, ReplayBuffer, RolloutState, Sampler, Status
from tests.faults.failpoints import FailPoints
from tests.faults.processes import Ledger
from tests.produce.conftest import ledger_of
from tests.stores import TASK, build, group, numbers_of

STEPS = 10
BATCH = 3

POLICIES: dict[str, dict[str, object]] = {
    "fifo": {"policy": "fifo"},
    "staleness": {"policy": "staleness"},
    "uniform": {"policy": "uniform", "seed": 7},
    "prioritized": {"policy": "prioritized", "seed": 7},
    "prompts": {"policy": "uniform", "seed": 3},
    "prioritized, drawn twice": {"policy": "prioritized", "seed": 7, "max_times_sampled": 2, "archive": 1000},
}


def train(ledger: Ledger, url: str, policy: str, kill_at: int | None) -> None:
    """From the last checkpoint to the last step; `batch STEP N N N` for each, and `left N ...` at the end."""
    points = FailPoints(ledger, kill_at)
    with points.armed():
        asyncio.run(_train(ledger, url, policy))


async def _train(ledger: Ledger, url: str, policy: str) -> None:
    async with build(url, **POLICIES[policy]) as buffer:
        prompts = ledger_of(buffer, range(15), TASK, epochs=2, make_group=_prompt)
        checkpoints = await buffer.checkpoints()
        if checkpoints:
            await buffer.restore(checkpoints[-1].step)
        else:
            await buffer.checkpoint(0)  # so that whoever dies in the first steps leaves something to go back to
        for step in range(checkpoints[-1].step + 1 if checkpoints else 1, STEPS + 1):
            await _step(ledger, buffer, step, prompts if policy == "prompts" else None)
            if step % 2 == 0:
                await buffer.checkpoint(step)
                ledger.write("checkpoint", step)
        remaining = [item.item async for item in buffer.find({"status": "completed"})]
        ledger.write("left", *numbers_of(remaining))


def _prompt(item: int, number: int) -> list[RolloutState]:
    return group(item, status=Status.INIT)


async def _step(ledger: Ledger, buffer: ReplayBuffer, step: int, prompts: Sampler | None) -> None:
    if prompts is not None:
        for prompt in await prompts.draw(4):
            for rollout in prompt.group:
                rollout.status = Status.COMPLETED
            await prompt.finish(model_step=step - 1, current_train_step=step)
    for number in range(10 * step, 10 * step + 5) if prompts is None else ():
        await buffer.put(
            group(number),
            TASK,
            model_step=max(0, step - number % 4),
            current_train_step=step,
            priority=0.5 + number % 7,
            key=str(number),
        )
    await buffer.refresh_staleness(task_stale_thresholds={TASK: 6}, current_train_step=step)
    async with buffer.lease_batch({TASK: BATCH}, heartbeat=False) as lease:
        numbers = numbers_of(lease.batch[TASK])
    items = [item async for item in buffer.find({"status": "completed"}, order_by="timestamp_id")]
    await buffer.update_priorities({item.uid: 1.0 + (step * place) % 5 for place, item in enumerate(items)})
    ledger.write("batch", step, *numbers)


# Processes of the run before a restore


async def old_run(ledger: Ledger, url: str, call: str, first: int) -> None:
    """Go on with one thing until it is fenced off."""
    async with build(url) as buffer:
        calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "put": lambda number: buffer.put(group(number), TASK),
            "take": lambda _: buffer.get(1, TASK),
            "wait": lambda _: buffer.take_batch({TASK: 100_000}, timeout=60),
            "lease": lambda _: _lease_once(buffer),
            "refresh": lambda n: buffer.refresh_staleness(task_stale_thresholds={TASK: None}, current_train_step=n),
            "checkpoint": lambda _: buffer.checkpoint(8),
        }
        ledger.write("open")
        for number in range(first, first + 100_000):
            try:
                await calls[call](number)
            except FencedError as error:
                ledger.write("fenced", error)
                return
            ledger.write("did", number)
            await asyncio.sleep(0.01)


async def _lease_once(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({TASK: 1}):
        await asyncio.sleep(0.05)
