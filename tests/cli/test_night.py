"""At night a trainer waits, and its reward has fallen: what a person types, and what is answered within a screen."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.storage.sql.inspection.circumstances import read_waiters
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import BACKENDS, run
from tests.cli.trained import BAD, FELL, LAST, TRAINER, WORKERS, put, train
from tests.postgres import new_url
from tests.scripts import Script

_WAIT = """
async def wait():
    async with ReplayBufferConfig(url=sys.argv[1], policy="fifo", archive=1000, worker="trainer-0").build() as buffer:
        await buffer.take_batch({"math": 64}, timeout=600)

asyncio.run(wait())
"""


async def _go_on(url: str, groups: int) -> None:
    """Put groups for the next step, of which those of math expire before they are drawn."""
    rng = random.Random(16)
    async with ReplayBufferConfig(url=url, policy="fifo", archive=1000, worker=TRAINER).build() as buffer:
        puts = (
            put(buffer, LAST + 1, WORKERS[n % 4], "code" if n % 4 == n // 4 % 4 else "math", rng) for n in range(groups)
        )
        await asyncio.gather(*puts)
        await buffer.refresh_staleness(task_stale_thresholds={"math": 4, "code": 8}, current_train_step=LAST + 5)


@pytest.fixture(scope="module", params=BACKENDS)
def night(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the run: it has trained ten steps, and its trainer waits for the next."""
    yield from _night(request, tmp_path_factory.mktemp("night"), 160)


@pytest.fixture(params=BACKENDS)
def long_night(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The same, of 20,000 groups."""
    yield from _night(request, tmp_path, 20_000)


def _night(request: pytest.FixtureRequest, folder: Path, groups: int) -> Iterator[str]:
    for url in new_url(request.param, request, folder):
        asyncio.run(train(url))
        asyncio.run(_go_on(url, groups))
        trainer = Script(_WAIT, url)
        try:
            deadline = time.monotonic() + 60
            while not open_reader(url).read(lambda tx: read_waiters(tx, "default")):
                assert time.monotonic() < deadline
                time.sleep(0.3)
            yield url
        finally:
            trainer.kill()


def screen(*args: object) -> list[str]:
    """Return what a person sees on a screen of 24 lines."""
    return run(*args).stdout.splitlines()[:24]


def row(lines: list[str], *begin: str) -> list[str]:
    """Return the words of the line that begins so."""
    return next(words for words in map(str.split, lines) if words[: len(begin)] == list(begin))


def test_what_is_buffered_how_stale_and_with_which_rewards(night: str) -> None:
    lines = screen("stats", night)
    assert row(lines, "task", "status")[2:7] == ["groups", "rollouts", "reward", "stale", "max"]
    assert row(lines, "code", "completed")[2] == "40"
    assert row(lines, "math", "expired")[2] == "120"
    assert 0 < float(row(lines, "code", "completed")[4]) < 1


def test_why_nothing_is_ready(night: str) -> None:
    first = screen("why", night)[0]
    assert first.startswith(f"{TRAINER} waits since")
    assert "Nothing is ready for math (0 of 64): 120 groups have expired at the refresh to train step 419" in first


def test_which_worker_made_the_bad_ones(night: str) -> None:
    """From "the reward fell at step 413" in one command."""
    lines = screen("trace", night, "step", FELL)
    assert lines[1].split()[0] == BAD
    steps = screen("trace", night)
    assert float(row(steps, str(FELL))[4]) < -0.1


def test_the_three_worst_answers_side_by_side(night: str) -> None:
    lines = screen("show", night, "--worst", 3, "--task", "code")
    assert sum(line.count("I don't know.") for line in lines) == 3
    assert any(line.count("I don't know.") > 1 for line in lines)


@pytest.mark.long
def test_the_questions_of_a_long_night(long_night: str) -> None:
    """Each is answered in a second, though there are 20,000 groups."""
    began = time.monotonic()
    assert row(screen("stats", long_night), "code", "completed")[2] == "5,000"
    assert "15,000 groups have expired" in screen("why", long_night)[0]
    assert screen("trace", long_night, "step", FELL)[1].split()[0] == BAD
    assert sum(line.count("I don't know.") for line in screen("show", long_night, "--worst", 3)) == 3
    assert time.monotonic() - began < 8
