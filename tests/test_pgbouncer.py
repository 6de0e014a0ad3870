"""Behind PgBouncer, in transaction mode, with the settings that docs/operating.md names."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBuffer
from replaybuf.cli.doctor.probe import probe
from replaybuf.errors import UnreachableError
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.bad_input.conftest import refused_put
from tests.pgbouncer import IS_INSTALLED, documented_settings, free_port, pooled
from tests.postgres import execute, own_server
from tests.stores import TASK, build, fill, group, take_all

pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_INSTALLED, reason="PgBouncer isn't installed")]


class Pooler:
    """A PgBouncer before a server of its own, to be started with one setting or another; `url` goes through it."""

    def __init__(self, server_url: str, folder: Path) -> None:
        self._folder, server = folder, make_url(server_url)
        execute(server_url, "CREATE DATABASE rl")
        os.chmod(Path(str(server.query["host"])), 0o755)
        self._target = f"host={server.query['host']} user={server.username} dbname=rl"
        self._port = free_port()
        self.direct = server.set(database="rl").render_as_string(hide_password=False)
        self.url = f"postgresql://trainer@127.0.0.1:{self._port}/rl?statement_cache_size=0"

    @contextmanager
    def running(
        self,
        mode: str = "transaction",
        settings: str | None = None,
        more: str = "",
        target: Callable[[str], str] = lambda url: url,
    ) -> Iterator[None]:
        """Run it with a pool of fewer connections than a buffer wants, before another `target` than this server's."""
        text = documented_settings() if settings is None else settings
        with pooled(self._folder, target(self._target), mode, f"{text}\n{more}", self._port):
            yield

    def asking_for_passwords(self, kind: str) -> str:
        """The settings with which it knows the role `trainer`, with the password "right"."""
        users = self._folder / "users.txt"
        users.write_text('"trainer" "right"\n')
        users.chmod(0o644)
        return f"auth_type = {kind}\nauth_file = {users}"

    def url_with(self, password: str) -> str:
        return self.url.replace("trainer@", f"trainer:{password}@")


@pytest.fixture
def pooler(tmp_path: Path) -> Iterator[Pooler]:
    with own_server() as server:
        yield Pooler(server.url, tmp_path)


@pytest.fixture
def pooled_url(pooler: Pooler) -> Iterator[str]:
    with pooler.running():
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


async def test_what_a_pooler_refuses_is_said_in_its_own_words(pooler: Pooler) -> None:
    """It has one code for all, its own refusals and those of the server behind it; calls wait as for a server."""
    with pooler.running(more=pooler.asking_for_passwords("scram-sha-256")):
        async with build(pooler.url_with("right")) as buffer:
            await fill(buffer, 1)
        error = str(await refused_put(pooler.url_with("wrong"), UnreachableError))
        assert "authentication failed; PgBouncer says this, and docs/operating.md what it means" in error
    with pooler.running(more="default_pool_size = 1\nquery_wait_timeout = 1"):
        connection = await asyncpg.connect(pooler.url.partition("?")[0], statement_cache_size=0)
        await connection.execute("BEGIN")
        error = str(await refused_put(pooler.url, UnreachableError))
        assert "query_wait_timeout; PgBouncer says this" in error
        await connection.close()


async def test_a_pooler_that_keeps_track_of_prepared_statements_needs_no_option(pooler: Pooler) -> None:
    """1.21 and newer."""
    if version() < (1, 21):
        pytest.skip("this PgBouncer keeps no track of prepared statements")
    url = pooler.url.partition("?")[0]
    with pooler.running(more="max_prepared_statements = 500"):
        async with build(url) as first, build(url) as second:
            await asyncio.gather(use(first), use(second), use(first), use(second))
            assert await first.count("other", "completed") == 0
