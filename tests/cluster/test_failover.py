"""With synchronous replication a failover loses, doubles and skips nothing, and all go on without being told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBuffer, Status
from tests.cluster.conftest import Cluster
from tests.faults.calling import calling, goes_on
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger
from tests.faults.proxy import Link, Proxy, is_commit, once, proxied
from tests.faults.test_postgres_connections import end_background_work
from tests.faults.test_storm import Storm, judge_prompts
from tests.histories.history import Recorder, calls_in, numbers_of_calls
from tests.histories.workers import take_all_left
from tests.produce.conftest import ledger_of
from tests.stores import TASK, build, fill, group, number_of, numbers_of, take_all, until

FAILOVERS = int(os.environ.get("REPLAYBUF_TEST_FAILOVERS", "20"))


async def fail_over(cluster: Cluster) -> float:
    return await asyncio.to_thread(cluster.fail_over)


async def test_what_is_put_leased_taken_and_generated_meanwhile_is_there_once(
    synchronous: Cluster, figures: Figures, tmp_path: Path
) -> None:
    """All at once, in three buffers."""
    recorder, url = Recorder(Ledger(tmp_path / "calls")), synchronous.new_database()
    kinds = ("put", "take", "acknowledge", "finish", "step")

    async def generator(buffer: ReplayBuffer, over: asyncio.Event) -> None:
        source = ledger_of(
            buffer, range(100_000), "prompts", make_group=lambda item, _: group(item, status=Status.INIT)
        )
        while not over.is_set():
            for prompt in await source.draw(2, timeout=60):
                for rollout in prompt.group:
                    rollout.status = Status.COMPLETED
                await recorder.call("finish", prompt.finish(), groups=[number_of(prompt.group)])

    async def checkpointer(buffer: ReplayBuffer, over: asyncio.Event) -> None:
        while not over.is_set():
            step = recorder.done["step"] + 1
            await recorder.call("step", buffer.checkpoint(step), groups=[step])
            await asyncio.sleep(0.02)

    async with (
        build(url, max_deliveries=0) as first,
        build(url, max_deliveries=0) as other,
        build(url, max_deliveries=0) as third,
    ):
        waiting = asyncio.create_task(third.take_batch({"another": 1}, timeout=60))
        async with calling(recorder, (first, first, other, other, third)) as over:
            others = asyncio.gather(generator(other, over), checkpointer(first, over))
            await goes_on(recorder, *kinds)
            promoted = await fail_over(synchronous)
            await goes_on(recorder, *kinds)
            seconds_away = time.monotonic() - promoted
        await others
        await first.put(group(7), "another")
        batch, _ = await waiting
        assert numbers_of(batch["another"]) == [7]
        assert [checkpoint.step for checkpoint in await other.checkpoints()][-1] == recorder.done["step"]
        generated = [number_of(item.item) async for item in other.find({"task_name": "prompts", "status": "completed"})]
        await other.delete({"task_name": "prompts"})
        await take_all_left(other, recorder)
    calls = calls_in([tmp_path / "calls"])
    finished = numbers_of_calls(calls, "finish")
    figures.add(prompts=len(finished), skipped=len(set(finished) - set(generated)))
    figures.judge(1, calls)
    assert sorted(generated) == sorted(finished)
    assert seconds_away < 10


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
            mark = "SELECT coalesce(max(number), 0) FROM rb_info WHERE name LIKE 'connection%'"
            [before] = synchronous.standby.ask_in(url, mark)
            link._writers[1].write(commit.pop())
            await until(lambda: synchronous.standby.ask_in(url, mark) != [before])
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
        await end_background_work(buffer)
        commit.clear()
        proxy.fault = once(fail, at=at)
        if arrives:
            await buffer.put(group(3), TASK)
            assert await take_all(buffer) == [0, 1, 2, 3]
        else:
            assert numbers_of(await buffer.get(2, TASK)) == [0, 1]
            assert await take_all(buffer) == [2]


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


@pytest.mark.long
def test_failovers_under_load_lose_and_double_nothing(synchronous: Cluster, tmp_path: Path, figures: Figures) -> None:
    """Of processes in roles: everything that was put is acknowledged or taken once, by the ledgers of all."""
    storm = Storm(tmp_path, synchronous.new_database(), 1)
    storm.start("caller-1", "caller-2", "caller-3", "refresher")
    seconds = fail_over_again_and_again(synchronous, storm)
    figures.judge(FAILOVERS, storm.finish())
    print_recovery(seconds)


@pytest.mark.long
def test_failovers_skip_and_double_no_prompt(synchronous: Cluster, tmp_path: Path, figures: Figures) -> None:
    """Each prompt of the dataset is trained as often as asked."""
    storm = Storm(tmp_path, synchronous.new_database(), 1)
    storm.prompts = (FAILOVERS * 150, 2)
    storm.start("worker-1", "worker-2", "trainer-1", "worker-3")
    seconds = fail_over_again_and_again(synchronous, storm)
    judge_prompts(figures, FAILOVERS, storm.finish(), *storm.prompts)
    print_recovery(seconds)


def fail_over_again_and_again(cluster: Cluster, storm: Storm) -> list[float]:
    """Fail over as often as asked, each time in the middle of the work; return after how long that went on."""
    seconds = []
    for _ in range(FAILOVERS):
        wait_for_more(storm, 50)
        time.sleep(0.3 * storm.chance.random())
        promoted = cluster.fail_over(storm.chance.choice((0, 0, 0.5)))
        seconds.append(wait_for_more(storm, 1) - promoted)
        cluster.get_ready(synchronous=True)
    return seconds


def wait_for_more(storm: Storm, count: int) -> float:
    """Wait until so many more calls have returned; return when that was."""
    goal = storm.returned() + count
    for _ in range(60_000):
        if storm.returned() >= goal:
            return time.monotonic()
        time.sleep(0.01)
    raise TimeoutError(f"{storm.returned()} of {goal} after ten minutes")


def print_recovery(seconds: list[float]) -> None:
    """What it took from the promotion to the first thing that was done then."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99))
    print(f"recovery after promotion, of {len(ordered)}: p50 {p50:.2f} s, p99 {p99:.2f} s, most {ordered[-1]:.2f} s")
