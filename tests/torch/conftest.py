"""A buffer with groups to train on, what has become of them, and ranks in processes of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.view.steps import read_steps

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
def config(tmp_path: Path) -> ReplayBufferConfig:
    return ReplayBufferConfig(url=f"sqlite:///{tmp_path}/buffer.db", policy="fifo")


@pytest.fixture
def shared_config(shared_url: str) -> ReplayBufferConfig:
    return ReplayBufferConfig(url=shared_url, policy="fifo")


# Importing torch takes seconds: one process does it, and ranks are forked from it.
_SERVER = multiprocessing.get_context("forkserver")


class Rank:
    """A process that plays a role of `tests.torch.roles`, and writes what it says into files."""

    def __init__(self, base: Path, role: str, *arguments: object) -> None:
        self._said = base
        self._process = _SERVER.Process(target=play, args=(base, role, *map(str, arguments)))
        self._process.start()

    def end(self, code: int = 0) -> tuple[str, str]:
        """Wait for its end and return what it said."""
        self._process.join(240)
        output, errors = (file.read_text("utf-8") if file.exists() else "" for file in outputs(self._said))
        assert self._process.exitcode == code, f"{output}\n{errors}"
        return output, errors

    def line(self) -> str:
        """Wait for the first line that it says."""
        file = outputs(self._said)[0]
        while not (file.exists() and "\n" in (text := file.read_text("utf-8"))):
            assert self._process.is_alive(), outputs(self._said)[1].read_text("utf-8")
            time.sleep(0.05)
        return text.splitlines()[0]

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Ranks:
    """Starts ranks, which find each other by a file, and ends those that are left."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._jobs = 0
        self._running: list[Rank] = []
        _SERVER.set_forkserver_preload(["tests.torch.roles"])

    def start(self, role: str, *arguments: object, size: int = 2) -> list[Rank]:
        """Start a job: all its ranks with the same role."""
        self._jobs += 1
        job = self._folder / f"job-{self._jobs}"
        common = role, self._url, self._folder, job
        started = [Rank(Path(f"{job}-{rank}"), *common, rank, size, *arguments) for rank in range(size)]
        self._running += started
        return started

    def close(self) -> None:
        for rank in self._running:
            rank.kill()


def play(base: Path, *arguments: str) -> None:
    """Play a role in this process. Its workers are forked, as they are in one that a user starts on Linux."""
    from tests.torch import roles

    multiprocessing.set_start_method("fork", force=True)
    for number, file in enumerate(outputs(base), 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    roles.main(list(arguments))


def outputs(base: Path) -> tuple[Path, Path]:
    """Return the files of what a rank says, and of its errors."""
    return base.with_suffix(".out"), base.with_suffix(".err")


@pytest.fixture
def ranks(shared_url: str, tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path, shared_url)
    yield started
    started.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.torch)


TASK = "math"


def group(number: int) -> list[RolloutState]:
    """Two rollouts, the second one right, whose prompt is the number."""
    return [
        RolloutState(
            message=[],
            prompt_ids=[number, number],
            response_ids=[1] * (1 + number % 5 + right),
            logprobs=[-0.5] * (1 + number % 5 + right),
            reward=float(right),
            status=Status.COMPLETED,
        )
        for right in (0, 1)
    ]


def put(config: ReplayBufferConfig, count: int, since: int = 0) -> None:
    async def put_all() -> None:
        async with config.build() as buffer:
            for number in range(since, since + count):
                await buffer.put(group(number), TASK)

    asyncio.run(put_all())


def totals(config: ReplayBufferConfig) -> Counter[Tally]:
    """The tallies of all tasks and statuses together, without the zeros."""

    async def read() -> Counter[Tally]:
        tallies: Counter[Tally] = Counter()
        async with config.build() as buffer:
            for (_, _, name), count in (await buffer.tallies()).items():
                tallies[name] += count
        return +tallies

    return asyncio.run(read())


def settled(config: ReplayBufferConfig) -> dict[int, int]:
    """The number of groups that were trained on at each train step, as `replaybuf trace` tells."""
    reader = open_reader(config.url)
    return {step.step: step.settled for step in reader.read(lambda tx: read_steps(tx, "default").rows)}


def numbers(items: list[Any]) -> list[int]:
    """Collate for tests: the numbers of the groups."""
    return [item.item[0].prompt_ids[0] for item in items]
