"""The cost of production beside generation: batches of 64 groups through a strategy, from prompt to the taken batch.

The engine makes a group of 8 rollouts (100 KB) instantly, or in 200 ms. The work around it is measured: prompts are
drawn through the ledger, results replace them, the batch is taken. Of a million prompts with difficulty the next 64
are chosen, after the results of the last 64 were taken in: processor time, without the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from benchmarks import groups
from benchmarks.databases import TASK, new_database, open_buffer, put_all
from benchmarks.table import Row, Settings, in_turn, milliseconds, number
from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.produce import Sampler, SyncProduceStrategy
from replaybuf.produce.difficulty import OrderedPrompts
from replaybuf.storage.values import Cursor

BATCH = 64
LATENCY = 0.2

_STRATEGY = SyncProduceStrategy()


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row, and two for each database."""
    yield _choice(settings)
    for kind in settings.databases:
        yield await _instant(settings, kind)
        yield await _with_latency(settings, kind)


def _choice(settings: Settings) -> Row:
    """Compare the choices within an epoch with the first one, in which all priorities are asked for."""
    size, numbers = settings.size(1_000_000, 100_000), np.random.default_rng(1)
    dataset, now = OrderedPrompts(range(size), None, 0, "varied"), Cursor(TASK)
    sums = numbers.integers(0, 9, size).astype(float)
    dataset.update_statistics(
        now, list(zip(range(size), [None] * size, [1] * size, [8] * size, sums, sums, sums / 8, strict=True))
    )
    seconds, items = [], list[int]()
    for version in range(1, 101):
        counts = [(place, 0, 2, 16, 9.0, 9.0, 0.5) for place in items]
        start = time.process_time()
        items, _, after = dataset.choose(now, counts, BATCH)
        seconds.append(time.process_time() - start)
        now = Cursor(TASK, version, value=after)
    worst, first = max(seconds[1:]), seconds[0]
    return Row(
        "production",
        f"{BATCH} of {size:,} prompts chosen by difficulty: the median and the longest of 99",
        f"{milliseconds(float(np.median(seconds[1:])))}, {milliseconds(worst)}",
        f"the first choice of an epoch {milliseconds(first)}",
        "",
        "<= 5 ms",
        worst <= 0.005,
    )


class Engine:
    """An agent loop that returns prepared rollouts after `seconds`."""

    def __init__(self, outcomes: list[list[RolloutState]], seconds: float = 0.0) -> None:
        self._made, self._seconds = iter(outcomes), seconds

    async def generate_group(self, group: list[Any], *, partial: bool) -> list[RolloutState]:
        await asyncio.sleep(self._seconds)
        new_group = next(self._made)
        for rollout, prompt in zip(new_group, group, strict=True):
            rollout.rollout_id, rollout.group_id, rollout.status = prompt.rollout_id, prompt.group_id, Status.COMPLETED
        return new_group

    async def pause(self) -> None:
        """Do nothing: no group is ever left over."""

    async def resume(self) -> None:
        """Do nothing: it is always ready."""


def _sampler(buffer: ReplayBuffer, batches: int) -> Sampler:
    prompts = [RolloutState(message=[{"role": "user", "content": f"{n}"}]) for n in range(batches * BATCH)]
    return Sampler(buffer, prompts, TASK, prompt_repeat_k=8)


async def _produce(buffer: ReplayBuffer, sampler: Sampler, engine: Engine) -> None:
    await _STRATEGY.produce_batch(engine, sampler, BATCH, train_step=groups.TRAIN_STEP, model_step=groups.MODEL_STEP)
    await buffer.take_batch({TASK: BATCH})


def _made(rounds: int) -> list[list[RolloutState]]:
    return [groups.arrays() for _ in range((rounds + 2) * BATCH)]


async def _instant(settings: Settings, kind: str) -> Row:
    """Compare with a put and a take of the same groups, without prompts."""
    rounds = settings.rounds * 2
    databases = new_database(kind), new_database(kind)
    async with databases[0] as ours, databases[1] as theirs, open_buffer(ours) as buffer, open_buffer(theirs) as bare:
        sampler, engine = _sampler(buffer, rounds + 2), Engine(_made(rounds))
        other_groups = iter(_made(rounds))

        async def put_and_take() -> None:
            await put_all(bare, [next(other_groups) for _ in range(BATCH)])
            await bare.take_batch({TASK: BATCH})

        pairs = await in_turn(lambda: _produce(buffer, sampler, engine), put_and_take, rounds)
    produced, plain = pairs.median
    return Row(
        "production",
        f"{kind}: prompts drawn, {BATCH} groups put and taken; an instant engine",
        f"{number(BATCH / produced)}/s",
        f"put and take_batch alone {number(BATCH / plain)}/s",
        pairs.ratio(faster=True)[1],
    )


async def _with_latency(settings: Settings, kind: str) -> Row:
    """Compare with the same calls of the engine, all at once, without storing results."""
    rounds = settings.rounds
    async with new_database(kind) as url, open_buffer(url) as buffer:
        sampler, engine = _sampler(buffer, rounds + 2), Engine(_made(rounds), LATENCY)
        prompts = [[RolloutState(message=[]) for _ in range(8)] for _ in range(BATCH)]
        bare = Engine(_made(rounds), LATENCY)

        async def generate() -> None:
            await asyncio.gather(*(bare.generate_group(prompt, partial=False) for prompt in prompts))

        pairs = await in_turn(lambda: _produce(buffer, sampler, engine), generate, rounds)
    produced, plain = pairs.median
    middle, ratio_text = pairs.ratio(faster=False)
    return Row(
        "production",
        f"{kind}: a batch of {BATCH} groups, generated in {milliseconds(LATENCY)} each",
        milliseconds(produced),
        f"the engine alone {milliseconds(plain)}",
        ratio_text,
        "<= 1.2",
        middle <= 1.2,
    )
