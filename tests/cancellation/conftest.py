"""How calls are cancelled, and a buffer that has to leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.storage.sql.engine import open_database
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.postgres_pool import Pool
from replaybuf.storage.sql.engine.sqlite_connection import _MOST_LENT
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.tasks.delivery import Drawing
from replaybuf.storage.values import Draw
from tests.stores import TASK, build, until


@pytest.fixture
async def buffer(url: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[ReplayBuffer]:
    """A buffer that has to leave nothing behind: no thread, no connection, no complaint of asyncio's."""
    before = set(threading.enumerate())
    async with build(url) as buffer:
        yield buffer
        await no_connection_out(buffer)
    gc.collect()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.name in ("asyncio", "concurrent.futures")] == []
    thread_names = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in thread_names if name.startswith(("replaybuf", "Connection"))]


async def take(buffer: ReplayBuffer, size: int, seconds: float | None = None, **options: Any) -> Callable[[], Any]:
    """Take or lease groups that nobody receives; what undoes it, as when the call is cancelled."""
    storage = buffer.storage
    await storage.open()
    drawing = Drawing(storage.draws, Draw({TASK: size}, **options), seconds)
    batch = await storage.thread.run(drawing.run)
    return lambda: storage.thread.run(lambda: drawing.undo(batch))


async def end_background_work(buffer: ReplayBuffer) -> None:
    """End the sweeps, and what they have begun."""
    state = buffer.storage

    async def end() -> None:
        await state.sweeper.stop()
        if state.files._tidy_task is not None:
            await asyncio.wait([state.files._tidy_task])

    await state.thread.run(end)


def lent(pool: Pool) -> int:
    """The number of connections in use."""
    return pool.size - len(pool._idle_connections)


async def no_connection_out(buffer: ReplayBuffer) -> None:
    """Wait until all connections are back."""
    state = buffer.storage

    async def all_back() -> bool:
        if state.engine.dialect.is_remote:
            return lent(state.engine.pool) == 0
        return bool(state.engine.connections._free_slots._value == _MOST_LENT)

    await until(all_back)


async def ended(task: asyncio.Task[Any]) -> Any:
    """What a task that may have been cancelled came to: its result, or None."""
    try:
        return await task
    except (asyncio.CancelledError, TimeoutError):
        return None


async def by_cancel(call: Coroutine[Any, Any, Any], delay: float) -> Any:
    task = asyncio.create_task(call)
    await asyncio.sleep(delay)
    task.cancel()
    return await ended(task)


def hold_decoding(buffer: ReplayBuffer, release: threading.Event) -> None:
    """From now on groups are decoded only after `release` is set."""
    codec = buffer.storage.codec
    decode = codec.decode

    def decode_later(data: Any, **options: Any) -> Any:
        assert release.wait(20)
        return decode(data, **options)

    codec.decode = decode_later  # type: ignore[method-assign]


async def taken_from(buffer: ReplayBuffer) -> None:
    """Wait until the database is empty, past the queue of the buffer's operations."""

    def is_empty(tx: Transaction) -> bool:
        return not tx.run("SELECT count(*) FROM rb_group")[0][0]

    async def empty() -> bool:
        state = buffer.storage
        future = asyncio.run_coroutine_threadsafe(state.engine.read(is_empty), state.thread.loop)
        return await asyncio.wrap_future(future)

    await until(empty)


@asynccontextmanager
async def locked(url: str) -> AsyncIterator[None]:
    """Another connection that holds the lock which every write needs."""
    database = open_database(Access(parse_url(url), lock_timeout=5))
    try:
        async with database.transaction(write=True, alone=True):
            yield
    finally:
        await database.dispose()
