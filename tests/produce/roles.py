"""The processes of a run that is shot at: workers, and producers that make batch after batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from replaybuf import ReplayBuffer
from replaybuf.errors import ProduceError
from replaybuf.produce import (
    AsyncProduceStrategy,
    ProduceStrategy,
    Sampler,
    SyncProduceStrategy,
    TrainState,
    produce_loop,
)
from tests.faults.processes import Ledger
from tests.produce.conftest import Script, ScriptedLoop, prompts
from tests.stores import TASK, build

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
