"""Several processes on a buffer that is too small: what was put is delivered, evicted or dropped, whoever is killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf.rules.transitions import Tally
from tests.faults.processes import Crowd, Ledger, numbers
from tests.faults.test_storm import totals_of
from tests.stores import TASK, build, group, numbers_of

BOUNDED = {"capacity": 40, "max_deliveries": 0}


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


def done(crowd: Crowd, role: str) -> list[int]:
    return [number for ledger in crowd.ledgers if ledger.name.startswith(role) for number in numbers(ledger, "did")]


@pytest.mark.parametrize("each", [30, pytest.param(3000, marks=pytest.mark.long)])
def test_what_was_put_is_what_became_of_it(shared_url: str, tmp_path: Path, each: int) -> None:
    """Delivered + evicted + dropped = put, whoever was killed; and nothing is acknowledged twice."""
    over = tmp_path / "over"
    calls: dict[str, Callable[[int], tuple[Any, ...]]] = {
        # The first one is killed before its end.
        "producer": lambda n: (produce_beyond_capacity, shared_url, n * 10_000, each if n > 1 else 9_999),
        "dropper": lambda _: (drop_old_groups, shared_url, over),
        "consumer": lambda number: (lease, shared_url, over, number % 4 + 1),
    }
    crowd = Crowd(tmp_path, 1, lambda role, number: calls[role.partition("-")[0]](number))
    crowd.start("producer-1", "producer-2", "producer-3")
    crowd.shoot("producer-1", 20)
    crowd.start("dropper", "consumer-1")
    crowd.wait_for_lines("consumer-1", 3)
    crowd.start("consumer-2")
    crowd.shoot("consumer-1")
    crowd.end("producer")
    over.touch()
    crowd.end()

    assert crowd.killed == 2
    acknowledged, put = done(crowd, "consumer"), done(crowd, "producer")
    assert len(set(acknowledged)) == len(acknowledged)
    totals = asyncio.run(totals_of(shared_url))
    of_task = {name: totals[TASK, name] for name in Tally}
    assert len(put) <= of_task[Tally.PUT] <= len(put) + 1  # one may be committed by whom was killed before it said so
    ends = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)
    assert of_task[Tally.PUT] == sum(of_task[name] for name in ends)
    assert of_task[Tally.SIZE] == of_task[Tally.LEASED] == of_task[Tally.DELETED] == of_task[Tally.REPLACED] == 0
    assert len(acknowledged) <= of_task[Tally.TAKEN] <= len(acknowledged) + 1
    assert of_task[Tally.RETURNED] > 0
    assert set(acknowledged) <= {*put, *(number + 1 for number in put)}
