"""Calls of two processes have the effects that they would have one after the other, wherever one interrupts the other.

Each schedule lets one process go on to one of its statements, then the other as far as it comes, then the first again
(one preemption: Musuvathi and Qadeer, "Iterative Context Bounding", PLDI 2007). Those by default are a sample.

    python -m pytest tests/schedules -m long    # all of them: some thousands
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.copies import Copies, copies
from tests.faults.operations import fill
from tests.schedules.actors import Actor, actors_of, run, state_of, switching
from tests.stores import build

CALLS = ("put", "put replacing", "take", "lease", "acknowledge", "leases end", "refresh", "update", "delete")
CALLS += ("checkpoint", "restore", "sweep", "draw prompts", "finish")
PAIRS = [*itertools.combinations_with_replacement(CALLS, 2)]
#: Pairs in which a defect was found once: they are always tried.
KNOWN = [("update", "update")]


async def seen(url: str) -> Any:
    async with build(url) as buffer:
        return await state_of(buffer)


class Pair:
    """Two operations, and what may come of them."""

    def __init__(self, names: Sequence[str], actors: Sequence[Actor], original: Copies) -> None:
        self._names, self._actors, self._original = names, actors, original
        #: What the two come to one after the other.
        self.serial: list[Any] = []
        #: The moments at which one is interrupted: which one, and how many points it has passed.
        self.moments: list[tuple[int, int]] = []
        for first in (0, 1):
            self.serial.append(self.run(first, None))
            self.moments += [(first, point) for point in range(1, actors[first].passed)]

    def run(self, first: int, at: int | None) -> Any:
        """Return the outcomes, and the state after them, with the first one interrupted at a point, or not at all."""
        with self._original.copy() as url:
            outcomes = run(self._actors, url, self._names, first, switching(first, 1 - first, at))
            return outcomes, asyncio.run(seen(url))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("schedules", [40, pytest.param(None, marks=pytest.mark.long)])
def test_two_calls_are_as_one_after_the_other(
    kind: str, schedules: int | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("postgres_url") if kind == "postgresql" else None
    chance = random.Random(1)
    with copies(kind, tmp_path, server) as original, actors_of(tmp_path / "ledger", 2) as actors:
        asyncio.run(fill(original.url))
        wrong = []
        for names in PAIRS if schedules is None else [*KNOWN, *chance.sample(PAIRS, schedules // 4)]:
            pair = Pair(names, actors, original)
            for first, at in pair.moments if schedules is None else chance.sample(pair.moments, 4):
                if (found := pair.run(first, at)) not in pair.serial:
                    wrong.append(
                        f"{names[first]}, interrupted by {names[1 - first]} at point {at}: {found}, and not "
                        f"one of {pair.serial}"
                    )
    assert not wrong, "\n\n".join(wrong[:5])
