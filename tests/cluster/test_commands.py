"""Commands take the URL of a cluster, wherever its primary is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replaybuf.storage.sql.schema.revisions import HEAD
from tests.cli.conftest import run
from tests.cluster.servers import Cluster
from tests.stores import build, fill

_ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_commands_read_and_write_with_several_hosts(asynchronous: Cluster) -> None:
    """The first one of these is a standby; a command that writes finds the primary."""
    url = asynchronous.new_database()
    name = url.rpartition("/")[2]
    standby, primary = asynchronous.standby.address, asynchronous.primary.address
    url = f"postgresql://postgres:hidden@{standby},{primary}/{name}"

    async def prepare() -> None:
        async with build(url) as buffer:
            await fill(buffer, 3)
            await buffer.checkpoint(1)

    asyncio.run(prepare())
    to_read = f"{url}?target_session_attrs=primary"
    for command in (
        ("ls", to_read),
        ("stats", to_read),
        ("show", to_read, "1"),
        ("sql", to_read, "SELECT count(*) FROM groups"),
        ("doctor", to_read),
        ("why", to_read),
        ("checkpoint", "ls", to_read),
        ("doctor", url, "--upgrade"),
        ("checkpoint", "restore", url, "1", "--yes"),
        ("rm", url, "--where", '{"task_name": "math"}', "--yes"),
    ):
        done = run(*command, code=None)
        assert "hidden" not in done.output
        assert done.exit_code == 0 or command[0] == "doctor", (command, done.output)
    assert "True" in run("sql", f"{url}?target_session_attrs=standby", "SELECT pg_is_in_recovery()").stdout


@pytest.mark.long
def test_alembic_finds_the_primary(asynchronous: Cluster) -> None:
    url = asynchronous.new_database()
    name = url.rpartition("/")[2]
    url = f"postgresql://postgres@{asynchronous.standby.address},{asynchronous.primary.address}/{name}"
    command = [sys.executable, "-m", "alembic", "upgrade", "head"]
    env = {**os.environ, "REPLAYBUF_URL": url, "PYTHONPATH": str(_ROOT)}
    subprocess.run(command, cwd=_ROOT, env=env, check=True, timeout=120)
    assert asynchronous.primary.ask_in(url, "SELECT version_num FROM rb_version") == [HEAD]
