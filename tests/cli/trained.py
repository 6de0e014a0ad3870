"""A run of some train steps by several workers, one of which makes bad groups from a step on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.common.worker_name import working_as

#: The first and last train step, and the one from which BAD makes bad groups.
FIRST, LAST, FELL = 405, 414, 413
BAD, TRAINER = "gpu-node-7", "trainer-0"
WORKERS = ("gpu-node-4", "gpu-node-5", "gpu-node-6", BAD)
GROUPS = 16


async def train(url: str) -> None:
    """Put and take GROUPS groups for each step, all workers in turn; the groups stay in the archive."""
    rng = random.Random(15)
    async with ReplayBufferConfig(url=url, policy="fifo", archive=1000, worker=TRAINER).build() as buffer:
        for step in range(FIRST, LAST + 1):
            for n in range(GROUPS):
                await put(buffer, step, WORKERS[n % 4], "code" if n >= GROUPS * 3 // 4 else "math", rng)
            async with buffer.lease_batch(
                {"math": GROUPS * 3 // 4, "code": GROUPS // 4}, heartbeat=False, current_train_step=step
            ):
                pass


async def put(buffer: ReplayBuffer, step: int, worker: str, task_name: str, rng: random.Random) -> int:
    """Put a group of one worker for a step, made from the weights of the step before."""
    right = 0.0 if worker == BAD and step >= FELL else {"math": 0.9, "code": 0.7}[task_name]
    with working_as(worker):
        uid = await buffer.put(
            [_rollout(float(rng.random() < right)) for _ in range(4)],
            task_name,
            model_step=step - 1,
            current_train_step=step,
        )
    assert uid is not None
    return uid


def _rollout(reward: float) -> Any:
    return RolloutState(
        message=[{"role": "user", "content": "How many primes are there below 100?"}],
        response="There are 25." if reward else "I don't know.",
        response_ids=np.arange(8, dtype=np.int32),
        reward={"score": reward},
        finish_reason="stop",
        status=Status.COMPLETED,
    )
