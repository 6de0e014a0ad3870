"""Producers in processes of their own, on both databases, which are killed at random moments: every prompt is trained
once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import ProduceError
from replaybuf.produce import (
    AsyncProduceStrategy,
    ProduceStrategy,
    Sampler,
    SyncProduceStrategy,
    TrainState,
    produce_loop,
    publish,
)
from tests.faults.conftest import _no_process_is_left
from tests.faults.processes import Crowd, Ledger, entries, numbers
from tests.produce.conftest import Script, ScriptedLoop, ids, leased, prompts
from tests.stores import TASK, build

__all__ = ["_no_process_is_left"]

Role = Callable[..., None]


#: After so many seconds the prompts of who was killed come back.
LEASE_SECONDS = 0.7

BATCH = 4

PARTIAL = {"enable_partial_rollout": True, "over_sample": 0.5, "pause_timeout": 2}
STRATEGIES: dict[str, Callable[[], ProduceStrategy]] = {
    "sync": SyncProduceStrategy,
    "async": lambda: AsyncProduceStrategy(over_sample=0.5, pause_timeout=2),
    "rollouts": lambda: AsyncProduceStrategy(**PARTIAL, by_rollout=True),
    "partial": lambda: AsyncProduceStrategy(**PARTIAL, tail_batch_trigger_size=2, tail_batch_max_tries=2),
}


def scripted(size: int, seed: int) -> ScriptedLoop:
    """Some are slow, some fail at first."""
    chance = random.Random(seed)
    scripts = {
        number: Script(
            tokens=chance.choice([1, 2, 4, 20]), seconds=0.003, failures=chance.choice([0] * 9 + [1]), deaf=number == 3
        )
        for number in range(size)
    }
    return ScriptedLoop(scripts=scripts)


def sampler_of(buffer: ReplayBuffer, size: int) -> Sampler:
    """That of all processes of a run."""
    return Sampler(buffer, prompts(size), TASK, prompt_repeat_k=2, epochs=1, shuffle=11, seconds=LEASE_SECONDS)


def work(ledger: Ledger, url: str, kind: str, size: int, seed: int) -> None:
    """Produce until the trainer has finished."""

    async def run(buffer: ReplayBuffer) -> None:
        strategy: Any = STRATEGIES[kind]()
        loop = scripted(size, seed)

        async def load(state: TrainState) -> None:
            assert loop.running == 0
            ledger.write("loaded", state.model_step)

        await produce_loop(strategy, loop, sampler_of(buffer, size), BATCH, load_weights=load, timeout=60)
        ledger.write("ended")

    _run(url, run)


def produce(ledger: Ledger, url: str, kind: str, size: int, seed: int) -> None:
    """Produce batch after batch, until no prompt is left."""

    async def run(buffer: ReplayBuffer) -> None:
        strategy, loop, sampler, step = STRATEGIES[kind](), scripted(size, seed), sampler_of(buffer, size), 0
        try:
            while True:
                await strategy.produce_batch(loop, sampler, BATCH, train_step=step + 1, model_step=step, timeout=60)
                ledger.write("batch", step)
                step += 1
                while await buffer.count(TASK, "completed") >= BATCH:
                    await buffer.storage.changed(1.0, buffer.storage.version())
        except ProduceError as error:
            if "no prompt is left" not in str(error):
                raise
        ledger.write("ended")

    _run(url, run)


def _run(url: str, work: Callable[[ReplayBuffer], Awaitable[None]]) -> None:
    async def main() -> None:
        # Whoever comes by ends leases, by its own rules: no prompt is set aside however often its worker dies.
        async with build(url, max_deliveries=0) as buffer:
            await work(buffer)

    asyncio.run(main())


async def train(buffer: ReplayBuffer, crowd: Crowd, size: int, kills: int) -> list[int]:
    """Train until all prompts have been, while so many processes are killed; return their numbers."""
    trained, step, deadline = list[int](), 0, time.monotonic() + 100
    due = sorted(crowd.chance.randrange(size * 3 // 4) for _ in range(kills))  # when so many were trained
    await publish(buffer, TrainState(1, 0))
    while len(trained) < size:
        assert time.monotonic() < deadline, f"{len(trained)} of {size} prompts trained"
        trained += ids(await buffer.get(BATCH, TASK))
        if len(trained) >= BATCH * (step + 1):
            step = len(trained) // BATCH
            await publish(buffer, TrainState(step + 1, step))
        if crowd.killed < kills and len(trained) >= due[crowd.killed]:
            await asyncio.to_thread(crowd.shoot, crowd.chance.choice("abc"), 0, 0.0)
        await asyncio.sleep(0.01)
    await publish(buffer, TrainState(step + 1, step, finished=True))
    return trained


KINDS: list[tuple[Role, str]] = [
    (work, "async"),
    (work, "partial"),
    (work, "rollouts"),
    (produce, "sync"),
    (produce, "partial"),
]


#: Prompts, kills, and a seed.
RUNS = [(32, 2, 2), *(pytest.param(500, 20, seed, marks=pytest.mark.long) for seed in range(5))]


@pytest.mark.parametrize(("size", "kills", "seed"), RUNS)
@pytest.mark.parametrize(("role", "kind"), KINDS)
async def test_every_prompt_is_trained_once_though_producers_are_killed(
    tmp_path: Path, shared_url: str, role: Role, kind: str, size: int, kills: int, seed: int
) -> None:
    """Those that are left end by themselves. Workers have loaded the weights that were published, each once."""
    crowd = Crowd(tmp_path, seed, lambda _, number: (role, shared_url, kind, size, number))
    async with build(shared_url, max_deliveries=0) as buffer:
        crowd.start(*"abc")
        assert sorted(await train(buffer, crowd, size, kills)) == list(range(size))
        assert crowd.killed == kills
        ledgers = [ledger for _, ledger in crowd.running.values()]
        await asyncio.to_thread(crowd.end)
        assert [entries(ledger, "ended") for ledger in ledgers] == [[""]] * 3
        loads = [numbers(ledger, "loaded") for ledger in ledgers]
        assert loads == [sorted(set(steps)) for steps in loads]
        assert (max(map(len, loads)) > 1) == (role is work)
        counts = await sampler_of(buffer, size).counts()
        assert (counts.drawn, counts.in_flight, counts.waiting, counts.finished) == (size, 0, 0, size)
        assert await leased(buffer) == 0
        assert await buffer.count_where({}) == 0
