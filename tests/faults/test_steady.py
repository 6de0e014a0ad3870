"""Long lives in short: what must not grow, and what must not be lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf.storage.sql.engine.sqlite_connection import LOG_BYTES
from tests.faults import steady
from tests.faults.conftest import Figures
from tests.faults.processes import end, entries, start
from tests.long_life.__main__ import Life, live
from tests.postgres import ask, execute, new_database, running_server

#: Seconds of the run; and for how long payloads of taken groups wait to be swept.
RUNS = [pytest.param((4, 0.2), id="short"), pytest.param((300, 2.0), id="long", marks=pytest.mark.long)]


class Sizes:
    """How large a store is, in megabytes, from time to time."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add(self, name: str, size: float) -> None:
        self.found.setdefault(name, []).append(size)

    def grows(self) -> dict[str, tuple[float, float]]:
        """What is larger in the last third of the time than it was in the second, by more than a fifth and 8 MB."""
        growing = {}
        for name, sizes in self.found.items():
            third = len(sizes) // 3
            before, after = max(sizes[third : 2 * third]), max(sizes[2 * third :])
            if after > 1.2 * before + 8:
                growing[name] = before, after
        return growing


@pytest.fixture(scope="module")
def busy_server() -> Iterator[str]:
    """A PostgreSQL whose autovacuum comes every second instead of every minute: time goes more quickly here."""
    with running_server(own=True) as server:
        execute(server, "ALTER SYSTEM SET autovacuum_naptime = '1s'")
        execute(server, "SELECT pg_reload_conf()")
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def flowing_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/run.db"
    else:
        with new_database(request.getfixturevalue("busy_server")) as url:
            yield url


def measure(url: str, sizes: Sizes) -> None:
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        for name, file, allowed in (("database", path, 0), ("log", path.with_name(path.name + "-wal"), LOG_BYTES)):
            if file.exists():
                sizes.add(name, max(file.stat().st_size, allowed) / 1e6)
    else:
        [size] = asyncio.run(ask(url, "SELECT pg_database_size(current_database())"))
        sizes.add("database", size / 1e6)


@pytest.mark.parametrize("run", RUNS)
def test_the_database_its_log_and_the_memory_stay_bounded(
    flowing_url: str, tmp_path: Path, run: tuple[float, float], figures: Figures
) -> None:
    """With somebody who always reads, and checkpoints that come and go."""
    seconds, grace = run
    flow, look = tmp_path / "flow", tmp_path / "look"
    processes = [
        start(steady.flow, flow, flowing_url, seconds, grace),
        start(steady.look_on, look, flowing_url, seconds),
    ]
    sizes, ends = Sizes(), time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(seconds / 60)
        measure(flowing_url, sizes)
    for process, ledger in zip(processes, (flow, look), strict=True):
        assert end(process, ledger, 120) == 0
    steps = [line.split() for line in entries(flow, "step")]
    for _, memory in steps:
        sizes.add("memory", float(memory))
    groups = int(steps[-1][0])
    figures.add(groups=groups)
    through = groups * steady.TEXT / 1e6
    assert sizes.grows() == {}, sizes.found
    assert max(sizes.found["database"]) < max(through / 2, 60), sizes.found
    assert len(entries(look, "saw")) > 3


def test_a_short_life_loses_nothing(tmp_path: Path) -> None:
    life = Life(f"sqlite:///{tmp_path}/run.db", tmp_path, 0.1)
    asyncio.run(live({"sqlite": life}, 1.5))
    lines = life.end()
    assert lines[-1] == "what no order explains: [] (0)"
    assert any(line.startswith("| put: p50") for line in lines)
    assert "'put': 0" not in lines[-2]
