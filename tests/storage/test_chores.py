"""How often processes look for what there is to do in the background."""

from __future__ import annotations

import asyncpg
import pytest

from replaybuf.storage.sql.statements.upkeep import find_chores
from replaybuf.storage.sql.tasks.sweeper import _pause
from tests.stores import build, fill


@pytest.mark.parametrize("processes", [1, 4, 8])
def test_few_processes_look_twice_a_second_each(processes: int) -> None:
    assert _pause(2 * processes) == 0.5


@pytest.mark.parametrize("processes", [16, 64])
def test_many_processes_look_no_more_often_together(processes: int) -> None:
    pauses = [_pause(3 * processes) for _ in range(processes)]
    assert 12 < sum(1 / pause for pause in pauses) < 30
    assert len(set(pauses)) > 1


def test_each_process_looks_every_four_seconds_at_least() -> None:
    assert max(_pause(connections) for connections in (500, 5_000)) == 4


async def test_a_server_tells_how_many_connections_there_are(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        await fill(buffer, 1)

        async def connections() -> int:
            return (await buffer.storage._read(lambda tx: find_chores(tx, 2.0, 0.0))).connections

        before = await connections()
        assert before >= 1
        if buffer.storage.engine.dialect.is_remote:
            others = [await asyncpg.connect(shared_url) for _ in range(3)]
            assert await connections() >= before + 2
            for other in others:
                await other.close()
