"""`kill -9` at every statement and every commit of every operation: all of it is done, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from replaybuf import ReplayBuffer
from replaybuf.rules.transitions import Tally
from tests.faults.conftest import Figures
from tests.faults.copies import Copies, copies, look, transact
from tests.faults.failpoints import SCHEMAS, choose
from tests.faults.operations import OFTEN, OPERATIONS, SNAPSHOT, fill, rarely, victim
from tests.faults.processes import end, entries, start
from tests.stores import TASK, build, group, take_all, until

#: How many of its points.
POINTS = [pytest.param(2, id="some"), pytest.param(None, id="all", marks=pytest.mark.long)]


@pytest.fixture(params=["sqlite", "postgresql"])
def original(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Copies]:
    server = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    with copies(request.param, tmp_path, server) as original:
        yield original


@dataclass
class Remains:
    """What is found after a death: every row, what can still be taken, in order, and what is in the snapshot."""

    state: dict[str, Any]
    left: list[int]
    snapshot: list[int] | None


class Run:
    """Processes that do one operation to copies of one database, and die at points of it."""

    def __init__(self, original: Copies, folder: Path, name: str) -> None:
        self._original, self._folder, self._name = original, folder, name
        self._count = 0

    def kill(self, point: int | None) -> tuple[Remains, Path]:
        """What remains after a death at a point, or the end (None); and the ledger."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        ledger = folder / "ledger"
        with self._original.copy() as url:
            process = start(victim, ledger, url, self._name, folder, point)
            assert (end(process, ledger) != 0) is (point is not None)
            return asyncio.run(self._look(url, folder)), ledger

    async def _look(self, url: str, folder: Path) -> Remains:
        """The store goes on: one more group is put, and all that are there are taken."""
        state = await look(url)
        if self._name in SCHEMAS:
            await transact(url, SCHEMAS[self._name])  # whoever opens it next does it again
        else:
            await transact(url, _leases_are_over)
        async with build(url) as buffer:
            await buffer.put(group(999), TASK)
            await until(lambda: none_is_leased(buffer))
            remaining = await take_all(buffer)
        return Remains(state, remaining, await self._snapshot(folder / SNAPSHOT))

    async def _snapshot(self, folder: Path) -> list[int] | None:
        if not (folder / "replaybuf.sqlite").exists():
            return None
        async with build("sqlite:///:memory:") as copy:
            await copy.resume(folder)
            return await take_all(copy)


async def none_is_leased(buffer: ReplayBuffer) -> bool:
    """Whether all leases have ended, and their groups are back."""
    tallies = await buffer.storage.tallies()
    return not any(count for (_, _, name), count in tallies.items() if name == Tally.LEASED)


def _leases_are_over(connection: Connection) -> None:
    connection.execute(text("UPDATE rb_group SET leased_until = 1 WHERE leased_until IS NOT NULL"))


@pytest.mark.parametrize("count", POINTS)
@pytest.mark.parametrize("name", [*rarely(OPERATIONS, OFTEN), *SCHEMAS])
def test_an_operation_that_is_killed_is_done_or_not_begun(
    original: Copies, tmp_path: Path, name: str, count: int | None, figures: Figures
) -> None:
    """Before its commit everything is as it was before, after it as when nobody is killed; and then it goes on."""
    if name in OPERATIONS:
        asyncio.run(fill(original.url))
    run = Run(original, tmp_path, name)
    finished, ledger = run.kill(None)
    points = entries(ledger, "point")
    # Of an operation of several transactions, what is there after each of them.
    after = {0: run.kill(0)[0], points.count("after commit"): finished}
    for point in choose(points, count):
        remains, ledger = run.kill(point)
        assert entries(ledger, "killed") == [points[point]]
        expected = after.setdefault(points[: point + 1].count("after commit"), remains)
        figures.compare(1, expected.left, remains.left)
        assert remains.state == expected.state, points[point]
        assert remains.left == expected.left, points[point]
        assert remains.snapshot in (after[0].snapshot, finished.snapshot)
    assert finished.left[-1] == 999
