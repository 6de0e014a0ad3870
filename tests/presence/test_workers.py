"""Who works with a buffer, as other processes see it."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import pytest

from replaybuf import Status
from replaybuf.common.worker_name import working_as
from replaybuf.storage.sql.schema import tables as schema
from tests.presence import views
from tests.presence.views import count, list_waiters, list_workers, seen, waits_of, workers_of
from tests.scripts import Script
from tests.stores import TASK, build, group, until


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
    made, took = workers["rollout-1"], workers["trainer"]
    assert (made.groups, made.rollouts, made.tokens, made.failures, made.taken) == (21, 61, 122, 1, 0)
    assert (took.groups, took.failures, took.taken) == (0, 2, 6)
    assert {one.state for one in workers.values()} == {"ended"}
    assert made.pid == took.pid == os.getpid()


async def test_who_only_looks_is_no_worker(shared_url: str, quick: None) -> None:
    """And an idle process writes nothing."""
    async with build(shared_url) as buffer:
        assert await buffer.count(TASK, "completed") == 0
        await asyncio.sleep(0.3)
        for table in (schema.worker, schema.history):
            assert await count(buffer, table) == 0


@pytest.mark.parametrize("name", ["'; DROP TABLE rb_worker; --", '"\\\n\t%s :name $1', "x" * 200, "\x1b[2J‮א"])
async def test_a_name_may_be_any_text(shared_url: str, name: str) -> None:
    async with build(shared_url, worker=name) as buffer:
        await buffer.put(group(1), TASK)
    assert (await workers_of(shared_url))[name].groups == 1


async def test_two_buffers_of_a_process_are_told_apart(shared_url: str) -> None:
    """One may be closed before the other."""
    async with build(shared_url, worker="both") as first:
        await first.put(group(1), TASK)

        async def states() -> dict[int, str]:
            return {one.groups: one.state for one in await seen(shared_url, list_workers)}

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
    monkeypatch.setattr(views, "LIVE_SECONDS", 0.5)
    monkeypatch.setattr(views, "SILENT_SECONDS", 0.5)
    await asyncio.sleep(0.6)
    assert await waits_of(shared_url) == []
    assert len(await seen(shared_url, list_waiters, live=False)) == 1
    states = {(one.worker, one.pid): one.state for one in await seen(shared_url, list_workers)}
    assert states.pop(("waits", processes["waits"].pid)) == "silent"
    assert states.pop(("same name", processes["dies"].pid)) == "silent"
    assert list(states.values()) == ["ended"]
