"""Calls that are cancelled: closing, draws, other calls, and loops and processes that end."""

from __future__ import annotations

import asyncio
import pickle
import random
import textwrap
from types import SimpleNamespace

import pytest

from replaybuf import NotReadyError, ReplayBuffer, ReplayBufferConfig, Status
from replaybuf.errors import ClosedError
from replaybuf.integrations import verl
from replaybuf.rules.transitions import Tally
from replaybuf.storage.values import NewGroup
from tests.cancellation.conftest import by_cancel, end_background_work, locked, no_connection_out, take
from tests.postgres import holding, meanwhile
from tests.scripts import run
from tests.stores import TASK, build, fill, group, number_of, numbers_of, opened, rows, set_by, take_all, until


async def test_a_cancelled_close_still_closes(url: str) -> None:
    chance = random.Random(10)
    for _ in range(5):
        buffer = build(url)
        uid = await buffer.put(group(1), TASK)
        assert uid is not None
        await by_cancel(buffer.close(), chance.random() * 0.01)
        await buffer.close()
        assert not buffer.storage.thread._thread.is_alive()
        with pytest.raises(ClosedError):
            await buffer.get(1, TASK)


async def test_every_call_that_runs_into_a_close_ends(url: str) -> None:
    """With its result or with ClosedError; what was delivered and what is left make up the whole."""
    chance = random.Random(11)
    durable = url != "memory://"
    expected: list[int] = []
    delivered: list[int] = []
    for round_ in range(4):
        buffer = build(url)
        await fill(buffer, 5, 5 * round_)
        expected += range(5 * round_, 5 * round_ + 5)
        takes = [asyncio.create_task(buffer.get(1, TASK)) for _ in range(3)]
        other_tasks = [
            asyncio.create_task(buffer.put(group(10_000 + 3 * round_ + i), "other"), name="put") for i in range(3)
        ]
        other_tasks += [
            asyncio.create_task(buffer.wait_ready({TASK: 10_000}, timeout=30)),
            asyncio.create_task(buffer.take_batch({TASK: 10_000}, timeout=30)),
            asyncio.create_task(buffer.count_where({})),
        ]
        await asyncio.sleep(chance.random() * 0.01)
        async with asyncio.timeout(10):
            await asyncio.gather(buffer.close(), buffer.close())
            results = await asyncio.gather(*takes, *other_tasks, return_exceptions=True)
        for result in results[:3]:
            if isinstance(result, BaseException):
                assert isinstance(result, ClosedError)
            else:
                delivered += numbers_of(result)
        assert all(isinstance(r, (ClosedError, int)) for r in results[3:])
    if durable:
        async with build(url) as buffer:
            delivered += await take_all(buffer)
        assert sorted(delivered) == expected


async def test_close_waits_for_calls_that_wait_for_a_lock(shared_url: str) -> None:
    buffer = build(shared_url)
    await fill(buffer, 3)
    async with locked(shared_url):
        take = asyncio.create_task(buffer.get(1, TASK))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(buffer.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
    await closing
    assert numbers_of(await take) == [0]


async def test_puts_that_were_queued_before_the_end_are_stored_and_later_ones_refused(shared_url: str) -> None:
    """Though no worker has begun with the first ones yet."""
    async with build(shared_url) as buffer:
        await fill(buffer, 1)
        store = buffer.storage

        async def put_and_end() -> list[int | BaseException]:
            new_groups = [NewGroup(TASK, Status.COMPLETED, 0, group(1), 1.0)]
            putting = store.commits.put(new_groups)
            await store.commits.close()
            with pytest.raises(ClosedError):
                await store.commits.put(new_groups)
            return await putting

        [uid] = await store.thread.run(put_and_end)
        assert [item.uid async for item in buffer.find({})][1:] == [uid]


async def test_a_put_whose_commit_is_ended_is_told_that_the_buffer_was_closed(shared_url: str) -> None:
    """As when closing takes too long, and not as a cancellation, which nobody has asked for."""
    async with build(shared_url) as buffer:
        await fill(buffer, 1)
        await end_background_work(buffer)
        commits = buffer.storage.commits
        async with locked(shared_url):
            putting = asyncio.create_task(buffer.put(group(1), TASK))
            await until(lambda: commits._workers)
            buffer.storage.thread.post(lambda: [worker.cancel() for worker in commits._workers])
            with pytest.raises(ClosedError, match="may be stored, or not"):
                await putting


async def test_a_batch_whose_groups_are_locked_times_out(lent_database: str) -> None:
    """Those that another transaction holds are there, but can't be drawn."""
    async with build(lent_database) as buffer:
        await fill(buffer, 3)
        async with holding(lent_database, "SELECT FROM rb_group LIMIT 1 FOR UPDATE"):
            with pytest.raises(NotReadyError, match="others hold some"):
                await asyncio.wait_for(buffer.take_batch({TASK: 3}, timeout=0.1), 10)
        assert (await buffer.take_batch({TASK: 3}, timeout=10))[1] == {TASK: 3}


async def test_a_draw_is_undone_beside_a_sweep_of_its_groups(lent_database: str) -> None:
    """It waits for the sweep, which goes by the record of the draw: no version of the groups is left behind."""
    async with build(lent_database) as buffer:
        await end_background_work(buffer)
        await fill(buffer, 2)
        undo = await take(buffer, 2)
        sweep = "UPDATE rb_past SET removed_at = NULL; DELETE FROM rb_payload"  # as of a recorded draw
        async with meanwhile(lent_database, sweep, undo()) as [undoing]:
            await undoing
        assert await rows(buffer, "SELECT count(*) FROM rb_past") == [(0,)]
        assert await take_all(buffer) == [0, 1]


async def cancelled_at_every_turn(task: asyncio.Task[None]) -> None:
    """Cancel a task again and again until it has ended, as anyio's cancel scopes do."""
    async with asyncio.timeout(30):
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_lease_block_settles_its_groups_however_often_it_is_cancelled(
    buffer: ReplayBuffer, is_done: bool
) -> None:
    """Given back, uncounted, when it was cancelled; acknowledged when its work was done."""
    await fill(buffer, 4)
    for remaining in (2, 0) if is_done else (4, 4):
        inside = asyncio.Event()

        async def work(inside: asyncio.Event = inside) -> None:
            async with buffer.lease_batch({TASK: 2}):
                inside.set()
                if not is_done:
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await set_by(inside, task)
        await cancelled_at_every_turn(task)
        await buffer.count_where({})
        items = [item async for item in buffer.find({})]
        assert (len(items), sum(item.deliveries for item in items)) == (remaining, 0)
        assert sum(n for (*_, name), n in (await buffer.tallies()).items() if name == Tally.LEASED) == 0


async def test_a_find_that_is_left_in_the_middle_holds_nothing(buffer: ReplayBuffer) -> None:
    await fill(buffer, 10)
    finding = buffer.find({})
    assert number_of((await anext(finding)).item) == 0
    await no_connection_out(buffer)
    assert len(await take_all(buffer)) == 10
    await finding.aclose()  # type: ignore[attr-defined]


BEGINNING = """
import atexit
def report(groups):
    print(*numbers_of(groups), flush=True)
buffer = build(url)
asyncio.run(buffer.count_where({}))
"""
ENDS = {
    "cancelled take": """
        async def main():
            task = asyncio.create_task(buffer.get(3, "math"))
            await asyncio.sleep({delay})
            task.cancel()
            try:
                report(await task)
            except asyncio.CancelledError:
                pass
        asyncio.run(main())
    """,
    "take in a loop that just stops": """
        loop = asyncio.new_event_loop()
        task = loop.create_task(buffer.get(3, "math"))
        loop.run_until_complete(asyncio.sleep({delay}))
        if task.done():
            report(task.result())
        else:
            task._log_destroy_pending = False
        atexit.register(loop.close)
    """,
    "exit inside of a coroutine": """
        async def main():
            task = asyncio.create_task(buffer.get(3, "math"))
            task.add_done_callback(lambda t: t.cancelled() or report(t.result()))
            await asyncio.sleep({delay})
            sys.exit(0)
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("end", list(ENDS))
def test_a_process_that_ends_in_the_middle_of_a_take_loses_nothing(shared_url: str, end: str) -> None:
    chance = random.Random(14)
    with opened(shared_url) as buffer:
        asyncio.run(fill(buffer, 12))
    numbers: list[int] = []
    for _ in range(2):
        script = BEGINNING + textwrap.dedent(ENDS[end]).replace("{delay}", str(chance.random() * 0.006))
        numbers += map(int, run(script, shared_url).split())
    with opened(shared_url) as buffer:
        numbers += asyncio.run(take_all(buffer))
    assert sorted(numbers) == list(range(12))


async def test_a_sample_that_verls_trainer_did_not_get_is_not_one_of_its_step(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be acknowledged with them, untrained, and the others before they were trained on."""
    monkeypatch.setattr(verl, "_verl", lambda: (pickle, SimpleNamespace))
    monkeypatch.setattr(verl, "from_groups", lambda groups: groups[0][0].rollout_id)
    client = verl.BufferQueueClient(ReplayBufferConfig(url=url, policy="fifo"), 2)
    for number in range(3):
        rollouts = group(number)
        rollouts[0].extra_fields["verl"] = {"sample": {}}
        await client.buffer.put(rollouts, "train")

    async def cancelled() -> int:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(client, "get_queue_size", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await client.get_sample()
    samples = [await client.get_sample() for _ in range(2)]
    assert [pickle.loads(sample or b"").full_batch for sample, _ in samples] == [0, 1]
    assert (await client.get_statistics())["total_consumed"] == 0
    await client.shutdown()
