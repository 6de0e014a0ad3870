"""What processes get of one buffer at the same time has an order that one process alone could have seen.

python -m pytest tests/histories -m long    # 20 histories of ten seconds on each database
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.processes import end, kill, start
from tests.histories import workers
from tests.histories.checker import violations
from tests.histories.history import calls_in

#: Seeds, and seconds of each history.
RUNS = [
    pytest.param((range(0, 10, 10), 3.0), id="short"),
    pytest.param((range(0, 200, 10), 10.0), id="long", marks=pytest.mark.long),
]
RUN = tuple[range, float]
WORKERS = 3


def drained(url: str, folder: Path) -> None:
    assert end(start(workers.drain, folder / "drain.ledger", url, folder / "drain"), folder / "drain.ledger", 120) == 0


@pytest.mark.parametrize("run", RUNS)
def test_calls_of_processes_that_are_killed_and_cancelled(new_url: Callable[[], str], tmp_path: Path, run: RUN) -> None:
    seeds, seconds = run
    for seed in seeds:
        url, folder, chance = new_url(), tmp_path / str(seed), random.Random(seed)
        folder.mkdir()
        files = [folder / str(number) for number in range(WORKERS + 1)]

        def begin(number: int, url: str = url, folder: Path = folder, seed: int = seed) -> object:
            path, ledger = folder / str(number), folder / f"{number}.ledger"
            return start(workers.work, ledger, url, path, 100_000 * number, seed + number, seconds, True)

        processes = [begin(number) for number in range(WORKERS)]
        time.sleep(seconds * chance.uniform(0.3, 0.9))
        kill(processes.pop(0))
        processes.append(begin(WORKERS))
        for number, process in enumerate(processes, 1):
            assert end(process, folder / f"{number}.ledger", 60 + seconds) == 0
        drained(url, folder)
        calls = calls_in([*files, folder / "drain"])
        assert violations(calls) == [], seed
        assert {"put", "take", "lease", "acknowledge"} <= {call.kind for call in calls}


@pytest.mark.parametrize("run", RUNS)
def test_a_restore_is_to_a_moment_within_the_checkpoint(new_url: Callable[[], str], tmp_path: Path, run: RUN) -> None:
    seeds, seconds = run
    for seed in seeds:
        url, folder = new_url(), tmp_path / str(seed)
        folder.mkdir()
        processes = [
            start(
                workers.work, folder / f"{n}.ledger", url, folder / str(n), 100_000 * n, 10 * seed + n, seconds, False
            )
            for n in range(WORKERS)
        ]
        processes.append(start(workers.go_back, folder / f"{WORKERS}.ledger", url, folder / str(WORKERS), seconds))
        for number, process in enumerate(processes):
            assert end(process, folder / f"{number}.ledger", 60 + seconds) == 0
        drained(url, folder)
        calls = calls_in([*(folder / str(number) for number in range(WORKERS + 1)), folder / "drain"])
        assert violations(calls) == [], seed
        assert sum(call.kind == "restore" and call.known for call in calls) == 1
