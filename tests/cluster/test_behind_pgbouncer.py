"""Failover behind PgBouncer, whose clients keep their connections while the server behind them is another."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Node
from tests.cluster.test_failover import fail_over
from tests.cluster.test_lost_commits import commits_lost, replicated
from tests.faults.calling import calling, goes_on
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger
from tests.histories.history import Recorder, calls_in
from tests.histories.workers import take_all_left
from tests.pgbouncer import IS_INSTALLED, pooled
from tests.stores import TASK, build, fill, group, take_all

pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_INSTALLED, reason="PgBouncer isn't installed")]


def target(node: Node, url: str) -> str:
    return f"host=127.0.0.1 port={node.port} user=postgres dbname={url.rpartition('/')[2]}"


@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_a_failover_behind_it_loses_and_doubles_nothing(
    synchronous: Cluster, tmp_path: Path, mode: str, figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says in sentences what happened."""
    caplog.set_level(logging.INFO, "replaybuf")
    recorder, url = Recorder(Ledger(tmp_path / "calls")), synchronous.new_database()
    with pooled(tmp_path, target(synchronous.primary, url), mode) as pooler:
        async with build(pooler.url, max_deliveries=0) as first, build(pooler.url, max_deliveries=0) as second:
            async with calling(recorder, [first, second] * 2):
                await goes_on(recorder, "put", "take", more=20)
                await fail_over(synchronous)
                pooler.point_to(target(synchronous.primary, url))
                await goes_on(recorder, "put", "take", more=20, seconds=60)
            await take_all_left(first, recorder)
    figures.judge(1, calls_in([tmp_path / "calls"]))
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
            with commits_lost():
                await buffer.put(group(3), TASK)
        async with build(pooler.url) as buffer:
            assert await take_all(buffer) == [0, 1]
