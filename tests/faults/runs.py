"""Whole runs in one process, which do the same every time: killed and restored, they have to give the same batches."""

from __future__ import annotations

import asyncio

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
    """A run that may be killed at a point."""
    points = FailPoints(ledger, kill_at)
    with points.armed():
        asyncio.run(Run(ledger, url, policy).to_the_end())


def _prompt(item: int, number: int) -> list[RolloutState]:
    return group(item, status=Status.INIT)


class Run:
    """From the last checkpoint to the last step; `batch STEP N N N` for each, and `left N ...` at the end.

    While another server takes over it is `failing`, and goes back to its last checkpoint when that has `failed_over`.
    Steps that end in the meantime may have drawn otherwise: numbers aren't given twice, so that there is a gap. They
    are said to be `undone`.
    """

    def __init__(self, ledger: Ledger, url: str, policy: str) -> None:
        self._ledger, self._url, self._policy = ledger, url, policy
        self._prompts: Sampler | None = None
        self.step = 0
        self.failing = self.failed_over = False

    async def to_the_end(self) -> None:
        async with build(self._url, **POLICIES[self._policy]) as buffer:
            await self._begin(buffer)
            while self.step <= STEPS or self.failing:
                try:
                    if self.failed_over:
                        raise FencedError(reason="commits lost")
                    if self.step > STEPS:
                        await asyncio.sleep(0.01)
                        continue
                    await self._do_step(buffer, self.step)
                    if self.failing:
                        self._ledger.write("undone", self.step)
                    elif self.step % 2 == 0:
                        await buffer.checkpoint(self.step)
                    self.step += 1
                except FencedError as error:
                    if error.reason != "commits lost":
                        raise
                    self.failing = self.failed_over = False
                    await self._begin(buffer)
            remaining = [item.item async for item in buffer.find({"status": "completed"})]
            self._ledger.write("left", *numbers_of(remaining))

    async def _begin(self, buffer: ReplayBuffer) -> None:
        """Go to the last checkpoint, or make one that whoever dies in the first steps leaves to go back to."""
        checkpoints = await buffer.checkpoints()
        last = checkpoints[-1].step if checkpoints else 0
        await (buffer.restore(last) if checkpoints else buffer.checkpoint(0))
        self.step = last + 1
        if self._policy == "prompts":
            self._prompts = ledger_of(buffer, range(15), TASK, epochs=2, make_group=_prompt)

    async def _do_step(self, buffer: ReplayBuffer, step: int) -> None:
        if self._prompts is not None:
            for prompt in await self._prompts.draw(4):
                for rollout in prompt.group:
                    rollout.status = Status.COMPLETED
                await prompt.finish(model_step=step - 1, current_train_step=step)
        for number in range(10 * step, 10 * step + 5) if self._prompts is None else ():
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
        self._ledger.write("batch", step, *numbers)
