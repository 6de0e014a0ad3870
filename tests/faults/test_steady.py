"""Long lives in short: what must not grow, and what must not be lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf import ReplayBuffer
from replaybuf.storage.sql.engine.sqlite_connection import LOG_BYTES
from replaybuf.storage.sql.tasks import sweeper
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger, end, entries, start
from tests.long_life.__main__ import Life, live
from tests.postgres import ask, execute, new_database, running_server
from tests.stores import TASK, build, group, numbers_of

#: Seconds of the run; and for how long payloads of taken groups wait to be swept.
RUNS = [pytest.param((4, 0.2), id="short"), pytest.param((300, 2.0), id="long", marks=pytest.mark.long)]


WIDTH = 24
TEXT = 20_000
#: A step takes so long, on a busy machine, too: if more of them came in a second later, more would wait for the sweep.
STEP_SECONDS = 0.12


async def flow(ledger: Ledger, url: str, seconds: float, grace: float) -> None:
    """Steps of put, refresh, take and checkpoint; `step GROUPS-SO-FAR MEGABYTES-OF-MEMORY` after each.

    `grace` is how long payloads of taken groups wait for the sweep, and the time between two sweeps: less than two
    seconds for a run that is quicker than real ones.
    """
    sweeper.GRACE_SECONDS = sweeper._POLL_SECONDS = grace
    async with build(url, policy="prioritized", seed=3, keep_checkpoints=2) as buffer:
        start, step = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            step += 1
            await asyncio.gather(_step(buffer, step), asyncio.sleep(STEP_SECONDS))
            ledger.write("step", WIDTH * step, round(_resident_megabytes(), 1))
        assert await buffer.count_where({}) <= 2 * WIDTH


async def _step(buffer: ReplayBuffer, step: int) -> None:
    numbers = range(WIDTH * step, WIDTH * (step + 1))
    puts = (buffer.put(group(n, text="x" * TEXT), TASK, model_step=step, current_train_step=step) for n in numbers)
    await asyncio.gather(*puts)
    limits = {TASK: 4}
    await buffer.refresh_staleness(task_stale_thresholds=limits, current_train_step=step + 1)
    async with buffer.lease_batch({TASK: WIDTH}, timeout=60) as lease:
        items = [item.uid for item in lease.items[TASK]]
        await buffer.update_priorities(dict.fromkeys(items[: WIDTH // 2], 2.0))
    if step % 10 == 0:
        await buffer.checkpoint(step)


def _resident_megabytes() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def look_on(ledger: Ledger, url: str, seconds: float) -> None:
    """Read all the time, so that there is always somebody who reads."""
    async with build(url) as buffer:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            groups = [numbers_of([item.item]) async for item in buffer.find({}) if item.item]
            ledger.write("saw", len(groups))


#: How large a store is, in megabytes, from time to time, by what is measured.
Sizes = dict[str, list[float]]


def grown(found: Sizes) -> dict[str, tuple[float, float]]:
    """What is larger in the last third of the time than it was in the second, by more than a fifth and 8 MB."""
    growing = {}
    for name, sizes in found.items():
        third = len(sizes) // 3
        before, after = max(sizes[third : 2 * third]), max(sizes[2 * third :])
        if after > 1.2 * before + 8:
            growing[name] = before, after
    return growing


@pytest.fixture(params=["sqlite", "postgresql"])
def flowing_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new database; of PostgreSQL whose autovacuum comes every second: time goes more quickly here."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/run.db"
        return
    with running_server(own=True) as server, new_database(server) as url:
        execute(server, "ALTER SYSTEM SET autovacuum_naptime = '1s'")
        execute(server, "SELECT pg_reload_conf()")
        yield url


def measure(url: str, sizes: Sizes) -> None:
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        for name, file, allowed in (("database", path, 0), ("log", path.with_name(path.name + "-wal"), LOG_BYTES)):
            if file.exists():
                sizes[name].append(max(file.stat().st_size, allowed) / 1e6)
    else:
        [size] = asyncio.run(ask(url, "SELECT pg_database_size(current_database())"))
        sizes["database"].append(size / 1e6)


@pytest.mark.parametrize("run", RUNS)
def test_the_database_its_log_and_the_memory_stay_bounded(
    flowing_url: str, tmp_path: Path, run: tuple[float, float], figures: Figures
) -> None:
    """With somebody who always reads, and checkpoints that come and go."""
    seconds, grace = run
    flowing, looking = tmp_path / "flow", tmp_path / "look"
    processes = [
        start(flow, flowing, flowing_url, seconds, grace),
        start(look_on, looking, flowing_url, seconds),
    ]
    sizes, ends = defaultdict[str, list[float]](list), time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(seconds / 60)
        measure(flowing_url, sizes)
    for process, ledger in zip(processes, (flowing, looking), strict=True):
        assert end(process, ledger, 120) == 0
    steps = [line.split() for line in entries(flowing, "step")]
    sizes["memory"] = [float(memory) for _, memory in steps]
    groups = int(steps[-1][0])
    figures.add(groups=groups)
    through = groups * TEXT / 1e6
    assert grown(sizes) == {}, sizes
    assert max(sizes["database"]) < max(through / 2, 60), sizes
    assert len(entries(looking, "saw")) > 3


def test_a_short_life_loses_nothing(tmp_path: Path) -> None:
    life = Life(f"sqlite:///{tmp_path}/run.db", tmp_path, 0.1)
    asyncio.run(live({"sqlite": life}, 1.5))
    lines = life.end()
    assert lines[-1] == "what no order explains: [] (0)"
    assert any(line.startswith("| put: p50") for line in lines)
    assert "'put': 0" not in lines[-2]
