"""Behind PgBouncer, in transaction mode, with the settings that docs/operating.md names."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBuffer
from replaybuf.cli.doctor.probe import probe
from replaybuf.errors import UnreachableError
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.bad_input.conftest import refused_put
from tests.pgbouncer import IS_INSTALLED, pooled
from tests.postgres import execute, own_server
from tests.stores import TASK, build, fill, group, take_all

pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_INSTALLED, reason="PgBouncer isn't installed")]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """The database `rl` of a server of its own, as PgBouncer's settings name it."""
    with own_server() as own:
        execute(own.url, "CREATE DATABASE rl")
        server = make_url(own.url)
        os.chmod(Path(str(server.query["host"])), 0o755)
        yield f"host={server.query['host']} user={server.username} dbname=rl"


@pytest.fixture
def pooled_url(target: str, tmp_path: Path) -> Iterator[str]:
    with pooled(tmp_path, target) as pooler:
        yield pooler.url


async def test_two_buffers_share_few_connections(pooled_url: str) -> None:
    """Each group has one taker, a restore brings back what was there, and who waits is woken."""
    async with build(pooled_url) as first, build(pooled_url) as second:
        await asyncio.gather(fill(first, 100), fill(second, 100, first=100))
        numbers = await asyncio.gather(take_all(first), take_all(second))
        assert sorted(numbers[0] + numbers[1]) == list(range(200))
        await fill(first, 20)
        await first.checkpoint(3)
        await first.get(10, TASK)
        await first.restore(3)
        async with build(pooled_url) as third, build(pooled_url) as fourth:
            assert await third.count(TASK, "completed") == 20
            waiting = asyncio.create_task(fourth.get(1, "later", timeout=30))
            await third.put(group(7), "later")
            assert len(await waiting) == 1


def test_the_doctor_makes_all_calls_through_a_pool(pooled_url: str) -> None:
    assert [str(finding.level) for finding in probe(open_reader(pooled_url))] == ["ok"]


def version() -> tuple[int, int]:
    output = subprocess.check_output(["pgbouncer", "--version"], text=True)
    major, minor = re.findall(r"(\d+)\.(\d+)", output)[0]
    return int(major), int(minor)


async def use(buffer: ReplayBuffer) -> None:
    for number in range(100):
        await buffer.put(group(number), "other")
        await buffer.get(1, "other")


async def test_what_a_pooler_refuses_is_said_in_its_own_words(target: str, tmp_path: Path) -> None:
    """It has one code for all, its own refusals and those of the server behind it; calls wait as for a server."""
    users = tmp_path / "users.txt"
    users.write_text('"trainer" "right"\n')
    users.chmod(0o644)
    with pooled(tmp_path, target, more=f"auth_type = scram-sha-256\nauth_file = {users}") as pooler:
        async with build(pooler.url.replace("trainer@", "trainer:right@")) as buffer:
            await fill(buffer, 1)
        error = str(await refused_put(pooler.url.replace("trainer@", "trainer:wrong@"), UnreachableError))
        assert "authentication failed; PgBouncer says this, and docs/operating.md what it means" in error
    with pooled(tmp_path, target, more="default_pool_size = 1\nquery_wait_timeout = 1") as pooler:
        connection = await asyncpg.connect(pooler.url.partition("?")[0], statement_cache_size=0)
        await connection.execute("BEGIN")
        error = str(await refused_put(pooler.url, UnreachableError))
        assert "query_wait_timeout; PgBouncer says this" in error
        await connection.close()


async def test_a_pooler_that_keeps_track_of_prepared_statements_needs_no_option(target: str, tmp_path: Path) -> None:
    """1.21 and newer."""
    if version() < (1, 21):
        pytest.skip("this PgBouncer keeps no track of prepared statements")
    with pooled(tmp_path, target, more="max_prepared_statements = 500") as pooler:
        url = pooler.url.partition("?")[0]
        async with build(url) as first, build(url) as second:
            await asyncio.gather(use(first), use(second), use(first), use(second))
            assert await first.count("other", "completed") == 0
