"""Behind PgBouncer, in transaction mode, with the settings that docs/pgbouncer.md names."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf.doctor.check_engine import check_engine
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.pages import DOCS
from tests.postgres import execute, own_server
from tests.stores import TASK, build, fill, group, take_all

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="PgBouncer isn't installed"),
]
_USER = "nobody"  # PgBouncer refuses to run as root


@pytest.fixture
def pooled_url(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database behind a pool of fewer connections than a buffer wants."""
    with own_server() as server, socket.socket() as free:
        url = make_url(server.url)
        execute(server.url, "CREATE DATABASE rl")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        (ignored,) = re.findall(r"ignore_startup_parameters = .*", (DOCS / "pgbouncer.md").read_text())
        config = tmp_path / "pgbouncer.ini"
        config.write_text(
            f"[databases]\nrl = host={url.query['host']} user={url.username} dbname=rl\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = 6\n{ignored.strip()}\n"
        )
        for folder in (tmp_path, *tmp_path.parents[:2], Path(str(url.query["host"]))):
            os.chmod(folder, 0o755)
        process = subprocess.Popen(["pgbouncer", config], user=_USER if os.getuid() == 0 else None)
        try:
            _wait_for(port)
            yield f"postgresql://trainer@127.0.0.1:{port}/rl?statement_cache_size=0"
        finally:
            process.terminate()
            process.wait(10)


def _wait_for(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("PgBouncer doesn't listen after 10 s")


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


def test_the_doctor_says_what_a_pool_lacks(pooled_url: str) -> None:
    """Settings get lost and notifications don't arrive; all that a run can't do without is there."""
    findings = check_engine(open_reader(pooled_url))
    missing = [one.text.partition(":")[0] for one in findings if one.level != "ok"]
    assert missing == ["LISTEN", "settings of connections"]
    assert {str(one.level) for one in findings} == {"ok", "warning"}
