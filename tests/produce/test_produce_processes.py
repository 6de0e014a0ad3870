"""Producers in processes of their own, on both databases, which are killed at random moments: every prompt is trained
once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.produce import TrainState, publish
from tests.faults import processes
from tests.faults.processes import entries, numbers
from tests.produce.laws import ids, leased
from tests.produce.roles import BATCH, produce, sampler_of, work
from tests.stores import TASK, build

Role = Callable[..., None]


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    processes.reap()


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
        most = 0
        for process, ledger in self.processes:
            assert processes.end(process, ledger) == 0
            assert entries(ledger, "ended") == [""]
            loaded = numbers(ledger, "loaded")
            assert loaded == sorted(set(loaded))
            most = max(most, len(loaded))
        assert (most > 1) == (self._role is work)


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
