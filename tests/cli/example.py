"""A small buffer as a run would leave it, the same every time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.common.worker_name import working_as
from tests.postgres import execute

HOSTILE = "\x1b]0;owned\x07[red]not markup[/red] \u202edesrever\x9b2J\r"

_PROBLEMS = {
    "math": "Find all primes p such that p^2 + {n} is a perfect square.",
    "code": "Write a function that returns the {n}-th Fibonacci number modulo 10^9 + 7.",
}


async def fill(url: str) -> None:
    """16 groups of two tasks, of which two were taken, one was dropped and some expired."""
    async with ReplayBufferConfig(url=url, worker="gpu-node-7").build() as buffer:
        for n in range(16):
            rng = random.Random(n)
            task_name = "code" if n % 3 == 2 else "math"
            await buffer.put(
                [rollout(task_name, n, i, rng) for i in range(4)],
                task_name,
                model_step=38 + n // 4,
                current_train_step=42,
                stale_threshold=3 if n == 2 else 4,
                expired_groups_retryable=n != 2,
                tags={"level": 1 + n % 3},
            )
        await buffer.take_batch({"math": 2})
        await buffer.refresh_staleness(task_stale_thresholds={"math": 4, "code": 3}, current_train_step=43)


async def fill_busy(url: str) -> None:
    """Two buffers; in one a group is archived, one is leased for an hour, and the lease of another is over."""
    async with ReplayBufferConfig(url=url, policy="fifo", archive=10).build() as buffer:
        for n in range(5):
            await buffer.put([rollout("math", n, 0, random.Random(n))], "math")
        await buffer.take_batch({"math": 1})
        await buffer.lease_batch({"math": 1}, seconds=3600, heartbeat=False)
        brief = await buffer.lease_batch({"math": 1}, seconds=3600, heartbeat=False)
    async with ReplayBufferConfig(url=url, name="eval").build() as buffer:
        await buffer.put([rollout("math", 9, 0, random.Random(9))], "math")
    # Its time is over now that nobody is there who would end it.
    statement = f"UPDATE rb_group SET leased_until = leased_until - 3601 WHERE lease = {brief.token}"
    await asyncio.to_thread(execute, url, statement)


async def fill_hostile(url: str) -> None:
    """One group whose every text tries to drive the terminal, drawn by a worker whose name does so."""
    group = [
        RolloutState(
            message=[{"role": HOSTILE, "content": HOSTILE}],
            response=HOSTILE,
            finish_reason=HOSTILE,
            rollout_id=HOSTILE,
            error_msg=HOSTILE,
            status=Status.COMPLETED,
        )
    ]
    async with ReplayBufferConfig(url=url, worker=HOSTILE, max_times_sampled=0).build() as buffer:
        await buffer.put(group, HOSTILE, tags={HOSTILE: HOSTILE}, key=HOSTILE)
        await buffer.sample({HOSTILE: 1}, current_train_step=1)


def rollout(task_name: str, n: int, i: int, rng: random.Random) -> Any:
    length = rng.randint(200, 2000)
    right = rng.random() < 0.5
    return RolloutState(
        rollout_id=4 * n + i,
        message=[
            {"role": "system", "content": "Think step by step."},
            {"role": "user", "content": _PROBLEMS[task_name].format(n=n)},
        ],
        prompt_ids=np.arange(40, dtype=np.int32),
        response=f"Let us see.\n\n{'It works out.' if right else 'There is no such thing.'} The answer is {7 * n + i}.",
        response_ids=np.zeros(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        response_mask=np.ones(length, dtype=np.int8),
        reward={"score": float(right)},
        finish_reason="length" if length > 1800 else "stop",
        status=Status.COMPLETED,
        extra_fields={"grader": "exact"},
    )


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
            tasks = ["code" if n >= GROUPS * 3 // 4 else "math" for n in range(GROUPS)]
            await asyncio.gather(*(put(buffer, step, WORKERS[n % 4], task, rng) for n, task in enumerate(tasks)))
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
