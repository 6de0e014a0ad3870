"""The PostgreSQL fixtures themselves."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from tests.postgres import new_database


async def tables(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"))
    finally:
        await connection.close()


@pytest.mark.parametrize("turn", [1, 2])
async def test_every_test_gets_an_empty_database(postgres_database: str, turn: int) -> None:
    assert await tables(postgres_database) == 0
    connection = await asyncpg.connect(postgres_database)
    await connection.execute("CREATE TABLE t (x int)")
    await connection.close()
    assert await tables(postgres_database) == 1


def test_a_database_is_dropped_even_while_a_connection_is_open(postgres_url: str) -> None:
    with asyncio.Runner() as runner:
        with new_database(postgres_url) as url:
            connection = runner.run(asyncpg.connect(url))
        with pytest.raises(asyncpg.InvalidCatalogNameError):
            runner.run(asyncpg.connect(url))
        connection.terminate()
