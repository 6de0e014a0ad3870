"""How a buffer stood each minute, and how long that and all else is kept."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import asyncpg
import pytest

from replaybuf import FullError
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.schema import tables as schema
from replaybuf.storage.sql.statements import presence
from replaybuf.storage.sql.statements.presence import KEEP_HISTORY, KEEP_WORKERS, note_minute
from replaybuf.storage.sql.tasks import heartbeats
from tests.presence.views import count, list_events, read_history, seen, workers_of
from tests.stores import TASK, build, fill, group, until


async def test_everything_is_bounded(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too old goes, with the first look of a minute; of the history, one note of before stays."""
    monkeypatch.setattr(presence, "MOST_EVENTS", 5)
    now = time.time()
    tables = (schema.history, schema.worker)
    async with build(shared_url, keep_checkpoints=None) as buffer:
        for step in range(8):
            await buffer.checkpoint(step)

        def fill_tables(tx: Any) -> None:
            for place, since in enumerate((now, now - KEEP_WORKERS - 100)):
                sign = {"started_at": since, "seen_at": since, "ended_at": None, "activity": {}, "waits": []}
                named = {"id": 100 + place, "buffer": "default", "name": f"{place}", "host": "host", "pid": place}
                tx.change(schema.worker.insert().values(named | sign))
            for since in (now - KEEP_HISTORY - 100, now - KEEP_HISTORY - 200):
                tx.change(schema.history.insert().values(buffer="default", since=int(since), data={}))

        await buffer.storage._write(fill_tables)
        await buffer.storage._write(note_minute)
        assert [await count(buffer, table) for table in tables] == [2, 1]
        assert [one.step for one in await seen(shared_url, list_events)] == [7, 6, 5, 4, 3]


async def test_a_minute_is_noted_once(shared_url: str, quick: None) -> None:
    """By whoever comes first."""
    async with build(shared_url) as first, build(shared_url) as second:
        await fill(first, 3)
        await second.get(1, TASK)

        async def noted() -> bool:
            return bool(await seen(shared_url, read_history))

        await until(noted)
        await asyncio.sleep(0.2)
        minutes = await seen(shared_url, read_history)
    assert len(minutes) == len({one.since for one in minutes})
    figures = minutes[0].tasks[TASK]
    put = figures["put_of"]["completed"]  # by then: the minute may be noted after the first of them
    assert 0 < put <= 3
    assert figures["buffered"]["completed"] + figures.get("taken", 0) == put


async def test_nobody_waits_for_who_notes_a_minute(lent_database: str) -> None:
    """Of many processes, all of which begin a minute at once, one notes it; the others look again later."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        other = await asyncpg.connect(lent_database)
        try:
            await other.execute(f"SELECT pg_advisory_lock({Lock.MINUTE:d})")
            assert not await asyncio.wait_for(buffer.storage._write(note_minute), 5)
        finally:
            await other.close()

        async def noted() -> bool:
            return bool(await buffer.storage._write(note_minute))

        await until(noted)


# What seldom happened to a buffer


async def test_what_happens_seldom_is_noted(shared_url: str) -> None:
    """In the transaction in which it happens, with who did it, or held the groups."""
    options: dict[str, Any] = {"max_deliveries": 1, "keep_checkpoints": 1, "worker": "me"}
    async with build(shared_url, **options) as buffer:
        for number in range(6):
            await buffer.put(group(number), TASK, model_step=number)
        lease = await buffer.lease_batch({TASK: 2}, heartbeat=False)
        await lease.give_back(failed="out of memory")
        await buffer.checkpoint(1)
        await buffer.checkpoint(2)
        await buffer.delete({"uid": {"$in": [3]}})
        await buffer.refresh_staleness(task_stale_thresholds={TASK: 2}, current_train_step=6)
        await buffer.restore(2)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False, seconds=0.01)

        async def is_back() -> bool:
            return any(one.kind == "lease_lapsed" for one in await seen(shared_url, list_events))

        await until(is_back)
        found = [
            (one.kind, one.worker, one.task_name, one.step, one.groups, one.uids, one.detail)
            for one in reversed(await seen(shared_url, list_events))
        ]
    assert found[:-2] == [
        ("given_back", "me", TASK, None, 2, [1, 2], "out of memory"),
        ("set_aside", "me", TASK, None, 2, [1, 2], "out of memory"),
        ("checkpoint", "me", None, 1, 6, [], None),
        ("checkpoint", "me", None, 2, 6, [], None),
        ("checkpoint_dropped", "me", None, 1, 6, [], None),
        ("deleted", "me", TASK, None, 1, [3], '{"uid": {"$in": [3]}}'),
        ("expired", "me", TASK, 6, 1, [4], None),
        ("restored", "me", None, 2, 6, [], None),
    ]
    assert [one[:3] for one in found[-2:]] == [("lease_lapsed", "me", TASK), ("set_aside", "me", TASK)]


async def test_an_event_names_the_lowest_uids_in_order(shared_url: str) -> None:
    """Whatever the order in which the database finds them."""
    async with build(shared_url) as buffer:
        for number in range(3):
            await buffer.put(group(number), TASK, status="aborted" if number == 1 else "completed")
        await buffer.delete({})
    [event] = await seen(shared_url, list_events)
    assert event.uids == [1, 2, 3]


async def test_refusals_in_a_row_are_one_event(shared_url: str) -> None:
    async with build(shared_url, capacity=1, on_full="reject", worker="me") as buffer:
        await fill(buffer, 1)
        for number in range(30):
            with pytest.raises(FullError):
                await buffer.put(group(number), TASK)
    [event] = await seen(shared_url, list_events, kind="refused")
    assert (event.worker, event.task_name, event.groups) == ("me", TASK, 30)


# Signs of life when something is in the way


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
