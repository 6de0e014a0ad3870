"""A full disk and a lock that others hold: an error that says so, nothing is lost, and it goes on afterwards."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from replaybuf.errors import LockedError
from tests.faults import disks
from tests.faults.figures import Figures
from tests.faults.ledger import Ledger, entries, numbers, wait_for_lines
from tests.faults.processes import end, kill, start
from tests.stores import TASK, build, fill, group, take_all


@pytest.mark.parametrize("kind", [disks.under_a_limit, disks.on_a_small_disk])
def test_a_full_disk_loses_nothing(tmp_path: Path, kind: object, figures: Figures) -> None:
    """Every call that fails says why; all groups whose put returned are there, and with more room it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    ledger = tmp_path / "ledger"
    assert end(start(kind, ledger, str(disk)), ledger) == 0  # type: ignore[arg-type]
    disks.check(ledger, figures, "run.db")
    put = numbers(ledger, "put")
    assert set(entries(ledger, "seen")[0].split()) == set(map(str, put[:-10]))


def hold_the_lock(ledger: Ledger, path: str, seconds: float) -> None:
    """A process that holds SQLite's write lock, as a shell with an open transaction does."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    ledger.write("locked")
    time.sleep(seconds)
    connection.execute("ROLLBACK")
    connection.close()
    ledger.write("free")


def test_a_lock_that_another_process_holds(tmp_path: Path, figures: Figures) -> None:
    """Reading goes on; writers hear of it after the lock timeout, nothing of theirs is stored, and then they go on."""
    path, ledger = tmp_path / "run.db", tmp_path / "ledger"

    async def main() -> list[int]:
        async with build(f"sqlite:///{path}", lock_timeout=0.3) as buffer:
            await fill(buffer, 5)
            holder = start(hold_the_lock, ledger, str(path), 60)
            wait_for_lines(ledger, 1)
            assert await buffer.count(TASK, "completed") == 5
            calls = [
                buffer.put(group(100), TASK),
                buffer.get(1, TASK),
                buffer.refresh_staleness(task_stale_thresholds={TASK: 5}, current_train_step=3),
            ]
            for call in calls:
                with pytest.raises(LockedError, match=r"run\.db for more than 0\.3 s"):
                    await call
            kill(holder)  # a lock is free when its holder is dead
            await buffer.put(group(5), TASK)
            return await take_all(buffer)

    found = asyncio.run(main())
    figures.compare(4, range(6), found)
    assert found == list(range(6))


# PostgreSQL on a disk that gets full: an error that says so, nothing is lost, and it goes on afterwards


@pytest.mark.long
def test_a_full_disk_of_the_server_loses_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> None:
    disk, ledger = tmp_path_factory.mktemp("disk"), tmp_path / "ledger"  # a short path: sockets need one
    for folder in (disk, *disk.parents):
        folder.chmod(0o755)  # the server isn't root
        if folder.name.startswith("pytest-of-"):
            break
    assert end(start(disks.postgres_on_a_small_disk, ledger, str(disk)), ledger, 300) == 0
    disks.check(ledger, figures, "postgresql://")
