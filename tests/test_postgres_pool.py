"""Connections to PostgreSQL that stay open between transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from replaybuf.storage.sql.engine import postgres_pool
from replaybuf.storage.sql.engine.commit_stamp import Stamp, next_stamp
from replaybuf.storage.sql.engine.errors import is_lost
from replaybuf.storage.sql.engine.postgres_pool import MOST_CONNECTIONS, Pool, UnreachableError
from replaybuf.storage.sql.engine.urls import parse_url
from tests.reasons import because
from tests.stores import until


@pytest.fixture
async def pool(postgres_database: str) -> AsyncIterator[Pool]:
    pool = Pool(parse_url(postgres_database), lock_timeout=5, read_only=False)
    yield pool
    await pool.close()


async def process_of(pool: Pool) -> Any:
    """The server process of the connection that is lent next."""
    async with pool.lend() as connection:
        return connection.get_server_pid()


async def test_the_last_one_is_lent_again(pool: Pool) -> None:
    async with pool.lend():
        last = await process_of(pool)
        assert await process_of(pool) == last
    assert await process_of(pool) != last
    assert (pool.size, pool.lent) == (2, 0)


async def test_who_waits_for_a_new_one_has_one_that_is_given_back_meanwhile(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ask at once, one is made at a time."""
    making = may_make = 0
    connect, may_go_on = pool.servers.connect, asyncio.Event()

    async def slowly() -> Any:
        nonlocal making, may_make
        making, may_make = making + 1, max(may_make, making + 1)
        await may_go_on.wait()
        made = await connect()
        making -= 1
        return made

    async with pool.lend() as connection:
        first = connection.get_server_pid()
        monkeypatch.setattr(pool.servers, "connect", slowly)
        others = [asyncio.create_task(process_of(pool)) for _ in range(10)]
        await asyncio.sleep(0)
    served = await asyncio.gather(*others[1:])
    assert served == [first] * 9
    may_go_on.set()
    assert await others[0] != first
    assert may_make == 1


async def test_one_that_was_idle_for_long_is_closed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_pool, "KEPT_SECONDS", 0.05)
    async with pool.lend():
        await process_of(pool)

    async def closed() -> bool:
        await process_of(pool)
        return pool.size == 1

    await until(closed)


async def test_who_waits_has_the_next_one(postgres_database: str) -> None:
    pool = Pool(parse_url(postgres_database), lock_timeout=20, read_only=False)
    try:
        many = asyncio.gather(*(process_of(pool) for _ in range(2 * MOST_CONNECTIONS)))
        assert len(set(await asyncio.wait_for(many, 15))) <= MOST_CONNECTIONS
    finally:
        await pool.close()


async def test_who_waits_in_vain_is_told_why(postgres_database: str) -> None:
    pool = Pool(parse_url(postgres_database), lock_timeout=5, read_only=False)
    async with AsyncExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            await stack.enter_async_context(pool.lend())
        pool._lock_timeout = 0.05
        with pytest.raises(
            UnreachableError,
            match=f"all {MOST_CONNECTIONS} connections of this buffer were in use",
            check=because("pool busy"),
        ):
            await process_of(pool)
    await pool.close()


@pytest.mark.parametrize("ends", ["by an error", "cancelled"])
async def test_one_in_an_unknown_state_is_closed(pool: Pool, ends: str) -> None:
    async def use() -> None:
        async with pool.lend() as connection:
            await connection.execute("BEGIN")
            if ends == "by an error":
                raise ZeroDivisionError
            await connection.execute("SELECT pg_sleep(60)")

    using = asyncio.create_task(use())
    done, _ = await asyncio.wait([using], timeout=0.2)
    using.cancel()
    await asyncio.wait([using])
    assert bool(done) == (ends == "by an error")
    assert (pool.size, pool.lent) == (0, 0)


async def test_one_that_the_server_ended_is_not_lent(pool: Pool) -> None:
    async with pool.lend() as connection:
        async with pool.lend() as other:
            ended, heard = other.get_server_pid(), asyncio.Event()
            other.add_termination_listener(lambda _: heard.set())
        await connection.execute("SELECT pg_terminate_backend($1, 5000)", ended)
        await asyncio.wait_for(heard.wait(), 20)
        assert await process_of(pool) != ended


async def test_transactions_of_a_connection_have_numbers_that_rise(pool: Pool) -> None:
    async with pool.lend() as connection, pool.lend() as other:
        first, second = connection.next_stamp(), connection.next_stamp()
        assert first.row == second.row != other.next_stamp().row
        assert first.number < second.number
    assert next_stamp(Stamp("connection 1", 1 << 60)).number == (1 << 60) + 1  # a clock that was set back


async def test_a_pool_closes_though_one_is_in_use(postgres_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_pool, "_CLOSING_SECONDS", 0.1)
    pool = Pool(parse_url(postgres_database), lock_timeout=5, read_only=False)
    connection = await pool.take()
    await asyncio.wait_for(pool.close(), 5)
    assert connection.is_closed()


def test_one_whose_end_is_still_to_come_counts_as_lost() -> None:
    """asyncpg has heard why the server ends it, and refuses to send more, but doesn't know that it is closed."""
    error = asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    assert is_lost(error, connected=True)
