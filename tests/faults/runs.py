"""Whole runs in one process, which do the same every time: killed and restored, they have to give the same batches."""

from __future__ import annotations

import asyncio

from replaybuf import ReplayBuffer, RolloutState, Sampler, Status
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
