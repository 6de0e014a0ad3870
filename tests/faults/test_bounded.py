"""Several processes on a buffer that is too small: what was put is delivered, evicted or dropped, whoever is killed."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from replaybuf.rules.transitions import Tally
from tests.faults.processes import Ledger, end, kill, numbers, reap, start, wait_for_lines
from tests.stores import TASK, build, group, numbers_of

BOUNDED = {"capacity": 40, "max_deliveries": 0}
_PATIENCE = 280


async def produce_beyond_capacity(log: Ledger, url: str, first: int, count: int) -> None:
    """Put groups of older and older models into a buffer that holds 40."""
    async with build(url, **BOUNDED) as buffer:
        for number in range(first, first + count):
            await buffer.put(group(number), TASK, model_step=number % 7, current_train_step=8)
            log.write("did", number)


async def lease(log: Ledger, url: str, until: Path, size: int) -> None:
    """Lease groups and acknowledge them, until the file `until` exists and nothing is left; some leases fail."""
    turn = 0
    async with build(url, **BOUNDED) as buffer:
        while True:
            last = until.exists()  # noqa: ASYNC240
            turn += 1
            try:
                async with buffer.lease_batch({TASK: size}, seconds=1) as batch:
                    await asyncio.sleep(0.01)
                    if turn % 5 == 0:
                        raise OSError("the consumer fails")
                    leased = numbers_of(batch.batch[TASK])
            except OSError:
                continue
            if leased:
                log.write("did", *leased)
            elif last and not (await buffer.metrics())["tasks"][TASK]["leased"]:
                return


async def drop_old_groups(log: Ledger, url: str, until: Path) -> None:
    """Refresh again and again, to steps at which some groups are too old, and drop those."""
    async with build(url, **BOUNDED) as buffer:
        while not os.path.exists(until):  # noqa: ASYNC240
            await buffer.refresh_staleness(
                task_stale_thresholds={TASK: 7},
                current_train_step=8,
                expired_groups_retryable_by_task={TASK: False},
            )
            await asyncio.sleep(0.02)


class Crew:
    """Processes, each with a ledger of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url, self._numbers = folder, url, count()

    def start(self, role: Callable[..., Any], *arguments: object) -> tuple[BaseProcess, Path]:
        ledger = self._folder / f"{next(self._numbers)}-{role.__name__}.ledger"
        return start(role, ledger, self._url, *arguments), ledger

    def end(self, *started: tuple[BaseProcess, Path]) -> None:
        """Wait for processes that have to end well."""
        for process, ledger in started:
            assert end(process, ledger, _PATIENCE) == 0


@pytest.fixture
def crew(tmp_path: Path, shared_url: str) -> Iterator[Crew]:
    yield Crew(tmp_path, shared_url)
    reap()


def done(*ledgers: Path) -> list[int]:
    return [number for ledger in ledgers for number in numbers(ledger, "did")]


def twice(values: list[int]) -> list[int]:
    return [value for value, count in Counter(values).items() if count > 1]


async def tallies(url: str) -> Counter[Tally]:
    totals: Counter[Tally] = Counter()
    async with build(url) as buffer:
        for (_, _, name), count in (await buffer.storage.tallies()).items():
            totals[name] += count
    return totals


@pytest.mark.parametrize("each", [30, pytest.param(3000, marks=pytest.mark.long)])
def test_what_was_put_is_what_became_of_it(crew: Crew, shared_url: str, tmp_path: Path, each: int) -> None:
    """Delivered + evicted + dropped = put, whoever was killed; and nothing is acknowledged twice."""
    over = tmp_path / "over"
    producers = [crew.start(produce_beyond_capacity, first, each) for first in (0, 10_000)]
    doomed, doomed_log = crew.start(produce_beyond_capacity, 20_000, 100_000)
    wait_for_lines(doomed_log, 20)
    kill(doomed)
    dropping = crew.start(drop_old_groups, over)
    victim, victim_log = crew.start(lease, over, 1)
    wait_for_lines(victim_log, 3)
    consumers = [crew.start(lease, over, size) for size in (3, 4)]
    kill(victim)
    crew.end(*producers)
    over.touch()
    crew.end(*consumers, dropping)

    acknowledged = done(victim_log, *(log for _, log in consumers))
    assert twice(acknowledged) == []
    totals = asyncio.run(tallies(shared_url))
    put = done(doomed_log, *(log for _, log in producers))
    assert len(put) <= totals[Tally.PUT] <= len(put) + 1  # a put may be committed by whom was killed before it said so
    ends = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)
    assert totals[Tally.PUT] == sum(totals[name] for name in ends)
    assert totals[Tally.SIZE] == totals[Tally.LEASED] == totals[Tally.DELETED] == totals[Tally.REPLACED] == 0
    assert len(acknowledged) <= totals[Tally.TAKEN] <= len(acknowledged) + 1
    assert totals[Tally.RETURNED] > 0
    assert set(acknowledged) <= set(put) | {put[0] + 1, *(number + 1 for number in put)}
