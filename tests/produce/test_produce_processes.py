"""Producers in processes of their own, on both databases, which are killed at random moments: every prompt is trained
once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
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
from tests.faults import processes
from tests.faults.processes import Ledger, entries, numbers
from tests.produce.conftest import Script, ScriptedLoop, ids, leased, prompts
from tests.stores import TASK, build

Role = Callable[..., None]


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    processes.reap()


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


class Run:
    """Several processes of a role, which are killed and replaced, and a trainer that takes what they produce."""

    def __init__(self, folder: Path, url: str, role: Role, kind: str, size: int, seed: int) -> None:
        self.url, self.size = url, size
        self._folder, self._role, self._kind = folder, role, kind
        self._chance = random.Random(seed)
        self._started = 0
        self.processes: list[tuple[Any, Path]] = []
        self.trained: list[int] = []
        self.kills = 0

    def start(self) -> None:
        """Another process."""
        self._started += 1
        ledger = self._folder / f"{self._role.__name__}-{self._started}"
        process = processes.start(self._role, ledger, self.url, self._kind, self.size, self._started)
        self.processes.append((process, ledger))

    def shoot(self) -> None:
        """Kill one of them, and start another in its place."""
        process, _ = self.processes.pop(self._chance.randrange(len(self.processes)))
        if process.exitcode is None:
            self.kills += 1
        processes.kill(process)
        self.start()

    async def train(self, buffer: ReplayBuffer, kills: int) -> None:
        """Train until all prompts have been, while so many processes are killed."""
        step, deadline = 0, time.monotonic() + 100
        due = sorted(self._chance.randrange(self.size * 3 // 4) for _ in range(kills))  # when so many were trained
        await publish(buffer, TrainState(1, 0))
        while len(self.trained) < self.size:
            assert time.monotonic() < deadline, f"{len(self.trained)} of {self.size} prompts trained"
            for group in await buffer.get(BATCH, TASK):
                self.trained += ids([group])
            if len(self.trained) >= BATCH * (step + 1):
                step = len(self.trained) // BATCH
                await publish(buffer, TrainState(step + 1, step))
            if self.kills < kills and len(self.trained) >= due[self.kills]:
                await asyncio.to_thread(self.shoot)
            await asyncio.sleep(0.01)
        await publish(buffer, TrainState(step + 1, step, finished=True))

    def end(self) -> None:
        """All of them end by themselves. Workers have loaded the weights that were published, each once."""
        highest = 0
        for process, ledger in self.processes:
            assert processes.end(process, ledger) == 0
            assert entries(ledger, "ended") == [""]
            loaded = numbers(ledger, "loaded")
            assert loaded == sorted(set(loaded))
            highest = max(highest, len(loaded))
        assert (highest > 1) == (self._role is work)


async def shot_at(folder: Path, url: str, role: Role, kind: str, *, size: int, kills: int, seed: int) -> None:
    """A run of three processes ends with every prompt trained once, whoever was killed when."""
    run = Run(folder, url, role, kind, size, seed)
    async with build(url, max_deliveries=0) as buffer:
        for _ in range(3):
            run.start()
        await run.train(buffer, kills)
        await asyncio.to_thread(run.end)
        assert sorted(run.trained) == list(range(size))
        assert run.kills == kills
        counts = await sampler_of(buffer, size).counts()
        assert (counts.drawn, counts.in_flight, counts.waiting, counts.finished) == (size, 0, 0, size)
        assert await leased(buffer) == 0
        assert await buffer.count_where({}) == 0


KINDS: list[tuple[Role, str]] = [
    (work, "async"),
    (work, "partial"),
    (work, "rollouts"),
    (produce, "sync"),
    (produce, "partial"),
]


@pytest.mark.parametrize(("role", "kind"), KINDS)
async def test_every_prompt_is_trained_once_though_producers_are_killed(
    tmp_path: Path, shared_url: str, role: Role, kind: str
) -> None:
    await shot_at(tmp_path, shared_url, role, kind, size=32, kills=2, seed=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("role", "kind"), KINDS)
async def test_every_prompt_is_trained_once_in_a_long_storm(
    tmp_path: Path, shared_url: str, role: Role, kind: str, seed: int
) -> None:
    await shot_at(tmp_path, shared_url, role, kind, size=500, kills=20, seed=seed)
