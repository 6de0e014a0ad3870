"""Calls of processes have the effects that they would have one after the other, wherever one interrupts another.

Each schedule of two lets one go on to one of its statements, then the other as far as it comes, then the first again
(one preemption: Musuvathi and Qadeer, "Iterative Context Bounding", PLDI 2007); each of three goes from one to another
as its seed says. Those by default are a sample.

    python -m pytest tests/schedules -m long                                    # all pairs, at six moments each
    REPLAYBUF_TEST_MOMENTS=1000 python -m pytest tests/schedules -m long        # at all of them: hours
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.faults.conftest import Figures
from tests.faults.conftest import figures as figures
from tests.faults.copies import Copies, copies
from tests.faults.operations import UNDONE, fill
from tests.schedules.actors import CANCELLED, Actor, Choice, actors_of, run, state_of, switching
from tests.stores import build

CALLS = ("put", "put replacing", "take", "lease", "acknowledge", "leases end", "refresh", "update", "delete")
CALLS += ("checkpoint", "restore", "sweep", "draw prompts", "finish")
PAIRS = [*itertools.combinations_with_replacement(CALLS, 2)]
#: Pairs in which a defect was found once: they are always tried.
KNOWN = [("update", "update")]
#: Those that a user can cancel.
CANCELLED_CALLS = [name for name in CALLS if name not in ("leases end", "sweep")]
#: The moments of each pair that the long forms try.
MOMENTS = int(os.environ.get("REPLAYBUF_TEST_MOMENTS", "6"))


async def seen(url: str) -> Any:
    async with build(url) as buffer:
        return await state_of(buffer)


class Calls:
    """Operations of some processes, and what may come of them: what they come to one after the other."""

    def __init__(self, names: Sequence[str], actors: Sequence[Actor], original: Copies) -> None:
        self.names, self._actors, self._original = names, actors[: len(names)], original
        #: The moments at which one is interrupted: which one, and how many points it has passed.
        self.moments: set[tuple[int, int]] = set()
        self._serial = self._each_after_another()
        self._undone: dict[int, list[Any]] = {}

    def _each_after_another(self, cancels: Mapping[int, int] = {}) -> list[Any]:
        outcomes = []
        for order in itertools.permutations(range(len(self.names))):
            outcomes.append(self.run(order, lambda active, _: active, cancels))
            self.moments |= {(actor, point) for actor in order for point in range(1, self._actors[actor].passed)}
        return outcomes

    def run(self, order: Sequence[int], choose: Choice, cancels: Mapping[int, int] = {}) -> Any:
        """Return the outcomes, and the state after them; the first one in this order begins."""
        with self._original.copy() as url:
            outcomes = run(self._actors, url, self.names, order, choose, cancels)
            return outcomes, asyncio.run(seen(url))

    def interrupted(self, first: int, at: int, cancels: Mapping[int, int] = {}) -> Any:
        """Return what comes of two of which one is interrupted at a point."""
        return self.run((first, 1 - first), switching(first, 1 - first, at), cancels)

    def problem(self, outcome: Any, cancelled: int | None = None) -> str | None:
        """Return what is found and what may be, if it may not. A call that was cancelled is done or undone."""
        allowed = self._serial
        if cancelled is not None and outcome[0][cancelled] == CANCELLED:
            serial = [] if self.names[cancelled] in UNDONE else self._serial
            allowed = [self._without(cancelled, other) for other in [*serial, *self._undone_by(cancelled)]]
        return None if outcome in allowed else f"{outcome} is none of {allowed}"

    def _without(self, cancelled: int, outcome: Any) -> Any:
        """Return what was found, whatever came of the call that is cancelled elsewhere."""
        outcomes, state = outcome
        return [*outcomes[:cancelled], CANCELLED, *outcomes[cancelled + 1 :]], state

    def _undone_by(self, cancelled: int) -> list[Any]:
        """Return what comes of the others without this one, or with a draw that is given back at any moment."""
        if cancelled not in self._undone:
            self._undone[cancelled] = undone = self._each_after_another({cancelled: 0})
            if (name := self.names[cancelled]) in UNDONE:
                names = [f"{name} undone" if actor == cancelled else call for actor, call in enumerate(self.names)]
                hidden = Calls(names, self._actors, self._original)
                undone += [hidden.interrupted(*moment) for moment in hidden.moments if moment[0] == cancelled]
        return self._undone[cancelled]


def some(chance: random.Random, entries: Sequence[Any], number: int) -> list[Any]:
    """Return so many of them, or all."""
    return chance.sample(entries, min(number, len(entries)))


@pytest.mark.parametrize(("pairs", "moments"), [(1, 3), pytest.param(len(PAIRS), MOMENTS, marks=pytest.mark.long)])
def test_two_calls_are_as_one_after_the_other(
    started: tuple[Copies, list[Actor]], pairs: int, moments: int, figures: Figures
) -> None:
    (original, actors), chance, problems = started, random.Random(1), []
    for names in [*KNOWN, *some(chance, PAIRS, pairs)]:
        pair = Calls(names, actors, original)
        for first, at in some(chance, sorted(pair.moments), moments):
            figures.add(faults=1)
            if problem := pair.problem(pair.interrupted(first, at)):
                problems.append(f"{names[first]}, interrupted by {names[1 - first]} at point {at}: {problem}")
    assert not problems, "\n\n".join(problems[:5])


@pytest.mark.parametrize(("pairs", "moments"), [(1, 3), pytest.param(1000, MOMENTS, marks=pytest.mark.long)])
def test_a_call_that_is_cancelled_is_done_or_undone(
    started: tuple[Copies, list[Actor]], pairs: int, moments: int, figures: Figures
) -> None:
    """At any of its statements, before or after another call has come between."""
    (original, actors), chance, problems = started, random.Random(2), []
    for names in some(chance, [*itertools.product(CANCELLED_CALLS, CALLS)], pairs):
        pair = Calls(names, actors, original)
        points = [(at, later) for first, at in sorted(pair.moments) if first == 0 and at > 1 for later in (at, at + 1)]
        for at, later in some(chance, points, moments):
            figures.add(faults=1)
            if problem := pair.problem(pair.interrupted(0, later, {0: at}), 0):
                problems.append(f"{names[0]}, cancelled at point {at}, and {names[1]} at point {later}: {problem}")
    assert not problems, "\n\n".join(problems[:5])


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(300), marks=pytest.mark.long)])
def test_three_calls_are_as_one_after_the_other(
    started: tuple[Copies, list[Actor]], seeds: range, figures: Figures
) -> None:
    """One of them is cancelled in half of the schedules."""
    (original, actors), problems = started, []
    for seed in seeds:
        chance = random.Random(seed)
        names = chance.choices(CALLS, k=3)
        if "leases end" in names and {"take", "lease"}.intersection(names):
            continue  # on PostgreSQL a draw passes over groups whose leases another process is just ending
        calls = Calls(names, actors, original)
        whom, at = chance.choice([moment for moment in sorted(calls.moments) if moment[1] > 1])
        if chance.random() < 0.5 or calls.names[whom] in UNDONE or calls.names[whom] not in CANCELLED_CALLS:
            whom = None
        choose = lambda active, _, c=chance: c.randrange(3) if c.random() < 0.3 else active  # noqa: E731
        outcome = calls.run((0, 1, 2), choose, {} if whom is None else {whom: at})
        figures.add(faults=1)
        if problem := calls.problem(outcome, whom):
            problems.append(f"seed {seed}, {calls.names}: {problem}")
    assert not problems, "\n\n".join(problems[:5])


@pytest.mark.parametrize("cancelled", [None, 0])
def test_a_call_of_several_transactions_is_caught(started: tuple[Copies, list[Actor]], cancelled: int | None) -> None:
    """When another one comes between, and when it is cancelled between them."""
    pair = Calls(("put in pieces", "put in pieces"), started[1], started[0])
    points = [at for first, at in pair.moments if first == 0 and at > 1]
    assert any(pair.problem(pair.interrupted(0, at, {} if cancelled is None else {0: at}), cancelled) for at in points)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Copies, list[Actor]]]:
    """A filled database that can be copied, and three processes."""
    server = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    folder = tmp_path_factory.mktemp("schedules")
    with copies(request.param, folder, server) as original, actors_of(folder / "ledger", 3) as actors:
        asyncio.run(fill(original.url))
        yield original, actors
