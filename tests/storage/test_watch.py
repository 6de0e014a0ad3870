"""How a store notices what others commit: at once where something tells of it, in any case soon, and at little cost."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.round_trips import counting_round_trips
from replaybuf import ReplayBuffer
from replaybuf.storage.sql.engine import sqlite_changes
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.postgres import Notifications
from replaybuf.storage.sql.engine.sqlite_changes import Inotify
from replaybuf.storage.sql.engine.thread import RateLimit
from replaybuf.storage.sql.engine.urls import parse_url
from tests.stores import TASK, build, group

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="inotify is of Linux")

#: Longer than any of these tests waits.
NEVER = 60.0


def test_a_pace_is_a_burst_and_then_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("replaybuf.storage.sql.engine.thread.time", SimpleNamespace(monotonic=lambda: now))
    rate = RateLimit(burst=3, per_second=10)
    assert [round(rate.delay(), 6) for _ in range(5)] == [0, 0, 0, 0.1, 0.2]
    now += 0.3
    assert [round(rate.delay(), 6) for _ in range(2)] == [0, 0.1]
    now += 10
    assert [round(rate.delay(), 6) for _ in range(4)] == [0, 0, 0, 0.1]


@on_linux
async def test_inotify_tells_of_writes_while_it_is_on(tmp_path: Path) -> None:
    """Also, once, of those that came while it was off."""
    told = asyncio.Event()
    path = tmp_path / "log"
    path.write_bytes(b"")
    watch = Inotify(str(path), told.set)
    with path.open("ab", buffering=0) as file:
        file.write(b"1")
        await asyncio.sleep(0.05)
        assert not told.is_set()
        watch.switch(True)
        await asyncio.wait_for(told.wait(), 5)
        watch.switch(False)
        told.clear()
        file.write(b"2")
        await asyncio.sleep(0.05)
        assert not told.is_set()
    watch.close()
    with pytest.raises(FileNotFoundError):
        Inotify(str(tmp_path / "none"), told.set)


async def woken(waiting: ReplayBuffer, other: ReplayBuffer) -> float:
    """Return the seconds from a commit until a taker in another store has the group."""
    task = asyncio.create_task(waiting.take_batch({TASK: 1}, timeout=NEVER))
    await asyncio.sleep(0.3)  # by now it waits
    await other.put(group(1), TASK)
    committed = time.monotonic()
    async with asyncio.timeout(10):
        await task
    return time.monotonic() - committed


@on_linux
async def test_a_write_to_the_log_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without polling; also after the log was begun anew, and after a wait that ended in vain."""
    monkeypatch.setattr(sqlite_changes, "_GUARANTEE_SECONDS", NEVER)
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url) as waiting, build(url) as other:
        await other.count_where({})
        for _ in range(3):
            await woken(waiting, other)
            with pytest.raises(TimeoutError):
                await waiting.take_batch({TASK: 1}, timeout=0.05)
            engine = other.storage.engine
            truncate = partial(engine.outside, lambda raw: raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
            await other.storage.thread.run(truncate)


async def test_a_commit_is_awaited_although_callers_were_woken_since_its_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is seen some time after its pages were written to the log."""

    class Silent:
        def __init__(self, *_: Any) -> None:
            pass

        def switch(self, on: bool = False) -> None:
            pass

        close = switch

    monkeypatch.setattr(sqlite_changes, "Inotify", Silent)
    monkeypatch.setattr(sqlite_changes, "_LAST_LOOK_SECONDS", 1.0)
    async with build(f"sqlite:///{tmp_path}/buffer.db") as buffer:
        await buffer.put(group(0), TASK)
    engine, heard = open_database(parse_url(f"sqlite:///{tmp_path}/buffer.db")), asyncio.Event()
    changes: Any = engine.changes(heard.set)
    with closing(sqlite3.connect(tmp_path / "buffer.db", isolation_level=None)) as other:
        await changes.look()
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE rb_lane SET step = 1")
        changes._written()
        changes.switch(False)
        other.execute("COMMIT")
        changes.switch(True)
        async with asyncio.timeout(5):
            await heard.wait()
    await changes.close()
    await engine.dispose()


async def test_polling_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing tells of writes."""

    def refuse(*_: Any) -> None:
        raise OSError("this system has no inotify")

    monkeypatch.setattr(sqlite_changes, "Inotify", refuse)
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url) as waiting, build(url) as other:
        await other.count_where({})
        for _ in range(2):
            assert await woken(waiting, other) < 5


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
        assert looks <= 20 + (50 + 10) * elapsed
        await other.put(group(puts), "other")
        async with asyncio.timeout(5):
            await task
