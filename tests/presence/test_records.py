"""How a buffer stood each minute, and how long that and all else is kept."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.schema import records
from replaybuf.storage.sql.statements import presence
from replaybuf.storage.sql.statements.presence import (
    KEEP_ACTIVITY,
    KEEP_HISTORY,
    KEEP_WAITERS,
    KEEP_WORKERS,
    note_minute,
)
from tests.presence.views import count, list_events, read_history, seen
from tests.stores import TASK, build, fill, until


async def test_everything_is_bounded(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too old goes, with the first look of a minute; of the history, one note of before stays."""
    monkeypatch.setattr(presence, "MOST_EVENTS", 5)
    now = time.time()
    tables = (records.activity, records.history, records.waiter, records.worker)
    async with build(shared_url, keep_checkpoints=None) as buffer:
        for step in range(8):
            await buffer.checkpoint(step)

        def fill_tables(tx: Any) -> None:
            for place, since in enumerate((now, now - KEEP_WORKERS - 100)):
                sign = {"started_at": since, "seen_at": since, "ended_at": None}
                named = {"id": 100 + place, "buffer": "default", "name": f"{place}", "host": "host", "pid": place}
                tx.execute(records.worker.insert(), named | sign)
            for since in (now, now - KEEP_ACTIVITY - 100):
                none = dict.fromkeys(("groups", "rollouts", "tokens", "failures", "taken"), 0)
                tx.execute(records.activity.insert(), {"worker_id": 100, "since": int(since), **none})
            for since in (now - KEEP_HISTORY - 100, now - KEEP_HISTORY - 200):
                tx.execute(records.history.insert(), {"buffer": "default", "since": int(since), "data": {}})
            for seen_at in (now, now - KEEP_WAITERS - 100):
                wait = {"worker_id": 100, "number": int(seen_at), "kind": "groups", "wants": {}, "limits": {}}
                tx.execute(records.waiter.insert(), wait | {"since": now, "seen_at": seen_at, "reason": ""})

        await buffer.storage._write(fill_tables)
        await buffer.storage._write(note_minute)
        assert [await count(buffer, table) for table in tables] == [1, 2, 1, 1]
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
    assert figures["put_of"] == {"completed": 3}
    assert figures["buffered"]["completed"] + figures.get("taken", 0) == 3


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
