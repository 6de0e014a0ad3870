"""The write-ahead log or the database deleted: whoever uses it hears of it, and what can be saved is saved."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from replaybuf.errors import StorageError
from tests.faults.figures import Figures
from tests.faults.ledger import Ledger, numbers, wait_for_lines
from tests.faults.processes import end, kill, start
from tests.reasons import because
from tests.stores import TASK, build, fill, group, take_all

COUNT = 30


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_log_that_is_deleted_while_it_is_open(tmp_path: Path, replaced: bool, figures: Figures) -> None:
    """Nothing more is stored, nobody else comes in, and closing the buffer saves all that was committed."""
    path = tmp_path / "run.db"
    url = f"sqlite:///{path}"
    buffer = build(url)
    await fill(buffer, COUNT)
    beside(path, "-wal").unlink()
    if replaced:
        beside(path, "-wal").touch()
    for call in (buffer.put(group(100), TASK), buffer.get(1, TASK), buffer.count_where({})):
        with pytest.raises(
            StorageError,
            match=r"run\.db-wal\) was deleted or replaced.*Close the buffer",
            check=because("not a database"),
        ):
            await call
    await buffer.close()
    async with build(url) as buffer:
        await buffer.put(group(COUNT), TASK)
        found = await take_all(buffer)
    figures.compare(1, range(COUNT + 1), found)
    assert found == list(range(COUNT + 1))


async def test_a_second_user_of_a_database_whose_log_is_gone_is_refused(tmp_path: Path) -> None:
    """It would make another log, and the database would be damaged."""
    path = tmp_path / "run.db"
    first, second = build(f"sqlite:///{path}"), build(f"sqlite:///{path}")
    await fill(first, COUNT)
    beside(path, "-wal").unlink()
    # Either is right: we look before SQLite does, and SQLite may be told by the first user's index of the log.
    why = r"run\.db-wal\) was deleted while the database was in use|its log \(-wal\) can't be read; it was truncated"
    with pytest.raises(StorageError, match=why, check=because("not a database")):
        await second.put(group(100), TASK)
    await second.close()
    assert not beside(path, "-wal").exists()
    await first.close()
    async with build(f"sqlite:///{path}") as buffer:
        assert await take_all(buffer) == list(range(COUNT))


async def test_a_database_that_is_deleted_or_replaced_while_it_is_open(tmp_path: Path, figures: Figures) -> None:
    """Nothing is stored where nobody would find it."""
    path, other = tmp_path / "run.db", tmp_path / "other.db"
    async with build(f"sqlite:///{other}") as buffer:
        await fill(buffer, 3)
    buffer = build(f"sqlite:///{path}")
    await fill(buffer, COUNT)
    for step in (path.unlink, lambda: other.rename(path)):
        step()
        with pytest.raises(
            StorageError,
            match=r"run\.db was deleted or replaced while this process had it open",
            check=because("not a database"),
        ):
            await buffer.put(group(100), TASK)
    await buffer.close()
    figures.add(faults=2)


async def put_and_stay(ledger: Ledger, url: str) -> None:
    async with build(url) as buffer:
        for number in range(COUNT):
            await buffer.put(group(number, text="x" * 50_000), TASK)
            ledger.write("put", number)
            if number == COUNT // 2:
                _checkpoint(url)
        ledger.write("ready")
        await asyncio.sleep(60)


def _checkpoint(url: str) -> None:
    import sqlite3

    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def after_a_kill(folder: Path) -> Path:
    """A database whose only user was killed: half of its groups are in the log."""
    path, ledger = folder / "run.db", folder / "ledger"
    process = start(put_and_stay, ledger, f"sqlite:///{path}")
    wait_for_lines(ledger, COUNT + 1)
    kill(process)
    assert numbers(ledger, "put") == list(range(COUNT))
    assert beside(path, "-wal").stat().st_size > 500_000
    return path


async def test_a_log_that_is_deleted_after_a_crash_is_missed(tmp_path: Path) -> None:
    """Opening says so; deleting the index of the log, too, goes on with what is in the file: groups that are whole."""
    path = after_a_kill(tmp_path)
    kept = beside(path, "-wal").read_bytes()
    beside(path, "-wal").unlink()
    buffer = build(f"sqlite:///{path}")
    with pytest.raises(StorageError, match=r"Put it back; or .*delete run\.db-shm", check=because("not a database")):
        await buffer.put(group(100), TASK)
    await buffer.close()
    beside(path, "-shm").unlink()
    async with build(f"sqlite:///{path}") as buffer:
        assert await take_all(buffer) == list(range(COUNT // 2 + 1))
    assert kept


async def test_a_log_that_is_put_back_brings_everything(tmp_path: Path, figures: Figures) -> None:
    path = after_a_kill(tmp_path)
    log = beside(path, "-wal").rename(tmp_path / "elsewhere")
    buffer = build(f"sqlite:///{path}")
    with pytest.raises(StorageError, check=because("not a database")):
        await buffer.put(group(100), TASK)
    await buffer.close()
    log.rename(beside(path, "-wal"))
    async with build(f"sqlite:///{path}") as buffer:
        found = await take_all(buffer)
    figures.compare(2, range(COUNT), found)
    assert found == list(range(COUNT))


async def test_a_torn_end_of_the_log_is_what_was_not_yet_committed(tmp_path: Path, figures: Figures) -> None:
    """Of a log that was cut off by a power cut, whole transactions are there up to the cut."""
    path = after_a_kill(tmp_path)
    log = beside(path, "-wal")
    log.write_bytes(log.read_bytes()[: log.stat().st_size - 100_000])
    async with build(f"sqlite:///{path}") as buffer:
        found = await take_all(buffer)
    figures.add(faults=1)
    assert COUNT // 2 < len(found) < COUNT
    assert found == list(range(len(found)))


async def open_and_close(ledger: Ledger, url: str, seconds: float) -> None:
    """Open the database, use it and close it, again and again: with its last user the log goes."""
    ends, count = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        async with build(url) as buffer:
            await buffer.put(group(count), TASK)
            assert await buffer.get(1, TASK)
        count += 1
    ledger.write("opened", count)


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.long)])
def test_a_log_that_goes_with_its_last_user_is_not_missed(tmp_path: Path, seconds: float) -> None:
    """Whoever opens the database at the moment when another one closes it."""
    ledgers = [tmp_path / str(number) for number in range(3)]
    processes = [start(open_and_close, ledger, f"sqlite:///{tmp_path}/run.db", seconds) for ledger in ledgers]
    for process, ledger in zip(processes, ledgers, strict=True):
        assert end(process, ledger, seconds + 60) == 0
        assert numbers(ledger, "opened")[0] > 0
