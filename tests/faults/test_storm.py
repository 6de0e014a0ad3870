"""Runs whose processes are killed at random, and what they do after a restore."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from replaybuf.rules.transitions import Tally
from tests.faults import roles
from tests.faults.conftest import Figures
from tests.faults.processes import end, entries, kill, numbers, start, wait_for_lines
from tests.faults.runs import POLICIES, STEPS, train
from tests.histories import workers
from tests.histories.history import Call, amiss, calls_in, numbers_of_calls
from tests.histories.workers import LEASED, TAKEN
from tests.stores import build, take_all

#: Enough for what is left at the end, in seconds.
_PATIENCE = 600
#: Seconds in which a process that calls cancels some of its takes.
_CANCELLING = 0.5


class Storm:
    """Processes in roles; whoever is killed is started again, with a new ledger."""

    def __init__(self, folder: Path, url: str, seed: int) -> None:
        self._folder, self._url = folder, url
        self._numbers = iter(range(1, 100_000))
        self._started: dict[str, tuple[BaseProcess, Path]] = {}
        self.stop, self.done = folder / "stop", folder / "done"
        self.snapshot = folder / "snapshot"
        self.prompts = (0, 0)  # how many, and in how many epochs
        self.chance = random.Random(seed)
        self.ledgers: dict[str, list[Path]] = {}
        self.killed: Counter[str] = Counter()

    def start(self, role: str) -> None:
        function, arguments = self._call(role)
        ledger = self._folder / f"{role}-{next(self._numbers)}.ledger"
        self.ledgers.setdefault(role, []).append(ledger)
        self._started[role] = start(function, ledger, self._url, *map(_plain, arguments)), ledger

    def _call(self, role: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        number = next(self._numbers)
        match role.partition("-")[0]:
            case "caller":
                return workers.work, (self.stop, number * 100_000, number, _CANCELLING)
            case "trainer":
                return roles.train, (self.done, number)
            case "worker":
                return roles.generate, (*self.prompts, number)
            case "refresher":
                return roles.refresh, (self.done,)
            case "drainer":
                return workers.drain, ()
            case _:
                return roles.save, (self.done, self.snapshot)

    def shoot(self, role: str) -> None:
        """Kill one, at whatever it is doing, and start it again; not one that has finished its work."""
        process, ledger = self._started[role]
        wait_for_lines(ledger, 1)
        time.sleep(self.chance.random() * 0.2)
        assert entries(ledger, "problem") == [], entries(ledger, "problem")[0].replace("\\n", "\n")
        if not process.is_alive():
            return
        kill(process)
        self.killed[role] += 1
        self.start(role)

    def finish(self) -> list[Call]:
        """The callers and workers end, then the others; what is left is taken. Return what all have called."""
        self.stop.touch()
        for role in [role for role in self._started if role.startswith(("caller", "worker"))]:
            end(*self._started.pop(role), _PATIENCE)
        self.done.touch()
        for role in list(self._started):
            end(*self._started.pop(role), _PATIENCE)
        self.start("drainer")
        end(*self._started.pop("drainer"), _PATIENCE)
        return calls_in(ledger for ledgers in self.ledgers.values() for ledger in ledgers)

    def returned(self) -> int:
        """Return how many calls have returned so far."""
        ledgers = [ledger for ledgers in self.ledgers.values() for ledger in ledgers]
        return sum(ledger.read_text().count('"known"') for ledger in ledgers if ledger.exists())


def _plain(argument: Any) -> Any:
    return str(argument) if isinstance(argument, Path) else argument


@pytest.fixture(params=[pytest.param((1, 5), id="short"), pytest.param((2, 200), id="long", marks=pytest.mark.long)])
def shots(request: pytest.FixtureRequest) -> tuple[int, int]:
    """A seed, and how many are killed."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def storm(tmp_path: Path, shared_url: str, shots: tuple[int, int]) -> Storm:
    return Storm(tmp_path, shared_url, shots[0])


ROLES = ["caller-1", "refresher", "caller-2", "saver", "caller-3"]


def test_every_group_is_accounted_for(storm: Storm, shared_url: str, shots: tuple[int, int], figures: Figures) -> None:
    """Leased ones are acknowledged once, taken ones delivered once, but for what a taker held when it was killed."""
    for role in ROLES:
        storm.start(role)
    for shot in range(shots[1]):
        storm.shoot(ROLES[shot % len(ROLES)])
    calls = storm.finish()
    figures.judge(sum(storm.killed.values()), calls)
    assert len(numbers_of_calls(calls, "put")) > shots[1]
    assert numbers(storm.ledgers["refresher"][-1], "step")
    asyncio.run(check_totals(shared_url, calls))
    asyncio.run(check_snapshot(storm.snapshot, set(numbers_of_calls(calls, "put", known=False))))


def test_every_prompt_is_trained_as_often_as_asked(
    storm: Storm, shared_url: str, shots: tuple[int, int], figures: Figures
) -> None:
    """Workers and trainers are killed at random: no prompt of the dataset is skipped, none is trained once more."""
    count, epochs = storm.prompts = (10 + 3 * shots[1], 2)
    roles = ["worker-1", "worker-2", "trainer-1", "worker-3"]
    for role in roles:
        storm.start(role)
    for shot in range(shots[1]):
        storm.shoot(roles[shot % len(roles)])
    calls = storm.finish()
    judge_prompts(figures, sum(storm.killed.values()), calls, count, epochs)
    assert sum(storm.killed.values()) > shots[1] // 2
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


async def check_snapshot(folder: Path, attempted: set[int]) -> None:
    """The last one is whole, whoever was killed in saving it."""
    async with build("sqlite:///:memory:") as copy:
        await copy.resume(folder)
        restored = [n for task in (TAKEN, LEASED) for n in await take_all(copy, task)]
    assert len(set(restored)) == len(restored)
    assert set(restored) <= attempted


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
