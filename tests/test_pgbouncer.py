"""Behind PgBouncer, in transaction mode, with the settings that docs/pgbouncer.md names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.pgbouncer import IS_INSTALLED, pooled
from tests.postgres import execute, own_server
from tests.stores import TASK, build, fill, group, take_all

pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_INSTALLED, reason="PgBouncer isn't installed")]


@pytest.fixture
def pooled_url(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database behind a pool of fewer connections than a buffer wants."""
    with own_server() as server:
        url = make_url(server.url)
        execute(server.url, "CREATE DATABASE rl")
        os.chmod(Path(str(url.query["host"])), 0o755)
        with pooled(tmp_path, f"host={url.query['host']} user={url.username} dbname=rl") as pooler:
            yield pooler.url


async def test_two_buffers_share_few_connections(pooled_url: str) -> None:
    """Each group has one taker, a restore brings back what was there, and who waits is woken."""
    async with build(pooled_url) as left, build(pooled_url) as right:
        await asyncio.gather(fill(left, 100), fill(right, 100, first=100))
        taken = await asyncio.gather(take_all(left), take_all(right))
        assert sorted(taken[0] + taken[1]) == list(range(200))
        await fill(left, 20)
        await left.checkpoint(3)
        await left.get(10, TASK)
        await left.restore(3)
        async with build(pooled_url) as again, build(pooled_url) as other:
            assert await again.count(TASK, "completed") == 20
            waiting = asyncio.create_task(other.get(1, "later", timeout=30))
            await again.put(group(7), "later")
            assert len(await waiting) == 1
