"""Connections to PostgreSQL that stay with an engine between its transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.ext.asyncio import AsyncEngine

from replaybuf.storage.sql.engine.kept_connections import KeptConnections
from replaybuf.storage.sql.engine.postgres_connections import MOST_CONNECTIONS, postgres_pool
from replaybuf.storage.sql.engine.urls import parse_url


@pytest.fixture
async def pool(postgres_database: str) -> AsyncIterator[AsyncEngine]:
    pool = postgres_pool(parse_url(postgres_database), lock_timeout=5, read_only=False)
    yield pool
    await pool.dispose()


@asynccontextmanager
async def keeping(pool: AsyncEngine, most: int) -> AsyncIterator[KeptConnections]:
    kept = KeptConnections(pool, most)
    yield kept
    await kept.close()
    assert len(kept) == out_of(pool) == 0


def out_of(pool: AsyncEngine) -> int:
    checked_out: int = pool.pool.checkedout()  # type: ignore[attr-defined]
    return checked_out


async def process_of(kept: KeptConnections, level: IsolationLevel = "AUTOCOMMIT") -> Any:
    """The server process of the connection that is lent next."""
    async with kept.connection(level) as connection:
        return await connection.scalar(text("SELECT pg_backend_pid()"))


async def test_the_last_one_is_lent_again(pool: AsyncEngine) -> None:
    async with keeping(pool, 2) as kept:
        async with kept.connection("AUTOCOMMIT"):
            last = await process_of(kept)
            assert await process_of(kept) == last
        assert await process_of(kept) != last
        assert len(kept) == out_of(pool) == 2


async def test_no_more_are_kept_than_most(pool: AsyncEngine) -> None:
    async with keeping(pool, 2) as kept:
        async with AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(kept.connection("AUTOCOMMIT"))
        assert len(kept) == out_of(pool) == 2


async def test_each_use_has_its_isolation_level(pool: AsyncEngine) -> None:
    levels: list[IsolationLevel] = ["REPEATABLE READ", "READ COMMITTED", "REPEATABLE READ"]
    async with keeping(pool, 1) as kept:
        for level in levels:
            await process_of(kept)  # outside any transaction
            async with kept.connection(level) as connection, connection.begin():
                assert await connection.scalar(text("SHOW transaction_isolation")) == level.lower()


async def test_who_waits_for_the_pool_has_the_next_one(postgres_database: str) -> None:
    """When the pool gives out no more, it has to get back what others need no longer."""
    pool = postgres_pool(parse_url(postgres_database), lock_timeout=20, read_only=False)
    try:
        async with keeping(pool, MOST_CONNECTIONS) as kept:
            many = asyncio.gather(*(process_of(kept) for _ in range(2 * MOST_CONNECTIONS)))
            assert len(set(await asyncio.wait_for(many, 15))) <= MOST_CONNECTIONS
    finally:
        await pool.dispose()


async def test_after_an_exception_it_goes_back_to_the_pool(pool: AsyncEngine) -> None:
    async with keeping(pool, 1) as kept:
        with pytest.raises(ZeroDivisionError):
            async with kept.connection("AUTOCOMMIT"):
                raise ZeroDivisionError
        assert len(kept) == out_of(pool) == 0


async def test_one_that_the_server_ended_is_not_lent(pool: AsyncEngine) -> None:
    async with keeping(pool, 2) as kept, kept.connection("AUTOCOMMIT") as connection:
        ended = await process_of(kept)
        await connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": ended})
        assert await process_of(kept) != ended


async def test_one_that_is_in_use_at_the_end_is_not_kept(pool: AsyncEngine) -> None:
    async with keeping(pool, 2) as kept, kept.connection("AUTOCOMMIT"):
        await kept.close()
        assert await process_of(kept)
        assert len(kept) == 0
