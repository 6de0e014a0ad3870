"""The time of leases, of several hosts and after other starts of a host, whatever their wall clocks say."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from replaybuf import Lease, ReplayBuffer, Status
from replaybuf.storage.sql.engine import lease_clock
from replaybuf.storage.sql.statements.files import keep_for_reading
from replaybuf.storage.sql.statements.upkeep import find_chores
from tests.contract.leasing import set_clock
from tests.scripts import run
from tests.stores import TASK, build, fill, group, numbers_of, until

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
    said = await asyncio.to_thread(run, _SKEWED, url, ahead)
    return [int(line) for line in said.split()]


async def lease_of(buffer: ReplayBuffer, seconds: float) -> Lease:
    return await buffer.lease_batch({TASK: 1}, seconds=seconds, heartbeat=False)


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
async def test_processes_with_other_clocks_agree_on_leases(shared_url: str, ahead: float) -> None:
    """What one holds the other doesn't get; what one has left comes back to the other at its time."""
    async with build(shared_url) as buffer:
        await fill(buffer, 4)
        held = await lease_of(buffer, 1000)
        assert await skewed(shared_url, ahead) == [1, 2]
        await held.acknowledge()

        async def back() -> bool:
            return await buffer.is_ready({TASK: 1})

        await until(back, 60)
        assert numbers_of(await buffer.get(9, TASK)) == [3]


@pytest.fixture
async def buffer(tmp_path: Path) -> ReplayBuffer:
    return build(f"sqlite:///{tmp_path}/run.db")


def start_again(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Start the host: the time since then begins anew."""
    monkeypatch.setattr(lease_clock, "this_start", lambda: name)
    began = time.monotonic()
    monkeypatch.setattr(lease_clock, "since_start", lambda: time.monotonic() - began)


async def test_after_another_start_the_wall_clock_counts_once(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the moment when the first lease begins; leases of before go on by it."""
    start_again(monkeypatch, "start 1")
    async with buffer:
        await fill(buffer, 4)
        await lease_of(buffer, 1000)
        await lease_of(buffer, 0.2)
        start_again(monkeypatch, "start 2")
        second = await lease_of(buffer, 1000)
        assert abs(second.until - time.time() - 1000) < 5
        await buffer.wait_ready({TASK: 2}, timeout=5)
        set_clock(monkeypatch, 5000.0)
        third = await lease_of(buffer, 1000)
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
            monkeypatch.setattr(lease_clock, "this_start", lambda host=host: host)
            untils.append((await lease_of(buffer, 1000)).until)
        assert untils == sorted(untils)
        assert untils[2] - untils[0] < 5


async def test_a_host_without_a_name_for_its_start_goes_by_its_wall_clock(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_clock, "this_start", lambda: None)
    async with buffer:
        await fill(buffer, 2)
        first = await lease_of(buffer, 1000)
        set_clock(monkeypatch, 100.0)
        assert 90 < (await lease_of(buffer, 1000)).until - first.until < 110


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
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
            await storage.thread.run(storage.sweeper.look_after_groups)
            return await buffer.count_where({})

        await put_all()
        set_clock(monkeypatch, ahead)
        await put_all()
        assert await looked() == 12
        await storage._write(lambda tx: tx.run("UPDATE rb_group SET archived_at = archived_at - 601"))  # type: ignore[attr-defined]
        assert await looked() == 0
