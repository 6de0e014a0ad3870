"""A database or role with settings of its own: transactions say what they need, and don't rely on defaults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from replaybuf import FencedError, ReplayBuffer
from replaybuf.buffer.put_options import FillOptions
from replaybuf.errors import AccessError, LockedError, StorageError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.postgres import PostgresDatabase
from replaybuf.storage.sql.engine.urls import parse_url
from tests.cancellation.conftest import end_background_work
from tests.postgres import set_default
from tests.stores import TASK, build, fill, group, take_all, until_equal

LEVELS = [pytest.param("repeatable read", marks=pytest.mark.long), "serializable"]


@pytest.fixture(params=LEVELS)
def other_default(request: pytest.FixtureRequest, lent_database: str) -> str:
    """`postgresql://...` of a database whose transactions are of another isolation unless they say so."""
    set_default(lent_database, default_transaction_isolation=request.param)
    return lent_database


@asynccontextmanager
async def writers_kept_out(url: str) -> AsyncIterator[Callable[[int], Any]]:
    """Writers wait until the block is left; yields the function that waits until this many do."""
    connection = await asyncpg.connect(url)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = $1"
    database = await connection.fetchval("SELECT oid FROM pg_database WHERE datname = current_database()")

    async def wait_for(count: int) -> None:
        await until_equal(count, lambda: connection.fetchval(waiting, database))

    try:
        await connection.execute("BEGIN")
        await connection.execute(f"SELECT pg_advisory_xact_lock({Lock.WRITERS})")
        yield wait_for
    finally:
        await connection.close()


@pytest.mark.parametrize("write", ["put", "take", "refresh"])
async def test_who_waited_for_a_restore_is_fenced_off(other_default: str, write: str) -> None:
    """Its first statement began before the restore was committed, and the next ones see what was restored."""
    calls: dict[str, Callable[[ReplayBuffer], Any]] = {
        "put": lambda buffer: buffer.put(group(9), TASK),
        "take": lambda buffer: buffer.get(1, TASK),
        "refresh": lambda buffer: buffer.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=5),
    }
    async with build(other_default) as restored, build(other_default) as late_buffer:
        await fill(restored, 2)
        await restored.checkpoint(1)
        assert len(late_buffer) == 2
        for buffer in (restored, late_buffer):
            await end_background_work(buffer)
        async with writers_kept_out(other_default) as wait_for:
            restoring = asyncio.create_task(restored.restore(1))
            await wait_for(1)
            writing = asyncio.create_task(calls[write](late_buffer))
            await wait_for(2)
        await restoring
        with pytest.raises(FencedError):
            await writing
        assert await take_all(restored) == [0, 1]


@pytest.mark.parametrize("level", LEVELS)
async def test_processes_open_a_new_database_together(postgres_database: str, level: str) -> None:
    set_default(postgres_database, default_transaction_isolation=level)
    buffers = [build(postgres_database) for _ in range(4)]
    try:
        await asyncio.gather(*(buffer.put(group(number), TASK) for number, buffer in enumerate(buffers)))
        assert sorted(await take_all(buffers[0])) == [0, 1, 2, 3]
    finally:
        await asyncio.gather(*(buffer.close() for buffer in buffers))


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the settings that connections ask for, as a pooler may."""
    connect = asyncpg.connect

    def dropping(*args: Any, server_settings: Any = None, **options: Any) -> Any:
        return connect(*args, **options)

    monkeypatch.setattr(asyncpg, "connect", dropping)


async def test_a_reader_can_not_write_though_its_settings_are_dropped(
    lent_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
    without_settings(monkeypatch)
    engine = PostgresDatabase(Access(parse_url(lent_database), lock_timeout=5, read_only=True))
    try:
        for change in (engine.read, engine.write):
            with pytest.raises(AccessError, match="read-only transaction"):
                await change(lambda tx: tx.run("DELETE FROM rb_group"))
    finally:
        await engine.dispose()


async def test_levels_are_said_though_settings_are_dropped(lent_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transaction that writes, and one that reads."""
    set_default(lent_database, default_transaction_isolation="serializable", default_transaction_deferrable="on")
    without_settings(monkeypatch)
    engine = PostgresDatabase(Access(parse_url(lent_database), lock_timeout=5))

    def level(tx: Any) -> str:
        return str(tx.run("SHOW transaction_isolation")[0][0])

    try:
        for _ in range(2):  # also of a connection that was used before
            assert await engine.read(level) == "repeatable read"
            assert await engine.write(level) == "read committed"
    finally:
        await engine.dispose()


async def test_a_database_that_only_reads_says_so(lent_database: str) -> None:
    """Its owner meant it: that default is kept."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
    set_default(lent_database, default_transaction_read_only="on")
    async with build(lent_database) as buffer:
        with pytest.raises(AccessError, match="default_transaction_read_only"):
            await buffer.put(group(1), TASK)
        assert len(buffer) == 1


async def test_a_statement_timeout_is_called_one(lent_database: str) -> None:
    """Also where the statement waits for a lock: `lock_timeout` was not over."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
    set_default(lent_database, statement_timeout="200ms")
    async with build(lent_database) as buffer, writers_kept_out(lent_database):
        with pytest.raises(StorageError, match="due to statement timeout") as caught:
            await buffer.put(group(1), TASK)
    assert not isinstance(caught.value, LockedError)


async def test_a_null_among_texts_stays_one(lent_database: str) -> None:
    """Also where array_nulls is off: the groups of one commit differ in the columns that they have."""
    set_default(lent_database, array_nulls="off")
    async with build(lent_database) as buffer:
        each: list[FillOptions] = [{"key": "a"}, {}, {"key": "b"}]
        await buffer.put_many([group(number) for number in range(3)], TASK, each=each)
        assert [item.key async for item in buffer.find({})] == ["a", None, "b"]
