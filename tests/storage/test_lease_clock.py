"""Watching for commits, brief transactions, and the clock of leases."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.round_trips import counting_round_trips
from replaybuf import ReplayBuffer, ReplayBufferConfig, Status
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.engine import postgres, sqlite, sqlite_dialect
from replaybuf.storage.sql.engine.database import HINT_SECONDS
from replaybuf.storage.sql.engine.postgres import Notifications
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.statements.files import keep_for_reading
from replaybuf.storage.sql.statements.upkeep import find_chores
from replaybuf.storage.sql.tasks import sweeper
from tests.cancellation.conftest import lent, locked
from tests.contract.leasing import lease_of, set_clock
from tests.faults.proxy import proxied
from tests.scripts import run
from tests.stores import TASK, build, fill, group, numbers_of, rows, set_by, take_all, until, until_equal

#: A process whose wall clock is so many seconds ahead. It says which group it may lease and which it may take, and
#: leaves another leased when it ends.
_SKEWED = """
right = time.time
time.time = lambda: right() + float(sys.argv[2])

async def main():
    async with ReplayBufferConfig(url=sys.argv[1], policy="fifo").build() as buffer:
        lease = await buffer.lease_batch({"math": 1}, seconds=1000, heartbeat=False)
        print(lease.batch["math"][0][0].rollout_id)
        await lease.acknowledge()
        print((await buffer.get(1, "math"))[0][0].rollout_id)
        await buffer.lease_batch({"math": 1}, seconds=0.5, heartbeat=False)

asyncio.run(main())
"""


async def skewed(url: str, ahead: float) -> list[int]:
    output = await asyncio.to_thread(run, _SKEWED, url, ahead)
    return [int(line) for line in output.split()]


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
async def test_processes_with_other_clocks_agree_on_leases(shared_url: str, ahead: float) -> None:
    """What one holds the other doesn't get; what one has left comes back to the other at its time."""
    async with build(shared_url) as buffer:
        await fill(buffer, 4)
        lease = await lease_of(buffer)
        assert await skewed(shared_url, ahead) == [1, 2]
        await lease.acknowledge()
        await until(lambda: buffer.is_ready({TASK: 1}), 60)
        assert numbers_of(await buffer.get(9, TASK)) == [3]


@pytest.fixture
async def buffer(tmp_path: Path) -> ReplayBuffer:
    return build(f"sqlite:///{tmp_path}/run.db")


def start_again(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Start the host: the time since then begins anew."""
    monkeypatch.setattr(sqlite_dialect, "this_start", lambda: name)
    start = time.monotonic()
    monkeypatch.setattr(sqlite_dialect, "since_start", lambda: time.monotonic() - start)


async def test_after_another_start_the_wall_clock_counts_once(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the moment when the first lease begins; leases of before go on by it."""
    start_again(monkeypatch, "start 1")
    async with buffer:
        await fill(buffer, 4)
        await lease_of(buffer)
        await lease_of(buffer, seconds=0.2)
        start_again(monkeypatch, "start 2")
        second = await lease_of(buffer)
        assert abs(second.until - time.time() - 1000) < 5
        await buffer.wait_ready({TASK: 2}, timeout=5)
        set_clock(monkeypatch, 5000.0)
        third = await lease_of(buffer)
        assert third.until - second.until < 100
        await buffer.storage._write(lambda tx: None)  # type: ignore[attr-defined]
        assert len(await buffer.get(9, TASK)) == 1


async def test_hosts_that_share_a_file_have_clocks_of_their_own(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither changes that of the other."""
    async with buffer:
        await fill(buffer, 3)
        untils = []
        for host in ("a", "b", "a"):
            monkeypatch.setattr(sqlite_dialect, "this_start", lambda host=host: host)
            untils.append((await lease_of(buffer)).until)
        assert untils == sorted(untils)
        assert untils[2] - untils[0] < 5


async def test_a_host_without_a_name_for_its_start_goes_by_its_wall_clock(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_dialect, "this_start", lambda: None)
    async with buffer:
        await fill(buffer, 2)
        first = await lease_of(buffer)
        set_clock(monkeypatch, 100.0)
        assert 90 < (await lease_of(buffer)).until - first.until < 110


@pytest.mark.parametrize("ahead", [7200.0, pytest.param(-7200.0, marks=pytest.mark.long)])
async def test_payloads_wait_for_their_sweep_by_the_clock_of_the_server(
    lent_database: str, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Of several hosts, whose clocks differ: what one removes, or is reading, another doesn't sweep too soon."""
    async with build(lent_database) as buffer:
        storage = buffer.storage
        await fill(buffer, 3)
        await storage.thread.run(storage.sweeper.stop)
        set_clock(monkeypatch, ahead)
        assert len(await buffer.get(2, TASK)) == 2
        await buffer.delete({})

        async def due(grace: float) -> bool:
            look = partial(find_chores, grace=grace, now=time.time())
            chores = await storage.thread.run(lambda: storage.engine.read(look, storage.transactions.scope))
            return chores.due

        assert not await due(60)
        assert await due(-60)
        await storage.thread.run(lambda: storage.engine.write(lambda tx: keep_for_reading(tx, [1, 2, 3], 120.0)))
        assert not await due(-60)
        assert await due(-180)


async def test_a_sweep_leaves_what_was_removed_a_moment_ago(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A take that is cancelled may still be undone, though what others took before is due."""
    monkeypatch.setattr(sweeper, "GRACE_SECONDS", 3600.0)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 0.01)
    async with build(url, policy="fifo") as buffer:
        storage: Any = buffer.storage
        _, second, third = [await buffer.put(group(number), TASK) for number in range(3)]
        await buffer.get(1, TASK)
        await storage._write(lambda tx: tx.run("UPDATE rb_past SET removed_at = 0.0"))
        await buffer.get(1, TASK)
        await until_equal([(second,), (third,)], lambda: rows(buffer, "SELECT uid FROM rb_payload ORDER BY uid"))


@pytest.mark.parametrize("ahead", [-7200.0, pytest.param(7200.0, marks=pytest.mark.long)])
async def test_retention_is_by_the_clock_of_the_server(
    lent_database: str, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """What is put aside, by a put of any kind or by a draw, stays for its time, whatever the hosts' clocks say."""
    async with build(lent_database, archive="10m", unfit="10m") as buffer:
        storage = buffer.storage
        await storage.open()
        await storage.thread.run(storage.sweeper.stop)

        async def put_all() -> None:
            for kind in ({}, {"key": str(time.time())}, {"tags": {"long": "x" * (1 << 24)}}):
                await buffer.put(group(1, status=Status.FAILED), TASK, **kind)
                await buffer.put(group(1), TASK)
            await buffer.get(3, TASK)

        async def looked() -> int:
            await storage.thread.run(storage.sweeper.maintain_groups)
            return await buffer.count_where({})

        await put_all()
        set_clock(monkeypatch, ahead)
        await put_all()
        assert await looked() == 12
        await storage._write(lambda tx: tx.run("UPDATE rb_group SET archived_at = archived_at - 601"))  # type: ignore[attr-defined]
        assert await looked() == 0


def where(tx: Transaction) -> str:
    return threading.current_thread().name


async def test_a_brief_write_needs_no_other_thread(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/buffer.db") as buffer:
        await fill(buffer, 1)
        store = buffer.storage
        assert await store.thread.run(lambda: store.transactions.write(where, brief=True)) == "replaybuf-database"
        assert await store.thread.run(lambda: store.transactions.write(where)) != "replaybuf-database"


async def test_while_another_process_writes_a_put_waits_and_reads_are_answered(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/buffer.db"
    async with build(url) as buffer:
        await fill(buffer, 1)
        async with locked(url):
            putting = asyncio.create_task(buffer.put(group(1), TASK))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(5):
                assert await buffer.is_ready({TASK: 1})
            assert not putting.done()
        await putting
        assert await take_all(buffer) == [0, 1]


@asynccontextmanager
async def writing_for_long(store: SQLStorage) -> AsyncIterator[None]:
    """A write transaction of the store that goes on until the block ends."""
    started, go_on = threading.Event(), threading.Event()

    def write(tx: Transaction) -> bool:
        started.set()
        return go_on.wait(10)

    writing = asyncio.create_task(store.thread.run(lambda: store.transactions.write(write)))
    await set_by(started, writing, 10)
    async with asyncio.timeout(5):
        yield
    go_on.set()
    assert await writing


async def test_a_brief_read_doesnt_wait_for_a_long_write(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/buffer.db") as buffer:
        await fill(buffer, 1)
        async with writing_for_long(buffer.storage):
            assert await buffer.is_ready({TASK: 1})


class Tool:
    pass


async def test_a_converter_may_ask_the_buffer(tmp_path: Path) -> None:
    """Also after puts that took no time, so that a put would be encoded in the store's thread."""
    asking, counts = threading.Event(), list[int]()

    def convert(_: Tool) -> int:
        if asking.is_set():
            counts.append(len(buffer))
        return 0

    async with ReplayBufferConfig(
        url=f"sqlite:///{tmp_path}/buffer.db", rollout_type=dict, converters={Tool: ("tool", convert, lambda _: Tool())}
    ).build() as buffer:
        async with asyncio.timeout(10):
            for _ in range(3):
                await buffer.put([{"tool": Tool()}], TASK)
            asking.set()
            await buffer.put([{"tool": Tool()}], TASK)
        assert counts == [3]


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


@pytest.mark.parametrize("change", [("_writes_to", lambda path: None), ("_LONGEST_POLL", NEVER)])
async def test_a_commit_to_a_file_is_noticed_after_a_wait_in_vain_and_after_the_log_was_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, Any]
) -> None:
    """By polling where the system doesn't tell of writes, and without where it does."""
    monkeypatch.setattr(sqlite, *change)
    url = f"sqlite:///{tmp_path}/run.db"
    async with build(url) as waiting, build(url) as other:
        await other.count_where({})
        for _ in range(3):
            assert await woken(waiting, other) < 5
            with pytest.raises(TimeoutError):
                await waiting.take_batch({TASK: 1}, timeout=0.05)
            with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


async def test_while_the_writer_is_busy_a_commit_may_be_one_of_others(tmp_path: Path) -> None:
    """Who waits looks then: the writer may wait for a lock that another process holds for long."""
    async with build(f"sqlite:///{tmp_path}/run.db") as buffer:
        await fill(buffer, 1)
        store = buffer.storage
        watch = store.transactions.engine.changes(lambda: None)
        await until_equal(False, lambda: store.thread.run(watch.poll))
        async with writing_for_long(store):
            assert await store.thread.run(watch.poll)
        await store.thread.run(watch.close)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
async def test_who_waits_behind_a_busy_writer_watches_the_file_once(tmp_path: Path) -> None:
    """A system has few inotify instances for each user, and other programs need them, too."""
    versions = iter([*[None] * 9, 7, 8])

    async def read() -> int | None:
        return next(versions)

    (tmp_path / "run.db-wal").touch()
    watch, before = sqlite.DataVersion(read, f"{tmp_path}/run.db"), len(os.listdir("/proc/self/fd"))
    for _ in range(11):
        assert await watch.poll()
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    await watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_who_waits_looks_once_at_what_is_committed_within_milliseconds(tmp_path: Path) -> None:
    async def read() -> int:
        return 7

    log = tmp_path / "run.db-wal"
    log.touch()
    watch = sqlite.DataVersion(read, f"{tmp_path}/run.db")
    assert await watch.poll()
    start, pausing = time.monotonic(), asyncio.create_task(watch.pause())
    await asyncio.sleep(0)
    log.write_bytes(b"another commit")
    await pausing
    assert time.monotonic() - start >= HINT_SECONDS
    await watch.close()


#: What a server, or a pooler before it, may not have.
LACKING = {
    "LISTEN": {b'LISTEN "': b'LISTAN "'},
    "pg_current_snapshot": {b"pg_current_snapshot": b"pg_current_snapshat"},
}


@pytest.mark.parametrize("lacking", LACKING)
async def test_commits_are_noticed_where_a_server_lacks_what_tells_of_them(lent_database: str, lacking: str) -> None:
    """By polling, twice a second; on connections that are kept."""
    async with proxied(lent_database) as proxy:
        proxy.instead = LACKING[lacking]
        async with build(proxy.url) as waiting, build(proxy.url) as other:
            await other.count_where({})
            for _ in range(2):
                await woken(waiting, other)
        assert len(proxy.links) <= 12


async def test_a_lost_announcement_is_made_up_for(monkeypatch: pytest.MonkeyPatch, lent_database: str) -> None:
    async def lose(_: Notifications) -> None: ...

    monkeypatch.setattr(Notifications, "announce", lose)
    async with build(lent_database) as waiting, build(lent_database) as other:
        await other.count_where({})
        for _ in range(2):
            assert await woken(waiting, other) < 5


async def test_a_waiting_take_wakes_although_its_listening_connection_died(lent_database: str) -> None:
    async with build(lent_database) as buffer, build(lent_database) as other:
        task = asyncio.create_task(buffer.take_batch({TASK: 1}, timeout=20))
        await other.count_where({})
        engine = create_async_engine(parse_url(lent_database))

        async def listener_is_gone() -> bool:
            async with engine.connect() as connection:
                result = await connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
                )
                return result.rowcount > 0

        await until(listener_is_gone)
        for _ in range(3):  # and it is neither leaked nor listened to again in vain
            await asyncio.sleep(0.4)
            await until(listener_is_gone)
        await other.put(group(7), TASK)
        batch, _ = await task
        assert numbers_of(batch[TASK]) == [7]
        pool = buffer.storage.engine.pool
        await until(lambda: lent(pool) <= 1)  # none is leaked: for a moment the sweep may have another one
        await engine.dispose()


async def test_who_is_woken_asks_once(lent_database: str) -> None:
    """Whether the buffer was restored and what is in it: one round trip."""
    async with counting_round_trips(lent_database) as (url, count), build(url) as buffer:
        query_counts = []
        for _ in range(20):
            before = count.value
            await buffer.storage.fenced_tallies()  # type: ignore[attr-defined]
            query_counts.append(count.value - before)
        assert min(query_counts) == 1  # for a moment the sweep may ask, too


async def test_an_announcement_is_enough(monkeypatch: pytest.MonkeyPatch, lent_database: str) -> None:
    """Without further looks."""
    monkeypatch.setattr(postgres, "_HEARING_SECONDS", NEVER)
    async with build(lent_database) as waiting, build(lent_database) as other:
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
