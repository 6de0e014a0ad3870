"""Commits that a standby lacks, split brain, and commands on a cluster."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import FencedError, ReplayBuffer, RolloutState
from replaybuf.errors import AccessError, UnreachableError
from replaybuf.storage.sql.schema import HEAD
from tests.cli.conftest import run
from tests.cluster.conftest import Cluster, Node
from tests.cluster.test_failover import FAILOVERS, fail_over
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger, entries
from tests.faults.runs import POLICIES, STEPS, Run
from tests.faults.test_storm import batches
from tests.stores import TASK, because, build, fill, group, numbers_of, take_all, until


def commits_lost(words: str | None = None) -> Any:
    """The error of who has seen commits that the server lacks."""
    return pytest.raises(FencedError, match=words, check=because("commits lost"))


async def replicated(cluster: Cluster) -> None:
    """Wait until the standby has all that was committed."""

    async def has_all() -> bool:
        behind = (
            "SELECT sent_lsn IS DISTINCT FROM replay_lsn OR sent_lsn < pg_current_wal_lsn() FROM pg_stat_replication"
        )
        return await asyncio.to_thread(cluster.primary.ask, behind) == [False]

    await until(has_all, 30)


async def test_who_saw_lost_commits_goes_back_to_a_step_and_then_on(asynchronous: Cluster, figures: Figures) -> None:
    """Each call says so and changes nothing, until a restore; others of the run join it."""
    url = asynchronous.new_database()
    async with build(url) as trainer, build(url) as worker, build(url) as idle:
        await fill(trainer, 6)
        await trainer.checkpoint(4)
        assert numbers_of(await trainer.get(1, TASK)) == [0]
        await worker.put(group(6), TASK)
        lease = await worker.lease_batch({TASK: 1}, seconds=300)
        await idle.checkpoints()
        await replicated(asynchronous)
        asynchronous.hold_back()
        assert numbers_of(await trainer.get(2, TASK)) == [2, 3]
        # More than the 32 that a sequence is ahead of itself in the WAL.
        last_lost = max(await asyncio.gather(*(worker.put(group(number), TASK) for number in range(7, 57))))
        await fail_over(asynchronous)

        for call in (lambda: trainer.get(1, TASK), lambda: trainer.put(group(8), TASK), lambda: trainer.checkpoint(5)):
            with commits_lost(r"lacks transactions that this process saw committed.*restore"):
                await call()
        with commits_lost():  # also who waits, and who holds a lease
            await trainer.wait_ready({TASK: 100}, timeout=5)
        with commits_lost():
            await lease.acknowledge()
        assert [checkpoint.step for checkpoint in await trainer.checkpoints()] == [4]

        await trainer.restore(4)
        for stale_worker in (worker, idle):
            with pytest.raises(FencedError):
                await stale_worker.put(group(9), TASK)
        async with build(url) as joined:
            assert await joined.put(group(6), TASK) > last_lost  # uids of lost groups aren't given again
        remaining = await take_all(trainer)
    figures.compare(1, list(range(7)), remaining)
    assert remaining == list(range(7))


@pytest.mark.long
async def test_a_put_that_was_under_way_is_not_made_on_a_server_that_lacks_the_one_before(
    asynchronous: Cluster,
) -> None:
    """It waits for the failover, and then says what is missing instead of being repeated."""
    url = asynchronous.new_database()
    async with build(url) as buffer:
        await fill(buffer, 1)
        await replicated(asynchronous)
        asynchronous.hold_back()
        await fill(buffer, 1, first=1)
        await asyncio.to_thread(asynchronous.primary.kill)
        putting = asyncio.create_task(buffer.put(group(2), TASK))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(asynchronous.promote)
        with commits_lost():
            await putting
        async with build(url) as other:
            assert await take_all(other) == [0]


@pytest.mark.long
async def test_payloads_kept_apart_go_on_after_a_restore(asynchronous: Cluster, tmp_path: Path) -> None:
    """The files of lost transactions are left, and others written; groups of the checkpoint are whole."""
    url, apart = asynchronous.new_database(), {"payloads": str(tmp_path), "payload_threshold": 1}

    def large(number: int) -> list[RolloutState]:
        rollouts = group(number)
        rollouts[0].routed_experts = np.full(50_000, number)
        return rollouts

    async with build(url, **apart) as buffer:
        await buffer.put(large(0), TASK)
        await buffer.checkpoint(1)
        await replicated(asynchronous)
        asynchronous.hold_back()
        for number in range(1, 40):
            await buffer.put(large(number), TASK)
        await fail_over(asynchronous)
        with commits_lost():
            await buffer.put(large(40), TASK)
        await buffer.restore(1)
        for number in range(1, 40):
            await buffer.put(large(number), TASK)
        groups = await buffer.get(100, TASK)
        assert [int(rollouts[0].routed_experts[-1]) for rollouts in groups] == list(range(40))


@pytest.mark.long
@pytest.mark.parametrize("policy", list(POLICIES))
async def test_a_run_that_lost_commits_and_was_restored_is_the_run_that_lost_none(
    asynchronous: Cluster, policy: str, figures: Figures, tmp_path: Path
) -> None:
    """Batch by batch, whatever it was in the middle of: puts, leases, checkpoints, or another restore."""
    whole_ledger, chance = tmp_path / "whole", random.Random(policy)
    await Run(Ledger(whole_ledger), f"sqlite:///{tmp_path}/whole.db", policy).to_the_end()
    expected = batches(whole_ledger)
    failovers = max(1, FAILOVERS // len(POLICIES))
    for number in range(failovers):
        ledger = tmp_path / f"{number}"
        run = Run(Ledger(ledger), asynchronous.new_database(), policy)
        losing = asyncio.create_task(_lose(asynchronous, run, chance))
        await run.to_the_end()
        await losing
        steps = [(int(step), rest) for step, _, rest in (line.partition(" ") for line in entries(ledger, "batch"))]
        undone = Counter(map(int, entries(ledger, "undone")))
        differing = [step for step, batch in steps if batch != expected[step] and not _first_of(undone, step)]
        figures.add(faults=1, groups=sum(len(batch.split()) for _, batch in steps), lost=len(differing))
        assert (differing, batches(ledger), entries(ledger, "left")) == ([], expected, entries(whole_ledger, "left"))
        await asyncio.to_thread(asynchronous.get_ready, synchronous=False)


def _first_of(undone: Counter[int], step: int) -> bool:
    """Whether a batch may be one that was made while the server changed, and was undone by a restore afterwards."""
    undone[step] -= 1
    return undone[step] >= 0


async def _lose(cluster: Cluster, run: Run, chance: random.Random) -> None:
    """Fail over in the middle of the run, without what was committed in a last moment."""
    at = chance.randrange(2, STEPS - 3)
    await until(lambda: run.step >= at, 120)
    await asyncio.sleep(0.05 * chance.random())
    await asyncio.to_thread(cluster.hold_back)
    await asyncio.sleep(0.2 * chance.random())
    run.failing = True
    await fail_over(cluster)
    run.failed_over = True  # also where nothing was lost: a failover alone changes what random draws give


async def test_a_run_does_not_go_back_to_an_old_primary(synchronous: Cluster, figures: Figures) -> None:
    """Neither who has it open, also while the new primary is away, nor who opens it then."""
    url = synchronous.new_database()
    async with build(url, reconnect_timeout=1) as buffer:
        await fill(buffer, 3)
        await fail_over(synchronous)
        await fill(buffer, 1, first=3)
        old, new = synchronous.standby, synchronous.primary
        await asyncio.to_thread(old.start)
        async with build(url) as other:
            await fill(other, 1, first=4)
        before = await asyncio.to_thread(groups_at, old, url)
        await asyncio.to_thread(new.kill)
        with pytest.raises(UnreachableError, match=r"is an old primary \(timeline .*a standby of the new one"):
            await buffer.put(group(5), TASK)
        await asyncio.to_thread(new.start)
        await until(lambda: is_put(buffer, 6), 30)
        figures.add(faults=1, groups=6, doubled=int(await asyncio.to_thread(groups_at, old, url) != before))
        assert await asyncio.to_thread(groups_at, old, url) == before
        assert await take_all(buffer) == [0, 1, 2, 3, 4, 6]


async def is_put(buffer: ReplayBuffer, number: int) -> bool:
    try:
        await buffer.put(group(number), TASK)
    except UnreachableError:
        return False
    return True


def groups_at(node: Node, url: str) -> int:
    [count] = node.ask_in(url, "SELECT count(*) FROM rb_group")
    return int(count)


@pytest.mark.long
async def test_two_primaries_of_one_timeline_are_refused(asynchronous: Cluster) -> None:
    """Nobody can tell which of them a new process should follow."""
    url = asynchronous.new_database()
    async with build(url) as buffer:
        await fill(buffer, 1)
    primary = asynchronous.primary
    await asyncio.to_thread(primary.kill)
    await asyncio.to_thread(asynchronous.promote)
    primary.follow_nobody()
    await asyncio.to_thread(primary.start)
    await asyncio.to_thread(primary.promote)
    assert primary is asynchronous.standby
    with pytest.raises(UnreachableError, match=r"both say that they are the primary, and each has"):
        async with build(url):
            pass


@pytest.mark.long
async def test_a_standby_takes_no_writes(asynchronous: Cluster) -> None:
    """Alone, or one of two that can't be reached; it can be read."""
    url = asynchronous.new_database()
    async with build(url) as buffer:
        await fill(buffer, 1)
    await replicated(asynchronous)
    standby = asynchronous.standby.url(url.rpartition("/")[2])
    nowhere = standby.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1")
    for url_of_standby, error, text in (
        (standby, AccessError, "is a standby, which takes no writes; name the primary"),
        (nowhere, UnreachableError, "127.0.0.1:1 can't be used .*is a standby; start it"),
        (url.replace(str(asynchronous.primary.port), "1"), UnreachableError, "no primary can be reached"),
    ):
        with pytest.raises(error, match=text):
            async with build(url_of_standby):
                pass


_ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_commands_read_and_write_with_several_hosts(asynchronous: Cluster) -> None:
    """The first one of these is a standby; a command that writes finds the primary."""
    url = asynchronous.new_database()
    name = url.rpartition("/")[2]
    standby, primary = asynchronous.standby.address, asynchronous.primary.address
    url = f"postgresql://postgres:hidden@{standby},{primary}/{name}"

    async def prepare() -> None:
        async with build(url) as buffer:
            await fill(buffer, 3)
            await buffer.checkpoint(1)

    asyncio.run(prepare())
    for command in (
        ("ls", url),
        ("stats", url),
        ("show", url, "1"),
        ("sql", url, "SELECT count(*) FROM groups"),
        ("doctor", url),
        ("why", url),
        ("checkpoint", "ls", url),
        ("doctor", url, "--upgrade"),
        ("checkpoint", "restore", url, "1", "--yes"),
        ("rm", url, "--where", '{"task_name": "math"}', "--yes"),
    ):
        result = run(*command, code=None)
        assert "hidden" not in result.output
        assert result.exit_code == 0 or command[0] == "doctor", (command, result.output)


@pytest.mark.long
def test_alembic_finds_the_primary(asynchronous: Cluster) -> None:
    url = asynchronous.new_database()
    name = url.rpartition("/")[2]
    url = f"postgresql://postgres@{asynchronous.standby.address},{asynchronous.primary.address}/{name}"
    command = [sys.executable, "-m", "alembic", "upgrade", "head"]
    env = {**os.environ, "REPLAYBUF_URL": url, "PYTHONPATH": str(_ROOT)}
    subprocess.run(command, cwd=_ROOT, env=env, check=True, timeout=120)
    assert asynchronous.primary.ask_in(url, "SELECT version_num FROM rb_version") == [HEAD]
