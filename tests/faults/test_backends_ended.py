"""Backends of PostgreSQL that are ended while large groups are sent: every put ends, and each group is there once."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import asyncpg
import numpy as np
import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig
from tests.faults.figures import Figures
from tests.stores import TASK

#: Long enough for a connection that falls silent, several times.
PATIENCE = 120.0

END_TWO = """
    SELECT count(*) FROM (
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE pid <> pg_backend_pid() AND datname = current_database() ORDER BY random() LIMIT 2
    ) AS ended
"""


@pytest.mark.parametrize("seconds", [3, pytest.param(12, marks=pytest.mark.long)])
async def test_puts_of_large_groups_end_when_backends_are_ended(
    postgres_database: str, seconds: int, figures: Figures
) -> None:
    """A statement that waits until it may send more has to hear that its connection is gone."""
    config = ReplayBufferConfig(url=postgres_database, policy="fifo", rollout_type=dict)
    numbers, put, over = count(), list[int](), asyncio.Event()

    async def producer() -> None:
        while not over.is_set():
            number = next(numbers)
            size = 50_000 if number % 5 == 0 else 30
            await buffer.put([{"number": number, "values": np.zeros(size)}], TASK)
            put.append(number)

    async with config.build() as buffer, asyncio.timeout(seconds + PATIENCE):
        assert await buffer.count_where({}) == 0
        async with asyncio.TaskGroup() as tasks:
            for _ in range(48):
                tasks.create_task(producer())
            ended = await end_backends(postgres_database, seconds)
            over.set()
        found = [group[0]["number"] for group in await everything(buffer)]
    figures.compare(ended, put, found)
    assert sorted(found) == sorted(put)


async def everything(buffer: ReplayBuffer[Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    while groups := await buffer.get(100, TASK):
        found += groups
    return found


async def end_backends(url: str, seconds: int) -> int:
    """End two backends every quarter of a second, for some seconds. Return the number ended."""
    ended = 0
    connection = await asyncpg.connect(url)
    try:
        for _ in range(seconds * 4):
            await asyncio.sleep(0.25)
            ended += await connection.fetchval(END_TWO)
    finally:
        await connection.close()
    return ended
