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
from tests.faults.roles import train
from tests.faults.test_storm import totals_of
from tests.histories.history import calls_in, numbers_of_calls
from tests.histories.workers import LEASED
from tests.stores import build, group

BOUNDED = {"capacity": 40, "max_deliveries": 0}


async def produce_beyond_capacity(log: Ledger, url: str, first: int, count: int) -> None:
    """Put groups of older and older models into a buffer that holds 40."""
    async with build(url, **BOUNDED) as buffer:
        for number in range(first, first + count):
            await buffer.put(group(number), LEASED, model_step=number % 7, current_train_step=8)
            log.write("put", number)


async def drop_old_groups(_: Ledger, url: str, until: str) -> None:
    """Refresh again and again, to steps at which some groups are too old, and drop those."""
    async with build(url, **BOUNDED) as buffer:
        while not os.path.exists(until):  # noqa: ASYNC240
            await buffer.refresh_staleness(
                task_stale_thresholds={LEASED: 7},
                current_train_step=8,
                expired_groups_retryable_by_task={LEASED: False},
            )
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("each", [30, pytest.param(3000, marks=pytest.mark.long)])
def test_what_was_put_is_what_became_of_it(shared_url: str, tmp_path: Path, each: int) -> None:
    """Delivered + evicted + dropped = put, whoever was killed; and nothing is acknowledged twice."""
    over = str(tmp_path / "over")
    roles_of: dict[str, Callable[[int], tuple[Any, ...]]] = {
        # The first one is killed before its end.
        "producer": lambda n: (produce_beyond_capacity, shared_url, n * 10_000, each if n > 1 else 9_999),
        "dropper": lambda _: (drop_old_groups, shared_url, over),
        "trainer": lambda number: (train, shared_url, over, number),
    }
    crowd = Crowd(tmp_path, 1, lambda role, number: roles_of[role.partition("-")[0]](number))
    crowd.start("producer-1", "producer-2", "producer-3")
    crowd.shoot("producer-1", 20)
    crowd.start("dropper", "trainer-1")
    crowd.wait_for_lines("trainer-1", 10)
    crowd.start("trainer-2")
    crowd.shoot("trainer-1")
    crowd.end("producer")
    Path(over).touch()
    crowd.end()

    assert crowd.killed == 2
    put = [number for ledger in crowd.ledgers for number in numbers(ledger, "put")]
    calls = calls_in(crowd.ledgers)
    acknowledged, attempted = (numbers_of_calls(calls, "acknowledge", known=known) for known in (True, False))
    assert len(set(acknowledged)) == len(acknowledged)
    totals = asyncio.run(totals_of(shared_url))
    of_task = {name: totals[LEASED, name] for name in Tally}
    assert len(put) <= of_task[Tally.PUT] <= len(put) + 1  # one may be committed by whom was killed before it said so
    ends = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.SIZE, Tally.LEASED)
    assert of_task[Tally.PUT] == sum(of_task[name] for name in ends)
    assert of_task[Tally.SIZE] == of_task[Tally.LEASED] == of_task[Tally.DELETED] == of_task[Tally.REPLACED] == 0
    assert len(acknowledged) <= of_task[Tally.TAKEN] <= len(set(attempted))
    assert set(acknowledged) <= {*put, *(number + 1 for number in put)}
