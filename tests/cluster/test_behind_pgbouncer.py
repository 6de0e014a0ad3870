"""Failover behind PgBouncer, whose clients keep their connections while the server behind them is another."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import FencedError
from tests.cluster.conftest import Cluster, Node
from tests.cluster.test_failover import fail_over
from tests.cluster.test_lost_commits import replicated
from tests.faults.conftest import Figures
from tests.pgbouncer import IS_INSTALLED, pooled
from tests.stores import TASK, because, build, fill, group, numbers_of, take_all, until

pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_INSTALLED, reason="PgBouncer isn't installed")]


def target(node: Node, url: str) -> str:
    return f"host=127.0.0.1 port={node.port} user=postgres dbname={url.rpartition('/')[2]}"


@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_a_failover_behind_it_loses_and_doubles_nothing(
    synchronous: Cluster, tmp_path: Path, mode: str, figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says in sentences what happened."""
    caplog.set_level(logging.INFO, "replaybuf")
    put_numbers: list[int] = []
    received: list[int] = []
    over, url = asyncio.Event(), synchronous.new_database()

    async def producer(buffer: ReplayBuffer, first: int) -> None:
        number = first
        while not over.is_set():
            await buffer.put(group(number), TASK)
            put_numbers.append(number)
            number += 1

    async def taker(buffer: ReplayBuffer) -> None:
        while not over.is_set():
            received.extend(numbers_of(await buffer.get(2, TASK)))

    with pooled(tmp_path, target(synchronous.primary, url), mode) as pooler:
        async with build(pooler.url) as first, build(pooler.url) as second:
            tasks = [asyncio.create_task(producer(first, place * 1_000_000)) for place in range(3)]
            tasks.append(asyncio.create_task(taker(second)))

            async def go_on(puts: int = 0, takes: int = 0) -> bool:
                for task in tasks:
                    if task.done():
                        await task  # it has ended too early: its error says why
                return len(put_numbers) > puts + 20 and len(received) > takes + 20

            await until(go_on, 30)
            await fail_over(synchronous)
            pooler.point_to(target(synchronous.primary, url))
            before = len(put_numbers), len(received)
            await until(lambda: go_on(*before), 60)
            over.set()
            await asyncio.gather(*tasks)
            received += await take_all(first)
    figures.compare(1, put_numbers, received)
    assert sorted(received) == sorted(put_numbers)
    lines = [record.getMessage() for record in caplog.records if record.name == "replaybuf.database"]
    assert any("it is another server from now on (timeline " in line for line in lines)
    assert not any("division" in line or "invalid input" in line or "follows the server" in line for line in lines)


async def test_an_idle_connection_that_leads_to_a_server_without_some_commits_is_noticed(
    asynchronous: Cluster, tmp_path: Path
) -> None:
    """PgBouncer's client was not disconnected, and never connects anew by itself."""
    url = asynchronous.new_database()
    with pooled(tmp_path, target(asynchronous.primary, url)) as pooler:
        async with build(pooler.url) as buffer:
            await fill(buffer, 2)
            await replicated(asynchronous)
            asynchronous.hold_back()
            await buffer.put(group(2), TASK)
            pooler.point_to(target(asynchronous.standby, url))
            await fail_over(asynchronous)
            with pytest.raises(FencedError, check=because("commits lost")):
                await buffer.put(group(3), TASK)
        async with build(pooler.url) as buffer:
            assert await take_all(buffer) == [0, 1]
