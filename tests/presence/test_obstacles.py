"""Signs of life when something is in the way."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.tasks import heartbeats
from tests.presence.views import workers_of
from tests.stores import TASK, build, fill, until


@asynccontextmanager
async def locked(path: str) -> AsyncIterator[None]:
    """Hold the write lock of a SQLite file, as a shell would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        yield
        shell.execute("ROLLBACK")


async def test_a_locked_database_costs_one_warning_and_no_count(
    tmp_path: Any, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeats, "_PATIENCE", 0.05)
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url, worker="me") as buffer:
        await fill(buffer, 5)
        await buffer.get(1, TASK)
        async with locked(str(parse_url(url).database)):
            await asyncio.sleep(0.5)
    assert (await workers_of(url))["me"].groups == 5
    warnings = [one for one in caplog.records if one.name == "replaybuf.presence"]
    assert len([one for one in warnings if one.levelno == logging.WARNING]) <= 1


async def test_closing_a_locked_database_is_soon_over(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    buffer = build(url)
    await fill(buffer, 5)
    async with locked(str(parse_url(url).database)):
        begun = time.monotonic()
        await buffer.close()
        assert time.monotonic() - begun < 10  # lock_timeout is 30


async def test_who_was_fenced_off_is_still_seen(shared_url: str, quick: None) -> None:
    async with build(shared_url, worker="old") as old, build(shared_url, worker="new") as new:
        await fill(old, 1)
        await new.checkpoint(1)
        await new.restore(1)
        begun = time.time()
        storage: Any = old.storage
        storage.presence.of("old")  # something to tell

        async def again() -> bool:
            workers = await workers_of(shared_url)
            return "old" in workers and workers["old"].last_seen.timestamp() > begun

        await until(again)
