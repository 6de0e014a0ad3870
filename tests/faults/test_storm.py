"""A run whose processes are killed at random moments, the others going on: every group is accounted for."""

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
from tests.faults.figures import Figures
from tests.faults.ledger import entries, numbers, wait_for_lines
from tests.faults.processes import end, kill, start
from tests.faults.roles import LEASED, TAKEN, TASKS
from tests.stores import build, take_all

TAKER_SIZE = 4
#: Enough for what is left at the end, in seconds.
_PATIENCE = 600


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

    def _call(self, role: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
        number = next(self._numbers)
        match role.partition("-")[0]:
            case "producer":
                return roles.produce, (self.stop, number * 100_000, number)
            case "trainer":
                return roles.train, (self.done, number)
            case "taker":
                return roles.take, (self.done, TAKER_SIZE)
            case "worker":
                return roles.generate, (*self.prompts, number)
            case "refresher":
                return roles.refresh, (self.done,)
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

    def finish(self) -> None:
        """The producers and workers end, and then the others when nothing is left."""
        self.stop.touch()
        for role in [role for role in self._started if role.startswith(("producer", "worker"))]:
            end(*self._started.pop(role), _PATIENCE)
        self.done.touch()
        for role in list(self._started):
            end(*self._started.pop(role), _PATIENCE)

    def numbers(self, prefix: str, what: str) -> list[int]:
        """What was written of a kind by all in a role."""
        ledgers = [
            ledger for role, all_of_it in self.ledgers.items() if role.startswith(prefix) for ledger in all_of_it
        ]
        return [number for ledger in ledgers for number in numbers(ledger, what)]

    def settling_when_killed(self) -> list[int]:
        """The groups that trainers were acknowledging when they were killed."""
        open_ones: list[int] = []
        for role, ledgers in self.ledgers.items():
            for ledger in ledgers if role.startswith("trainer") else ():
                lines = entries(ledger, "acking")
                settled = len(entries(ledger, "acked")) + len(entries(ledger, "late"))
                if len(lines) > settled:
                    open_ones += map(int, lines[-1].split())
        return open_ones


def _plain(argument: Any) -> Any:
    return str(argument) if isinstance(argument, Path) else argument


@pytest.fixture(params=[pytest.param((1, 10), id="short"), pytest.param((2, 200), id="long", marks=pytest.mark.long)])
def shots(request: pytest.FixtureRequest) -> tuple[int, int]:
    """A seed, and how many are killed."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def storm(tmp_path: Path, shared_url: str, shots: tuple[int, int]) -> Storm:
    return Storm(tmp_path, shared_url, shots[0])


ROLES = ["producer-1", "trainer-1", "taker-1", "refresher", "saver", "producer-2", "trainer-2"]


def test_every_group_is_accounted_for(storm: Storm, shared_url: str, shots: tuple[int, int], figures: Figures) -> None:
    """Leased ones are acknowledged once, taken ones delivered once, but for what a taker held when it was killed."""
    for role in ROLES:
        storm.start(role)
    for shot in range(shots[1]):
        storm.shoot(ROLES[shot % len(ROLES)])
    storm.finish()

    put, begun = storm.numbers("producer", "put"), set(storm.numbers("producer", "begin"))
    acked = {task: storm.numbers(role, "acked") for task, role in ((LEASED, "trainer"), (TAKEN, "taker"))}
    lost = {task: {n for n in put if TASKS[n % 2] == task} - set(acked[task]) for task in TASKS}
    with_the_dead = {LEASED: lost[LEASED] & set(storm.settling_when_killed()), TAKEN: set(lost[TAKEN])}
    doubled = [n for found in acked.values() for n, times in Counter(found).items() if times > 1]
    figures.add(
        faults=sum(storm.killed.values()),
        groups=len(put),
        lost=len(lost[LEASED] - with_the_dead[LEASED]),
        doubled=len(doubled),
        with_the_dead=sum(map(len, with_the_dead.values())),
    )
    assert doubled == []
    assert lost[LEASED] == with_the_dead[LEASED]
    assert len(lost[TAKEN]) <= TAKER_SIZE * storm.killed["taker-1"]
    assert set(acked[LEASED]) | set(acked[TAKEN]) <= begun
    assert len(put) > shots[1]
    assert storm.numbers("refresher", "step")
    asyncio.run(check_totals(shared_url, {task: len(acked[task]) for task in TASKS}, len(put), len(begun)))
    asyncio.run(check_snapshot(storm.snapshot, begun))


def test_every_prompt_is_trained_as_often_as_asked(
    storm: Storm, shared_url: str, shots: tuple[int, int], figures: Figures
) -> None:
    """Workers and trainers are killed at random: no prompt of the dataset is skipped, none is trained once more."""
    count, epochs = storm.prompts = (30 + 3 * shots[1], 2)
    roles = ["worker-1", "worker-2", "trainer-1", "worker-3"]
    for role in roles:
        storm.start(role)
    for shot in range(shots[1]):
        storm.shoot(roles[shot % len(roles)])
    storm.finish()

    trained, perhaps = Counter(storm.numbers("trainer", "acked")), Counter(storm.settling_when_killed())
    skipped = [number for number in range(count) if trained[number] + perhaps[number] < epochs]
    doubled = [number for number, times in trained.items() if times > epochs]
    figures.add(
        faults=sum(storm.killed.values()),
        groups=count * epochs,
        prompts=count * epochs,
        skipped=len(skipped),
        doubled=len(doubled),
        with_the_dead=count * epochs - trained.total(),
    )
    assert (skipped, doubled) == ([], [])
    assert set(trained) <= set(range(count))
    assert sum(storm.killed.values()) > shots[1] // 2
    totals = asyncio.run(totals_of(shared_url))
    assert totals[LEASED, Tally.TAKEN] == count * epochs
    assert totals[LEASED, Tally.SIZE] == totals[LEASED, Tally.LEASED] == 0


async def totals_of(url: str) -> Counter[tuple[str, Tally]]:
    """What the store has counted of each task."""
    totals: Counter[tuple[str, Tally]] = Counter()
    async with build(url) as buffer:
        for (task, _, name), count in (await buffer.storage.tallies()).items():
            totals[task, name] += count
    return totals


async def check_totals(url: str, acked: dict[str, int], put: int, begun: int) -> None:
    """What the store has counted itself agrees with the ledgers: what was put has left, and nothing is there."""
    totals = await totals_of(url)
    async with build(url) as buffer:
        assert [item.uid async for item in buffer.find({})] == []
    assert put <= sum(totals[task, Tally.PUT] for task in TASKS) <= begun
    for task in TASKS:
        assert totals[task, Tally.SIZE] == totals[task, Tally.LEASED] == 0
        assert totals[task, Tally.TAKEN] == totals[task, Tally.PUT]
        assert totals[task, Tally.TAKEN] >= acked[task]


async def check_snapshot(folder: Path, begun: set[int]) -> None:
    """The last one is whole, whoever was killed in saving it."""
    async with build("sqlite:///:memory:") as copy:
        await copy.resume(folder)
        found = [n for task in TASKS for n in await take_all(copy, task)]
    assert len(set(found)) == len(found)
    assert set(found) <= begun
