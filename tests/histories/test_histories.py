"""A restore of a buffer that processes call meanwhile. (That some of them are killed: `tests/faults/test_storm.py`.)

python -m pytest tests/histories -m long    # 20 histories of ten seconds on each database
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import figures as figures
from tests.faults.figures import Figures
from tests.faults.processes import end, start
from tests.histories import workers
from tests.histories.history import calls_in

#: Seeds, and seconds of each history.
RUNS = [
    pytest.param((range(0, 10, 10), 2.0), id="short"),
    pytest.param((range(0, 200, 10), 10.0), id="long", marks=pytest.mark.long),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_restore_is_to_a_moment_within_the_checkpoint(
    new_url: Callable[[], str], tmp_path: Path, run: tuple[range, float], figures: Figures
) -> None:
    seeds, seconds = run
    for seed in seeds:
        url, folder = new_url(), tmp_path / str(seed)
        folder.mkdir()
        ledgers, stop = [folder / str(number) for number in range(4)], str(folder / "stop")
        processes = [start(workers.work, ledgers[n], url, stop, 100_000 * n, seed + n, 0.0) for n in range(3)]
        processes.append(start(workers.go_back, ledgers[3], url, stop, seconds))
        for process, ledger in zip(processes, ledgers, strict=True):
            assert end(process, ledger, 60 + seconds) == 0
        ledgers.append(folder / "drain")
        assert end(start(workers.drain, ledgers[4], url), ledgers[4], 120) == 0
        calls = calls_in(ledgers)
        figures.judge(1, calls)
        assert sum(call.kind == "restore" and call.known for call in calls) == 1
