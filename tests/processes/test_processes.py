"""Several processes on one database: nothing is lost, nothing comes twice, whoever dies."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.ext.asyncio

from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.sqlite_session import patiently
from replaybuf.storage.sql.engine.urls import parse_url
from tests.faults.processes import end, entries, kill, numbers, reap, start, wait_for_lines
from tests.processes import worker
from tests.stores import TASK, build, fill, group, numbers_of, opened, until


class Crew:
    """Processes with roles of `tests.processes.worker`, each with a ledger of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url, self._numbers = folder, url, count()

    def start(self, role: Callable[..., Any], *arguments: object) -> tuple[BaseProcess, Path]:
        ledger = self._folder / f"{next(self._numbers)}-{role.__name__}.ledger"
        return start(role, ledger, self._url, *arguments), ledger

    def end(self, *started: tuple[BaseProcess, Path]) -> None:
        """Wait for processes that have to end well."""
        for process, ledger in started:
            assert end(process, ledger) == 0


@pytest.fixture
def crew(tmp_path: Path, shared_url: str) -> Iterator[Crew]:
    yield Crew(tmp_path, shared_url)
    reap()


def done(*ledgers: Path) -> list[int]:
    return [number for ledger in ledgers for number in numbers(ledger, "did")]


def twice(values: list[int]) -> list[int]:
    return [value for value, count in Counter(values).items() if count > 1]


def test_a_waiting_take_wakes_when_another_process_puts(crew: Crew, shared_url: str) -> None:
    waiting, log = crew.start(worker.wait, 2)
    wait_for_lines(log, 1)
    with opened(shared_url) as buffer:
        time.sleep(0.3)
        asyncio.run(fill(buffer, 2))
        acknowledged = time.time()
        wait_for_lines(log, 2)
    crew.end((waiting, log))
    assert float(entries(log, "did")[0]) - acknowledged < 15  # it waits for 20


async def test_a_waiting_take_wakes_although_its_listening_connection_died(postgres_database: str) -> None:
    async with build(postgres_database) as buffer, build(postgres_database) as other:
        task = asyncio.create_task(buffer.take_batch({TASK: 1}, timeout=20))
        await other.count_where({})
        engine = sqlalchemy.ext.asyncio.create_async_engine(parse_url(postgres_database))

        async def listener_is_gone() -> bool:
            async with engine.connect() as connection:
                killed = await connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
                )
                return killed.rowcount > 0

        await until(listener_is_gone)
        for _ in range(3):  # and it is neither leaked nor listened to again in vain
            await asyncio.sleep(0.4)
            await until(listener_is_gone)
        await other.put(group(7), TASK)
        batch, _ = await task
        assert numbers_of(batch[TASK]) == [7]
        engine_of_buffer = buffer.storage.engine

        async def none_is_leaked() -> bool:
            return int(engine_of_buffer.pool.lent) <= 1  # for a moment the sweep may have another one

        await until(none_is_leaked)
        await engine.dispose()


@pytest.mark.long
def test_many_files_are_made_by_several_processes_at_once(tmp_path: Path) -> None:
    """SQLite doesn't wait for a lock at one moment of this, which once in 2,000 times was the moment of two."""
    crew = Crew(tmp_path, f"sqlite:///{tmp_path}/buffer.db")
    begin = time.time() + 3
    crew.end(*(crew.start(worker.create_many, begin, 300) for _ in range(5)))


def test_a_locked_database_is_asked_again_until_the_time_is_over() -> None:
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    answers = [locked, locked, None]

    def ask() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    patiently(ask, 5)
    assert answers == []
    for answers in ([sqlite3.OperationalError("no such table")] * 2, [locked] * 1000):
        with pytest.raises(sqlite3.OperationalError):
            patiently(ask, 0.02)
        assert answers


__all__ = ["crew"]  # the fixture


async def tallies(url: str) -> Counter[Tally]:
    totals: Counter[Tally] = Counter()
    async with build(url) as buffer:
        for (_, _, name), count in (await buffer.storage.tallies()).items():
            totals[name] += count
    return totals


@pytest.mark.parametrize("each", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_what_was_put_is_what_became_of_it(crew: Crew, shared_url: str, tmp_path: Path, each: int) -> None:
    """Delivered + evicted + dropped = put, whoever was killed; and nothing is acknowledged twice."""
    over = tmp_path / "over"
    producers = [crew.start(worker.produce_beyond_capacity, first, each) for first in (0, 10_000)]
    doomed, doomed_log = crew.start(worker.produce_beyond_capacity, 20_000, 100_000)
    wait_for_lines(doomed_log, 20)
    kill(doomed)
    dropping = crew.start(worker.drop_old_groups, over)
    victim, victim_log = crew.start(worker.lease, over, 1)
    wait_for_lines(victim_log, 3)
    consumers = [crew.start(worker.lease, over, size) for size in (3, 4)]
    kill(victim)
    crew.end(*producers)
    over.touch()
    crew.end(*consumers, dropping)

    acknowledged = done(victim_log, *(log for _, log in consumers))
    assert twice(acknowledged) == []
    totals = asyncio.run(tallies(shared_url))
    put = done(doomed_log, *(log for _, log in producers))
    assert len(put) <= totals[Tally.PUT] <= len(put) + 1  # a put may be committed by whom was killed before it said so
    left = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)
    assert totals[Tally.PUT] == sum(totals[name] for name in left)
    assert totals[Tally.SIZE] == totals[Tally.LEASED] == totals[Tally.DELETED] == totals[Tally.REPLACED] == 0
    assert len(acknowledged) <= totals[Tally.TAKEN] <= len(acknowledged) + 1
    assert totals[Tally.RETURNED] > 0
    assert set(acknowledged) <= set(put) | {put[0] + 1, *(number + 1 for number in put)}
