"""Who is there: workers, waiters, and their records."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import Any

import pytest

from replaybuf import FullError, NotReadyError, Status
from replaybuf.common.worker_name import working_as
from replaybuf.produce import wait_published
from replaybuf.rules.diagnosis import Reason
from replaybuf.storage.reports import EventKind, WorkerEvent
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.schema import tables
from replaybuf.storage.sql.statements import presence
from replaybuf.storage.sql.statements.new_rows import insert_rows
from replaybuf.storage.sql.statements.presence import KEEP_HISTORY, KEEP_WORKERS, record_minute
from replaybuf.storage.sql.tasks import heartbeats
from tests.cancellation.conftest import end_background_work, locked
from tests.postgres import holding
from tests.presence import conftest
from tests.presence.conftest import (
    count,
    list_events,
    list_waiters,
    list_workers,
    read_history,
    seen,
    waits_of,
    workers_of,
)
from tests.scripts import Script
from tests.stores import TASK, build, fill, group, until, until_equal


async def test_everything_is_bounded(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too old goes, with the first look of a minute; of the history, one note of before stays."""
    monkeypatch.setattr(presence, "MOST_EVENTS", 5)
    now = time.time()
    watched = (tables.history, tables.worker)
    async with build(shared_url, keep_checkpoints=None) as buffer:
        for step in range(8):
            await buffer.checkpoint(step)

        def fill_tables(tx: Any) -> None:
            for place, since in enumerate((now, now - KEEP_WORKERS - 100)):
                sign = {"started_at": since, "seen_at": since, "activity": "{}", "waits": "[]"}
                values = {"id": 100 + place, "buffer": "default", "name": f"{place}", "host": "host", "pid": place}
                insert_rows(tx, tables.worker, [values | sign])
            for since in (now - KEEP_HISTORY - 100, now - KEEP_HISTORY - 200):
                insert_rows(tx, tables.history, [{"buffer": "default", "since": int(since), "data": "{}"}])

        await buffer.storage._write(fill_tables)
        await buffer.storage._write(record_minute)
        assert [await count(buffer, table) for table in watched] == [2, 1]
        assert [event.step for event in await seen(shared_url, list_events)] == [7, 6, 5, 4, 3]


async def test_a_minute_is_noted_once(shared_url: str, quick: None) -> None:
    """By whoever comes first."""
    async with build(shared_url) as first, build(shared_url) as second:
        await fill(first, 3)
        await second.get(1, TASK)
        await until(lambda: seen(shared_url, read_history))
        await asyncio.sleep(0.2)
        minutes = await seen(shared_url, read_history)
    assert len(minutes) == len({minute.since for minute in minutes})
    figures = minutes[0].tasks[TASK]
    put_count = figures["put_of"]["completed"]  # by then: the minute may be noted after the first of them
    assert 0 < put_count <= 3
    assert figures["buffered"]["completed"] + figures.get("taken", 0) == put_count


async def test_nobody_waits_for_who_notes_a_minute(lent_database: str) -> None:
    """Of many processes, all of which begin a minute at once, one notes it; the others look again later."""
    async with build(lent_database) as buffer:
        await fill(buffer, 1)
        async with holding(lent_database, f"SELECT pg_advisory_xact_lock({Lock.MINUTE:d})"):
            assert not await asyncio.wait_for(buffer.storage._write(record_minute), 5)
        await until(lambda: buffer.storage._write(record_minute))


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
        await until(lambda: seen(shared_url, list_events, kind="lease_lapsed"))
        noted = [
            (event.kind, event.worker, event.task_name, event.step, event.groups, event.uids, event.detail)
            for event in reversed(await seen(shared_url, list_events))
        ]
    assert noted[:-2] == [
        ("given_back", "me", TASK, None, 2, [1, 2], "out of memory"),
        ("set_aside", "me", TASK, None, 2, [1, 2], "out of memory"),
        ("checkpoint", "me", None, 1, 6, [], None),
        ("checkpoint", "me", None, 2, 6, [], None),
        ("checkpoint_dropped", "me", None, 1, 6, [], None),
        ("deleted", "me", TASK, None, 1, [3], '{"uid": {"$in": [3]}}'),
        ("expired", "me", TASK, 6, 1, [4], None),
        ("restored", "me", None, 2, 6, [], None),
    ]
    assert [row[:3] for row in noted[-2:]] == [("lease_lapsed", "me", TASK), ("set_aside", "me", TASK)]


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


async def test_a_locked_database_costs_neither_a_warning_nor_a_count(
    tmp_path: Any, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeats, "_PATIENCE", 0.05)
    caplog.set_level(logging.DEBUG, "replaybuf.presence")
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url, worker="me") as buffer:
        await fill(buffer, 5)
        await buffer.get(1, TASK)
        async with locked(url):
            storage: Any = buffer.storage
            storage.presence.of("me")  # something to write, whose heartbeat fails
            await until(lambda: any(record.name == "replaybuf.presence" for record in caplog.records))
    assert (await workers_of(url))["me"].groups == 5
    assert {record.levelno for record in caplog.records if record.name == "replaybuf.presence"} == {logging.DEBUG}


async def test_a_sign_of_life_that_fails_comes_again_soon(
    tmp_path: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker isn't to look dead."""
    monkeypatch.setattr(heartbeats, "_PATIENCE", 0.05)
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url, worker="me") as buffer:
        await fill(buffer, 1)
        await end_background_work(buffer)
        storage: Any = buffer.storage
        await storage.thread.run(storage.presence.flush)
        [before] = await seen(url, list_workers)
        async with locked(url):
            await storage.thread.run(storage.presence.flush)
        await asyncio.sleep(0.05)
        await storage.thread.run(storage.presence.beat)
        [after] = await seen(url, list_workers)
    assert after.last_seen > before.last_seen


async def test_an_event_that_another_thread_reports_while_a_heartbeat_fails_is_kept(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_PATIENCE", 0.05)

    def event(worker: str) -> WorkerEvent:
        return WorkerEvent(EventKind.GAVE_UP, worker, time.time(), 1, "")

    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url) as buffer:
        storage = buffer.storage
        await storage.open()
        await storage.thread.run(storage.sweeper.stop)
        append = storage.presence._events.append  # so far the other thread has come
        storage.presence.report(event("first"))
        async with locked(url):
            await storage.flush()
        append(event("second"))
        await storage.flush()
    assert {found.worker for found in await seen(url, list_events)} == {"first", "second"}


async def test_closing_a_locked_database_is_soon_over(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    buffer = build(url)
    await fill(buffer, 5)
    async with locked(url):
        start = time.monotonic()
        await buffer.close()
        assert time.monotonic() - start < 10  # lock_timeout is 30


async def test_who_was_fenced_off_is_still_seen(shared_url: str, quick: None) -> None:
    async with build(shared_url, worker="old") as old_buffer, build(shared_url, worker="new") as new_buffer:
        await fill(old_buffer, 1)
        await new_buffer.checkpoint(1)
        await new_buffer.restore(1)
        start = time.time()
        storage: Any = old_buffer.storage
        storage.presence.of("old")  # something to tell

        async def has_beaten() -> bool:
            workers = await workers_of(shared_url)
            return "old" in workers and workers["old"].last_seen.timestamp() > start

        await until(has_beaten)


async def test_waits_are_shown_while_they_last(shared_url: str, quick: None) -> None:
    """For groups, for room, and for the trainer; each with what it goes by."""
    options: dict[str, Any] = {"capacity": 2, "on_full": "block", "min_size": 2, "worker": "me"}
    async with build(shared_url, **options) as buffer:
        await fill(buffer, 2)
        start = time.time()
        tasks = [
            asyncio.create_task(buffer.take_batch({TASK: 2}, where={"reward": {"$lt": 0.5}}, timeout=60)),
            asyncio.create_task(buffer.put(group(3), TASK)),
            asyncio.create_task(buffer.put(group(4), TASK)),
            asyncio.create_task(wait_published(buffer, timeout=None)),
        ]

        async def shown_count() -> int:
            return len(await waits_of(shared_url))

        await until_equal(3, shown_count)
        waits = {wait.kind: wait for wait in await waits_of(shared_url)}
        groups, room, trainer = waits["groups"], waits["room"], waits["trainer"]
        assert groups.wants == {TASK: 2}
        assert groups.query == '{"reward": {"$lt": 0.5}}'
        assert groups.deadline is not None
        assert 59 < groups.deadline.timestamp() - groups.since.timestamp() < 61
        assert abs(groups.since.timestamp() - start) < 5
        assert "none matches" in groups.reason
        assert room.wants == {TASK: 2}
        assert "the capacity is 2" in room.reason
        assert trainer.deadline is None
        assert {wait.worker for wait in waits.values()} == {"me"}
        assert groups.limits == {"capacity": 2, "on_full": "block", "min_size": 2}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until_equal([], lambda: seen(shared_url, list_waiters, live=False))


async def test_who_waits_for_each_other_in_one_process_is_told_so(quick: None) -> None:
    """Whatever the store: here, one in memory."""
    async with build("memory://", capacity=2, on_full="block") as buffer:
        await fill(buffer, 2)
        drawing = asyncio.create_task(buffer.take_batch({TASK: 1}, where={"reward": {"$lt": 0.5}}, timeout=60))
        await asyncio.sleep(0.2)
        with pytest.raises(FullError, match="waits itself for 1 completed group"):
            await buffer.put(group(3), TASK, timeout=0.1)
        drawing.cancel()


async def test_errors_and_why_have_the_reason(shared_url: str) -> None:
    """A sentence, and then the numbers. Nothing is taken by asking."""
    async with build(shared_url, capacity=3, on_full="block") as buffer:
        await fill(buffer, 3)
        assert (await buffer.why({TASK: 3})).reason == Reason.READY
        assert (await buffer.why({TASK: 3}, where={"reward": {"$lt": 0}})).reason == Reason.NO_MATCH
        with pytest.raises(
            NotReadyError,
            match=r"^after 0.1 s: Nothing is ready for code .*[;?] [Tt]ask code: 0 completed groups there, 1 needed;",
        ) as none:
            await buffer.take_batch({"code": 1}, timeout=0.1)
        assert none.value.diagnosis.reason == Reason.NO_SUCH_TASK
        with pytest.raises(FullError, match=r"^after 0.1 s: No room for math: .* the capacity is 3; .*") as full:
            await buffer.put(group(4), TASK, timeout=0.1)
        assert full.value.diagnosis.reason == Reason.HELD_BACK
        assert await buffer.count(TASK, "completed") == 3


async def test_what_workers_did_is_counted_to_the_last_group(shared_url: str) -> None:
    """Also by those that share a process; a buffer that was closed says that they have ended."""
    async with build(shared_url, worker="trainer") as buffer:
        with working_as("rollout-1"):
            await asyncio.gather(*(buffer.put(group(number, 3), TASK) for number in range(20)))
            await buffer.put(group(21, status=Status.FAILED), TASK)
        await buffer.get(4, TASK)
        lease = await buffer.lease_batch({TASK: 2}, heartbeat=False)
        await lease.give_back(failed="out of memory")
        cancelled = asyncio.create_task(buffer.get(5, TASK))
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
    workers = await workers_of(shared_url)
    maker, taker = workers["rollout-1"], workers["trainer"]
    assert (maker.groups, maker.rollouts, maker.tokens, maker.failures, maker.taken) == (21, 61, 122, 1, 0)
    assert (taker.groups, taker.failures, taker.taken) == (0, 2, 6)
    assert {worker.state for worker in workers.values()} == {"ended"}
    assert maker.pid == taker.pid == os.getpid()


async def test_who_only_looks_is_no_worker(shared_url: str, quick: None) -> None:
    """And an idle process writes nothing."""
    async with build(shared_url) as buffer:
        assert await buffer.count(TASK, "completed") == 0
        await asyncio.sleep(0.3)
        for table in (tables.worker, tables.history):
            assert await count(buffer, table) == 0


async def test_a_name_may_be_any_text(shared_url: str) -> None:
    name = "'; DROP TABLE rb_worker; --\"\\\n\t%s :name $1\x1b[2J\u202e\u05d0" + "x" * 150
    async with build(shared_url, worker=name) as buffer:
        await buffer.put(group(1), TASK)
    assert (await workers_of(shared_url))[name].groups == 1


async def test_two_buffers_of_a_process_are_told_apart(shared_url: str) -> None:
    """One may be closed before the other."""
    async with build(shared_url, worker="both") as first:
        await first.put(group(1), TASK)

        async def states() -> dict[int, str]:
            return {worker.groups: worker.state for worker in await seen(shared_url, list_workers)}

        async with build(shared_url, worker="both") as second:
            await second.put(group(2), TASK)
        await first.put(group(3), TASK)
        await first.storage.flush()
        assert await states() == {1: "ended", 2: "working"}
    assert await states() == {1: "ended", 2: "ended"}


CHILD = """
async def main(url, role):
    async with build(url, worker="same name" if role != "waits" else "waits") as buffer:
        await buffer.put(group(1), TASK)
        if role == "waits":
            await buffer.take_batch({TASK: 100}, timeout=60)
        elif role == "dies":
            await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_killed_are_silent_and_wait_no_longer(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same name are workers of their own."""
    async with build(shared_url) as buffer:
        await buffer.tallies()  # the tables are there
    processes = {role: Script(CHILD, shared_url, role) for role in ("waits", "dies", "ends")}
    try:
        assert await asyncio.to_thread(processes["ends"].end) == (0, "", "")

        async def all_there() -> bool:
            return bool(await waits_of(shared_url)) and len(await seen(shared_url, list_workers)) == 3

        await until(all_there, 30)
        [wait] = await waits_of(shared_url)
        assert (wait.worker, wait.pid, wait.wants) == ("waits", processes["waits"].pid, {TASK: 100})
        assert wait.reason.startswith(f"Too little is ready for {TASK} (")
    finally:
        for process in processes.values():
            process.kill()
    monkeypatch.setattr(conftest, "LIVE_SECONDS", 0.5)
    monkeypatch.setattr(conftest, "SILENT_SECONDS", 0.5)
    await asyncio.sleep(0.6)
    assert await waits_of(shared_url) == []
    assert len(await seen(shared_url, list_waiters, live=False)) == 1
    states = {(worker.worker, worker.pid): worker.state for worker in await seen(shared_url, list_workers)}
    assert states.pop(("waits", processes["waits"].pid)) == "silent"
    assert states.pop(("same name", processes["dies"].pid)) == "silent"
    assert list(states.values()) == ["ended"]
