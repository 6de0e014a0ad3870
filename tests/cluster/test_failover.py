"""With synchronous replication a failover loses, doubles and skips nothing, and all go on without being told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf import PromptLedger, ReplayBuffer, Status
from tests.cluster.servers import Cluster
from tests.faults.figures import Figures
from tests.faults.proxy import Link, Proxy, is_commit, once, proxied
from tests.faults.test_postgres_connections import all_told, end_background_work
from tests.faults.test_storm import Storm
from tests.stores import TASK, build, fill, group, number_of, numbers_of, take_all, until

FAILOVERS = int(os.environ.get("REPLAYBUF_TEST_FAILOVERS", "20"))


async def fail_over(cluster: Cluster) -> float:
    return await asyncio.to_thread(cluster.fail_over)


async def test_what_is_put_leased_taken_and_generated_meanwhile_is_there_once(
    synchronous: Cluster, figures: Figures
) -> None:
    """All at once, in three buffers; the ledgers of what they were told are here."""
    put: list[int] = []
    got: list[int] = []
    finished: list[int] = []
    steps: list[int] = []
    url, over, put_all = synchronous.new_database(), asyncio.Event(), asyncio.Event()

    async def producer(buffer: ReplayBuffer, first: int) -> None:
        number = first
        while not over.is_set():
            await buffer.put(group(number), TASK)
            put.append(number)
            number += 1

    async def taker(buffer: ReplayBuffer) -> None:
        while not put_all.is_set() or len(got) < len(put):
            got.extend(numbers_of(await buffer.get(2, TASK)))

    async def leaser(buffer: ReplayBuffer) -> None:
        while not put_all.is_set() or len(got) < len(put):
            lease = await buffer.lease_batch({TASK: 2}, seconds=30)
            found = numbers_of(lease.batch[TASK])
            if found:
                await lease.acknowledge()
            got.extend(found)

    async def generator(buffer: ReplayBuffer) -> None:
        source = PromptLedger(
            buffer, range(100_000), "prompts", make_group=lambda item, _: group(item, status=Status.INIT)
        )
        while not over.is_set():
            for prompt in await source.draw(2, timeout=60):
                for rollout in prompt.group:
                    rollout.status = Status.COMPLETED
                await prompt.finish()
                finished.append(number_of(prompt.group))

    async def checkpointer(buffer: ReplayBuffer) -> None:
        step = 0
        while not over.is_set():
            step += 1
            await buffer.checkpoint(step)
            steps.append(step)
            await asyncio.sleep(0.02)

    async with build(url) as one, build(url) as two, build(url) as three:
        waiting = asyncio.create_task(three.take_batch({"another": 1}, timeout=60))
        producers = [asyncio.create_task(producer(one, place * 1_000_000)) for place in range(4)]
        others = [asyncio.create_task(work) for work in (taker(two), leaser(three))]
        rest = [asyncio.create_task(work) for work in (generator(two), checkpointer(one))]

        async def under_way() -> bool:
            return min(map(len, (put, got, finished, steps))) > 5

        await until(under_way, 30)
        promoted = await fail_over(synchronous)
        seen = [len(each) for each in (put, got, finished, steps)]

        async def go_on() -> bool:
            return all(len(each) > before + 5 for each, before in zip((put, got, finished, steps), seen, strict=True))

        await until(go_on, 30)
        away = time.monotonic() - promoted
        over.set()
        await asyncio.gather(*producers, *rest)
        put_all.set()
        await asyncio.gather(*others)
        await one.put(group(7), "another")
        batch, _ = await waiting
        assert numbers_of(batch["another"]) == [7]
        assert [made.step for made in await two.checkpoints()][-1] == steps[-1]
        made = [number_of(item.item) async for item in two.find({"task_name": "prompts", "status": "completed"})]
    figures.compare(1, put, got)
    figures.add(prompts=len(finished), skipped=len(set(finished) - set(made)))
    assert sorted(got) == sorted(put)
    assert sorted(made) == sorted(finished)
    assert away < 10


@contextlib.asynccontextmanager
async def behind_proxy(cluster: Cluster, url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """The URL with a proxy in place of the primary."""
    parsed = make_url(url.replace(f",{cluster.standby.address}", "").replace(f"{cluster.standby.address},", ""))
    async with proxied(parsed.render_as_string(hide_password=False)) as proxy:
        port = make_url(proxy.url).port
        yield proxy, f"postgresql://postgres@127.0.0.1:{port},{cluster.standby.address}/{parsed.database}"


@pytest.mark.long
@pytest.mark.parametrize("arrives", [True, False], ids=["before the answer", "before it arrives"])
async def test_a_commit_whose_answer_dies_with_the_primary_is_made_once(synchronous: Cluster, arrives: bool) -> None:
    """The promoted standby knows what became of it, whether it is that of a put or of a take."""
    url = synchronous.new_database()

    async def fail(link: Link) -> bool:
        proxy.refusing = True
        if arrives:
            link.answers_lost = True
            mark = "SELECT coalesce(max(value), 0) FROM rb_counter WHERE name LIKE 'connection%'"
            [before] = synchronous.standby.ask_in(url, mark)
            link._writers[1].write(commit.pop())

            async def is_there() -> bool:
                return synchronous.standby.ask_in(url, mark) != [before]

            await until(is_there)
        await fail_over(synchronous)
        link.cut()
        return False

    commit: list[bytes] = []

    def at(link: Link, data: bytes) -> bool:
        if is_commit(link, data):
            commit.append(data)
        return is_commit(link, data)

    async with behind_proxy(synchronous, url) as (proxy, behind), build(behind) as buffer:
        await fill(buffer, 3)
        await all_told(buffer)
        await end_background_work(buffer)
        commit.clear()
        proxy.fault = once(fail, at=at)
        if arrives:
            await buffer.put(group(3), TASK)
            assert await take_all(buffer) == [0, 1, 2, 3]
        else:
            assert numbers_of(await buffer.get(2, TASK)) == [0, 1]
            assert await take_all(buffer) == [2]


_END_WAITS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.mark.long
async def test_a_commit_that_was_interrupted_while_it_waited_for_the_standby_is_not_believed(
    synchronous: Cluster,
) -> None:
    """It can be read on the primary, and would be gone with it."""
    url = synchronous.new_database()

    async def cut_soon(link: Link) -> bool:
        asyncio.get_running_loop().call_later(0.3, link.cut)
        return True

    async with behind_proxy(synchronous, url) as (proxy, behind), build(behind) as buffer:
        await fill(buffer, 2)
        await all_told(buffer)
        await end_background_work(buffer)
        synchronous.hold_back()
        proxy.fault = once(cut_soon)
        putting = asyncio.create_task(buffer.put(group(2), TASK))

        async def is_there() -> bool:
            synchronous.primary.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            )
            return synchronous.primary.ask_in(url, "SELECT count(*) FROM rb_group") == [3]

        await until(is_there, 30)
        await asyncio.sleep(0.5)
        assert not putting.done()
        await fail_over(synchronous)
        await putting
        assert await take_all(buffer) == [0, 1, 2]


ROLES = ["producer-1", "trainer-1", "taker-1", "refresher", "producer-2", "trainer-2"]


@pytest.mark.long
def test_failovers_under_load_lose_and_double_nothing(synchronous: Cluster, tmp_path: Path, figures: Figures) -> None:
    """Of processes in roles: everything that was put is acknowledged or taken once, by the ledgers of all."""
    storm = Storm(tmp_path, synchronous.new_database(), 1)
    for role in ROLES:
        storm.start(role)
    seconds = fail_over_again_and_again(synchronous, storm, partial(storm.numbers, "producer", "put"))
    storm.finish()
    put = storm.numbers("producer", "put")
    acked = storm.numbers("trainer", "acked") + storm.numbers("taker", "acked")
    figures.compare(FAILOVERS, put, acked)
    print_recovery(seconds)
    assert [n for n, times in Counter(acked).items() if times > 1] == []
    assert set(put) <= set(acked) <= set(storm.numbers("producer", "begin"))


@pytest.mark.long
def test_failovers_skip_and_double_no_prompt(synchronous: Cluster, tmp_path: Path, figures: Figures) -> None:
    """Each prompt of the dataset is trained as often as asked."""
    storm = Storm(tmp_path, synchronous.new_database(), 1)
    count, epochs = storm.prompts = (FAILOVERS * 150, 2)
    for role in ("worker-1", "worker-2", "trainer-1", "worker-3"):
        storm.start(role)
    seconds = fail_over_again_and_again(synchronous, storm, partial(storm.numbers, "trainer", "acked"))
    storm.finish()
    trained = Counter(storm.numbers("trainer", "acked"))
    skipped = [number for number in range(count) if trained[number] < epochs]
    doubled = [number for number, times in trained.items() if times > epochs]
    figures.add(
        faults=FAILOVERS, groups=count * epochs, prompts=count * epochs, skipped=len(skipped), doubled=len(doubled)
    )
    print_recovery(seconds)
    assert (skipped, doubled) == ([], [])


@pytest.mark.long
async def test_checkpoints_and_restores_are_exact_whatever_fails_over_meanwhile(
    synchronous: Cluster, figures: Figures
) -> None:
    """Each restore brings back what its checkpoint had."""
    chance, failovers = random.Random(1), FAILOVERS // 2

    async def fail_again_and_again() -> None:
        for _ in range(failovers):
            await asyncio.sleep(0.3 + 0.3 * chance.random())
            await fail_over(synchronous)
            await asyncio.to_thread(partial(synchronous.get_ready, synchronous=True))

    async with build(synchronous.new_database()) as buffer:
        failing, step = asyncio.create_task(fail_again_and_again()), 0
        while not failing.done():
            step += 1
            expected = list(range(3 * step, 3 * step + 3))
            await fill(buffer, 3, first=3 * step)
            await buffer.checkpoint(step)
            await buffer.get(2, TASK)
            await buffer.restore(step)
            found = await take_all(buffer)
            figures.compare(0, expected, found)
            assert found == expected
        await failing
    figures.add(faults=failovers)


def fail_over_again_and_again(cluster: Cluster, storm: Storm, done: partial[list[int]]) -> list[float]:
    """Fail over as often as asked, each time in the middle of the work; return after how long that went on."""
    seconds = []
    for _ in range(FAILOVERS):
        wait_for_more(done, len(done()) + 20)
        time.sleep(0.3 * storm.chance.random())
        promoted = cluster.fail_over(storm.chance.choice((0, 0, 0.5)))
        seconds.append(wait_for_more(done, len(done()) + 1) - promoted)
        cluster.get_ready(synchronous=True)
    return seconds


def wait_for_more(done: partial[list[int]], count: int) -> float:
    for _ in range(60_000):
        if len(done()) >= count:
            return time.monotonic()
        time.sleep(0.01)
    raise TimeoutError(f"{len(done())} of {count} after ten minutes")


def print_recovery(seconds: list[float]) -> None:
    """What it took from the promotion to the first thing that was done then."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99))
    print(f"recovery after promotion, of {len(ordered)}: p50 {p50:.2f} s, p99 {p99:.2f} s, most {ordered[-1]:.2f} s")
