"""How a store notices what others commit: at once where something tells of it, in any case soon, and at little cost."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.round_trips import counting_round_trips
from replaybuf import ReplayBuffer
from replaybuf.storage.sql.engine.postgres import Notifications
from tests.stores import TASK, build, group

#: Longer than any of these tests waits.
NEVER = 60.0


async def woken(waiting: ReplayBuffer, other: ReplayBuffer) -> float:
    """Return the seconds from a commit until a taker in another store has the group."""
    task = asyncio.create_task(waiting.take_batch({TASK: 1}, timeout=NEVER))
    await asyncio.sleep(0.3)  # by now it waits
    await other.put(group(1), TASK)
    committed = time.monotonic()
    async with asyncio.timeout(10):
        await task
    return time.monotonic() - committed


async def test_a_commit_to_a_file_is_noticed_after_a_wait_in_vain_and_after_the_log_was_begun_anew(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url) as waiting, build(url) as other:
        await other.count_where({})
        for _ in range(3):
            assert await woken(waiting, other) < 5
            with pytest.raises(TimeoutError):
                await waiting.take_batch({TASK: 1}, timeout=0.05)
            with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


async def test_a_lost_announcement_is_made_up_for(monkeypatch: pytest.MonkeyPatch, postgres_database: str) -> None:
    async def lose(_: Notifications) -> None: ...

    monkeypatch.setattr(Notifications, "announce", lose)
    async with build(postgres_database) as waiting, build(postgres_database) as other:
        await other.count_where({})
        for _ in range(2):
            assert await woken(waiting, other) < 5


async def test_who_is_woken_asks_once(postgres_database: str) -> None:
    """Whether the buffer was restored and what is in it: one round trip."""
    async with counting_round_trips(postgres_database) as (url, count), build(url) as buffer:
        taken = []
        for _ in range(50):
            before = count.value
            await buffer.storage.fenced_tallies()  # type: ignore[attr-defined]
            taken.append(count.value - before)
        assert min(taken) == 1  # for a moment the sweep may ask, too


async def test_an_announcement_is_enough(monkeypatch: pytest.MonkeyPatch, postgres_database: str) -> None:
    """Without further looks."""
    monkeypatch.setattr(Notifications, "seconds", NEVER)
    async with build(postgres_database) as waiting, build(postgres_database) as other:
        await other.count_where({})
        for _ in range(3):
            await woken(waiting, other)


async def test_who_waits_for_something_else_is_woken_at_a_bounded_rate(shared_url: str) -> None:
    """However much others commit: it reads the store whenever it is woken."""
    async with build(shared_url) as waiting, build(shared_url) as other:
        await other.count_where({})
        looks, look = 0, waiting.storage.fenced_tallies  # type: ignore[attr-defined]

        async def counted() -> Any:
            nonlocal looks
            looks += 1
            return await look()

        waiting.storage.fenced_tallies = counted  # type: ignore[attr-defined]
        task = asyncio.create_task(waiting.wait_ready({"other": 1}, timeout=NEVER))
        started, puts = time.monotonic(), 0
        while time.monotonic() < started + 1:
            await other.put(group(puts), TASK)
            puts += 1
        elapsed = time.monotonic() - started
        assert looks <= 10 + (50 + 10) * elapsed
        await other.put(group(puts), "other")
        async with asyncio.timeout(5):
            await task
