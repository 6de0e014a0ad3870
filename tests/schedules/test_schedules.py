"""Calls of processes have the effects that they would have one after the other, wherever one interrupts another.

Each schedule of two lets one go on to one of its statements, then the other as far as it comes, then the first again
(one preemption: Musuvathi and Qadeer, "Iterative Context Bounding", PLDI 2007); each of three goes from one to another
as its seed says. Those by default are a sample.

    python -m pytest tests/schedules -m long    # all of two, some thousands; 300 of three
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.copies import Copies, copies
from tests.faults.operations import fill
from tests.schedules.actors import Actor, Choice, actors_of, run, state_of, switching
from tests.stores import build

CALLS = ("put", "put replacing", "take", "lease", "acknowledge", "leases end", "refresh", "update", "delete")
CALLS += ("checkpoint", "restore", "sweep", "draw prompts", "finish")
PAIRS = [*itertools.combinations_with_replacement(CALLS, 2)]
#: Pairs in which a defect was found once: they are always tried.
KNOWN = [("update", "update")]


async def seen(url: str) -> Any:
    async with build(url) as buffer:
        return await state_of(buffer)


class Calls:
    """Operations of some processes, and what may come of them: what they come to one after the other."""

    def __init__(self, names: Sequence[str], actors: Sequence[Actor], original: Copies) -> None:
        self._names, self._actors, self._original = names, actors[: len(names)], original
        self.serial: list[Any] = []
        #: The moments at which one is interrupted: which one, and how many points it has passed.
        self.moments: set[tuple[int, int]] = set()
        for order in itertools.permutations(range(len(names))):
            self.serial.append(self.run(order, lambda active, _: active))
            self.moments |= {(one, point) for one in order for point in range(1, self._actors[one].passed)}

    def run(self, order: Sequence[int], choose: Choice) -> Any:
        """Return the outcomes, and the state after them; the first one in this order begins."""
        with self._original.copy() as url:
            outcomes = run(self._actors, url, self._names, order, choose)
            return outcomes, asyncio.run(seen(url))

    def interrupted(self, first: int, at: int) -> Any:
        """Return what comes of two of which one is interrupted at a point."""
        return self.run((first, 1 - first), switching(first, 1 - first, at))


@pytest.mark.parametrize("schedules", [16, pytest.param(None, marks=pytest.mark.long)])
def test_two_calls_are_as_one_after_the_other(started: tuple[Copies, list[Actor]], schedules: int | None) -> None:
    (original, actors), chance, wrong = started, random.Random(1), []
    for names in PAIRS if schedules is None else [*KNOWN, *chance.sample(PAIRS, schedules // 4)]:
        pair = Calls(names, actors, original)
        moments = sorted(pair.moments)
        for first, at in moments if schedules is None else chance.sample(moments, 4):
            if (found := pair.interrupted(first, at)) not in pair.serial:
                wrong.append(f"{names[first]}, interrupted by {names[1 - first]} at point {at}: {found}, {pair.serial}")
    assert not wrong, "\n\n".join(wrong[:5])


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(300), marks=pytest.mark.long)])
def test_three_calls_are_as_one_after_the_other(started: tuple[Copies, list[Actor]], seeds: range) -> None:
    (original, actors), wrong = started, []
    for seed in seeds:
        chance = random.Random(seed)
        names = chance.choices(CALLS, k=3)
        calls = Calls(names, actors, original)
        found = calls.run((0, 1, 2), lambda active, _, c=chance: c.randrange(3) if c.random() < 0.3 else active)
        if found not in calls.serial:
            wrong.append(f"seed {seed}, {names}: {found}, {calls.serial}")
    assert not wrong, "\n\n".join(wrong[:5])


@pytest.fixture(params=["sqlite", "postgresql"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Copies, list[Actor]]]:
    """A filled database that can be copied, and three processes."""
    server = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    with copies(request.param, tmp_path, server) as original, actors_of(tmp_path / "ledger", 3) as actors:
        asyncio.run(fill(original.url))
        yield original, actors
