"""Runs whose processes are killed at random, and what they do after a restore."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replaybuf.rules.transitions import Tally
from tests.faults import roles
from tests.faults.conftest import Figures
from tests.faults.processes import Crowd, end, entries, numbers, start
from tests.faults.runs import POLICIES, STEPS, train
from tests.histories import workers
from tests.histories.history import Call, amiss, calls_in, numbers_of_calls
from tests.histories.workers import LEASED, TAKEN
from tests.stores import build

#: Seconds in which a process that calls cancels some of its takes.
_CANCELLING = 0.5


class Storm(Crowd):
    """The processes of a run: callers, or workers and trainers; and a refresher, a drainer."""

    def __init__(self, folder: Path, url: str, seed: int) -> None:
        super().__init__(folder, seed, self._call_of)
        self._url = url
        self.stop, self.done = folder / "stop", folder / "done"
        self.prompts = (0, 0)  # how many, and in how many epochs

    def _call_of(self, role: str, number: int) -> tuple[Any, ...]:
        url, stop, done = self._url, str(self.stop), str(self.done)
        match role.partition("-")[0]:
            case "caller":
                return workers.work, url, stop, number * 100_000, number, _CANCELLING
            case "trainer":
                return roles.train, url, done, number
            case "worker":
                return roles.generate, url, *self.prompts, number
            case "refresher":
                return roles.refresh, url, done
            case _:
                return workers.drain, url

    def finish(self) -> list[Call]:
        """The callers and workers end, then the others; what is left is taken. Return what all have called."""
        self.stop.touch()
        self.end("caller")
        self.end("worker")
        self.done.touch()
        self.end()
        self.start("drainer")
        self.end()
        return calls_in(self.ledgers)

    def returned(self) -> int:
        """Return how many calls have returned so far."""
        return sum(ledger.read_text().count('"known"') for ledger in self.ledgers if ledger.exists())


@pytest.fixture(params=[pytest.param((1, 5), id="short"), pytest.param((2, 200), id="long", marks=pytest.mark.long)])
def shots(request: pytest.FixtureRequest) -> tuple[int, int]:
    """A seed, and how many are killed."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def storm(tmp_path: Path, shared_url: str, shots: tuple[int, int]) -> Storm:
    return Storm(tmp_path, shared_url, shots[0])


ROLES = ["caller-1", "refresher", "caller-2", "caller-3"]


def test_every_group_is_accounted_for(storm: Storm, shared_url: str, shots: tuple[int, int], figures: Figures) -> None:
    """Leased ones are acknowledged once, taken ones delivered once, but for what a taker held when it was killed."""
    storm.start(*ROLES)
    for shot in range(shots[1]):
        storm.shoot(ROLES[shot % len(ROLES)])
    calls = storm.finish()
    figures.judge(storm.killed, calls)
    assert len(numbers_of_calls(calls, "put")) > shots[1]
    assert numbers([ledger for ledger in storm.ledgers if "refresher" in ledger.name][-1], "step")
    asyncio.run(check_totals(shared_url, calls))


def test_every_prompt_is_trained_as_often_as_asked(
    storm: Storm, shared_url: str, shots: tuple[int, int], figures: Figures
) -> None:
    """Workers and trainers are killed at random: no prompt of the dataset is skipped, none is trained once more."""
    count, epochs = storm.prompts = (10 + 3 * shots[1], 2)
    roles = ["worker-1", "worker-2", "trainer-1", "worker-3"]
    storm.start(*roles)
    for shot in range(shots[1]):
        storm.shoot(roles[shot % len(roles)])
    calls = storm.finish()
    judge_prompts(figures, storm.killed, calls, count, epochs)
    assert storm.killed > shots[1] // 2
    totals = asyncio.run(totals_of(shared_url))
    assert totals[LEASED, Tally.TAKEN] == count * epochs
    assert totals[LEASED, Tally.SIZE] == totals[LEASED, Tally.LEASED] == 0


def judge_prompts(figures: Figures, faults: int, calls: list[Call], count: int, epochs: int) -> None:
    skipped, doubled = amiss(calls, count, epochs)
    figures.add(faults=faults, groups=count * epochs, prompts=count * epochs)
    figures.add(skipped=len(skipped), doubled=len(doubled))
    assert (skipped, doubled) == ([], [])


async def totals_of(url: str) -> Counter[tuple[str, Tally]]:
    """What the store has counted of each task."""
    totals: Counter[tuple[str, Tally]] = Counter()
    async with build(url) as buffer:
        for (task, _, name), count in (await buffer.storage.tallies()).items():
            totals[task, name] += count
    return totals


async def check_totals(url: str, calls: list[Call]) -> None:
    """What the store has counted itself agrees with the ledgers: what was put has left, and nothing is there."""
    totals = await totals_of(url)
    async with build(url) as buffer:
        assert [item.uid async for item in buffer.find({})] == []
    known_puts, attempted = (len(numbers_of_calls(calls, "put", known=known_only)) for known_only in (True, False))
    assert known_puts <= totals[TAKEN, Tally.PUT] + totals[LEASED, Tally.PUT] <= attempted
    for task, kind in ((TAKEN, "take"), (LEASED, "acknowledge")):
        assert totals[task, Tally.SIZE] == totals[task, Tally.LEASED] == 0
        assert totals[task, Tally.TAKEN] == totals[task, Tally.PUT] >= len(numbers_of_calls(calls, kind))


def batches(ledger: Path) -> dict[int, str]:
    """The batch of each step."""
    return {int(step): batch for step, _, batch in (line.partition(" ") for line in entries(ledger, "batch"))}


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_batches_after_a_restore_are_those_of_a_run_that_was_never_killed(
    shared_url: str, tmp_path: Path, policy: str, kills: int, figures: Figures, request: pytest.FixtureRequest
) -> None:
    """From each restored step on, to the last batch and what is left in the end."""
    other_url = f"sqlite:///{tmp_path}/uninterrupted.db"
    whole_ledger = tmp_path / "whole"
    assert end(start(train, whole_ledger, other_url, policy, None), whole_ledger) == 0
    expected, points = batches(whole_ledger), len(entries(whole_ledger, "point"))
    assert len(expected) == STEPS
    chance = random.Random(policy)
    for number in range(kills + 1):
        ledger = tmp_path / f"{number}"
        # A third of the run on average, so that it gets somewhere between two deaths.
        kill_at = chance.randrange(points // 8, points // 2) if number < kills else None
        died = end(start(train, ledger, shared_url, policy, kill_at), ledger)
        by_step = batches(ledger)
        bad = [step for step, batch in by_step.items() if batch != expected[step]]
        figures.add(faults=int(died != 0), groups=sum(len(batch.split()) for batch in by_step.values()), lost=len(bad))
        assert bad == [], (entries(ledger, "killed"), by_step, expected)
        if died == 0:
            break
    assert max(by_step, default=STEPS) == STEPS
    assert entries(ledger, "left") == entries(whole_ledger, "left")
