"""Cancellation: whenever and however a call ends, either the caller has the groups or the store has."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from replaybuf import ClosedError, NotReadyError, ReplayBuffer, Status
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.engine.opening import open_engine
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.sweep import sweep
from replaybuf.storage.sql.tasks.delivery import Drawing
from replaybuf.storage.values import Draw
from tests.postgres import new_database
from tests.stores import TASK, build, fill, group, number_of, numbers_of, opened, take_all, until

ROUNDS = 20


@pytest.fixture
async def buffer(sql_url: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[ReplayBuffer]:
    """A buffer that has to leave nothing behind: no thread, no connection, no complaint of asyncio's."""
    before = set(threading.enumerate())
    async with build(sql_url) as buffer:
        yield buffer
        await no_connection_out(buffer)
    gc.collect()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.name in ("asyncio", "concurrent.futures")] == []
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if name.startswith(("replaybuf", "Connection"))] == []


def storage_of(buffer: ReplayBuffer) -> SQLStorage:
    assert isinstance(buffer.storage, SQLStorage)
    return buffer.storage


async def no_connection_out(buffer: ReplayBuffer) -> None:
    """Wait until the pool has all connections back, except for the one that looks for changes, and the writer's."""
    state = storage_of(buffer)._state()
    pool: Any = state.engine.pool.pool

    async def all_back() -> bool:
        kept = state.watch._changes._connection, getattr(state.engine, "_writing", None)
        return not hasattr(pool, "checkedout") or pool.checkedout() <= sum(one is not None for one in kept)

    await until(all_back)


async def ended(task: asyncio.Task[Any]) -> Any:
    """What a task that may have been cancelled came to: its result, or None."""
    try:
        return await task
    except (asyncio.CancelledError, TimeoutError):
        return None


async def cancelled_after(call: Coroutine[Any, Any, Any], delay: float) -> Any:
    task = asyncio.create_task(call)
    await asyncio.sleep(delay)
    task.cancel()
    return await ended(task)


def by_cancel(call: Coroutine[Any, Any, Any], delay: float) -> Coroutine[Any, Any, Any]:
    return cancelled_after(call, delay)


async def by_wait_for(call: Coroutine[Any, Any, Any], delay: float) -> Any:
    try:
        return await asyncio.wait_for(call, delay)
    except TimeoutError:
        return None


async def by_timeout(call: Coroutine[Any, Any, Any], delay: float) -> Any:
    try:
        async with asyncio.timeout(delay):
            return await call
    except TimeoutError:
        return None


ENDINGS = [by_cancel, by_wait_for, by_timeout]
Ending = Callable[[Coroutine[Any, Any, Any], float], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_cancelled_get_loses_nothing(buffer: ReplayBuffer, ending: Ending) -> None:
    chance = random.Random(1)
    await fill(buffer, 2 * ROUNDS)
    taken: list[int] = []
    for _ in range(ROUNDS):
        groups = await ending(buffer.get(2, TASK), chance.choice((0, chance.random() * 0.004)))
        taken += numbers_of(groups or [])
    taken += await take_all(buffer)
    assert sorted(taken) == list(range(2 * ROUNDS))


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_cancelled_take_batch_loses_nothing(buffer: ReplayBuffer, ending: Ending) -> None:
    chance = random.Random(2)
    await fill(buffer, ROUNDS)
    taken: list[int] = []
    for first in range(ROUNDS, 2 * ROUNDS):
        batch, _, _ = await asyncio.gather(
            ending(buffer.take_batch({TASK: 2}, timeout=5), chance.random() * 0.006),
            asyncio.sleep(chance.random() * 0.003),
            buffer.put(group(first), TASK),
        )
        if batch is not None:
            assert len(batch[0][TASK]) == 2
            taken += numbers_of(batch[0][TASK])
    taken += await take_all(buffer)
    assert sorted(taken) == list(range(2 * ROUNDS))


async def test_a_batch_that_times_out_takes_nothing(buffer: ReplayBuffer) -> None:
    await fill(buffer, 3)
    with pytest.raises(NotReadyError, match="3 of 4"):
        await buffer.take_batch({TASK: 4}, timeout=0.05)
    assert await take_all(buffer) == [0, 1, 2]


async def test_a_batch_whose_groups_are_locked_times_out(postgres_url: str) -> None:
    """Those that another transaction holds are there, but can't be drawn."""
    with new_database(postgres_url) as url:
        async with build(url) as buffer:
            await fill(buffer, 3)
            other = await asyncpg.connect(url)
            async with other.transaction():
                await other.execute("SELECT FROM rb_group LIMIT 1 FOR UPDATE")
                with pytest.raises(NotReadyError, match="others hold some"):
                    await asyncio.wait_for(buffer.take_batch({TASK: 3}, timeout=0.1), 10)
            await other.close()
            assert (await buffer.take_batch({TASK: 3}, timeout=10))[1] == {TASK: 3}


async def test_an_undone_draw_of_groups_that_left_and_others_that_stayed_counts_for_nothing(sql_url: str) -> None:
    async with build(sql_url, max_times_sampled=2) as buffer:
        await fill(buffer, 4)
        assert len(await buffer.get(2, TASK)) == 2
        before = +Counter(await buffer.storage.tallies())
        state = storage_of(buffer)._state()
        drawing = Drawing(state, buffer.storage.codec, Draw({TASK: 4}))
        taken = await state.thread.run(drawing.run)
        await state.thread.run(lambda: drawing.undo(taken))
        assert +Counter(await buffer.storage.tallies()) == before


@pytest.mark.parametrize("times", [1, 0])
async def test_an_undone_draw_joins_a_race_that_began_in_the_meantime(shared_url: str, times: int) -> None:
    async with (
        build(shared_url, max_times_sampled=times) as buffer,
        build(shared_url, policy="uniform", max_times_sampled=times) as other,
    ):
        await fill(buffer, 2)
        state = storage_of(buffer)._state()
        drawing = Drawing(state, buffer.storage.codec, Draw({TASK: 1}))
        taken = await state.thread.run(drawing.run)
        assert len(await other.get(1, TASK)) == 1
        await state.thread.run(lambda: drawing.undo(taken))
        assert len(await other.get(2, TASK)) == (1 if times else 2)


@pytest.mark.parametrize("change", ["priority", "key", "replaces"])
async def test_a_group_that_moves_while_its_lock_is_waited_for_is_found(postgres_url: str, change: str) -> None:
    with new_database(postgres_url) as url:
        async with build(url) as buffer:
            await buffer.put(group(1, status=Status.FAILED), TASK)
            uid = await buffer.put(group(2), TASK, key="a")
            assert uid is not None
            other = await asyncpg.connect(url)
            async with other.transaction():
                moved = "UPDATE rb_group SET lane = (SELECT id FROM rb_lane WHERE status = 'failed') WHERE uid = $1"
                await other.execute(moved, uid)
                calls = {
                    "priority": lambda: buffer.update_priorities({uid: 2.0}),
                    "key": lambda: buffer.put(group(3), TASK, key="a"),
                    "replaces": lambda: buffer.put(group(3), TASK, replaces=[uid]),
                }
                task = asyncio.create_task(calls[change]())
                await asyncio.sleep(0.2)
                assert not task.done()
            await other.close()
            assert await task == (1 if change == "priority" else 3)
            assert [item.priority async for item in buffer.find({})] == [1.0, 2.0 if change == "priority" else 1.0]


async def test_many_takes_cancelled_at_once_lose_nothing(buffer: ReplayBuffer) -> None:
    chance = random.Random(3)
    await fill(buffer, 200)
    taken: list[int] = []
    for _ in range(8):
        calls = [by_cancel(buffer.get(3, TASK), chance.random() * 0.02) for _ in range(12)]
        for groups in await asyncio.gather(*calls):
            taken += numbers_of(groups or [])
    taken += await take_all(buffer)
    assert sorted(taken) == list(range(200))


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_cancelled_put_is_whole_or_absent_and_an_acknowledged_one_is_there(
    buffer: ReplayBuffer, ending: Ending
) -> None:
    chance = random.Random(4)
    acknowledged = set()
    for number in range(ROUNDS):
        if await ending(buffer.put(group(number, 3), TASK), chance.random() * 0.003) is not None:
            acknowledged.add(number)
    found = [item.item async for item in buffer.find({})]
    assert acknowledged <= set(numbers_of(found))
    assert len(set(numbers_of(found))) == len(found)
    assert all(len(rollouts) == 3 and {number_of([r]) for r in rollouts} == {number_of(rollouts)} for rollouts in found)


async def test_a_put_that_was_cancelled_is_settled_before_the_next_call(buffer: ReplayBuffer) -> None:
    chance = random.Random(5)
    for number in range(ROUNDS):
        await by_cancel(buffer.put(group(number), TASK), chance.random() * 0.002)
        count = await buffer.count_where({})
        await asyncio.sleep(0.002)
        assert await buffer.count_where({}) == count


async def test_a_take_that_was_cancelled_is_settled_before_the_next_call(buffer: ReplayBuffer) -> None:
    chance = random.Random(6)
    await fill(buffer, 5)
    for _ in range(ROUNDS):
        groups = await by_cancel(buffer.get(5, TASK), chance.random() * 0.004)
        assert await buffer.count_where({}) == (0 if groups else 5)
        assert len(buffer) == (0 if groups else 5)
        for rollouts in groups or []:
            await buffer.put(rollouts, TASK)


async def test_a_group_that_was_given_back_is_the_same_as_before(buffer: ReplayBuffer) -> None:
    for number in range(4):
        await buffer.put(
            group(number, 2), TASK, model_step=number, current_train_step=9, tags={"n": number}, key=str(number)
        )
    before = [item async for item in buffer.find({})]
    storage_of(buffer)._state().thread.post(time.sleep, 0.1)
    await by_cancel(buffer.get(4, TASK), 0.05)
    release = threading.Event()
    hold_decoding(buffer, release)
    task = asyncio.create_task(buffer.get(4, TASK))
    await taken_from(buffer)
    task.cancel()
    release.set()
    assert await ended(task) is None
    assert [item async for item in buffer.find({})] == before


def hold_decoding(buffer: ReplayBuffer, release: threading.Event) -> None:
    """From now on groups are decoded only after `release` is set."""
    codec = storage_of(buffer).codec
    decode = codec.decode

    def decode_later(data: Any, **options: Any) -> Any:
        assert release.wait(20)
        return decode(data, **options)

    codec.decode = decode_later  # type: ignore[method-assign]


async def taken_from(buffer: ReplayBuffer) -> None:
    """Wait until the database is empty, past the queue of the buffer's operations."""

    def is_empty(tx: Transaction) -> bool:
        return not tx.connection.exec_driver_sql("SELECT count(*) FROM rb_group").scalar_one()

    async def empty() -> bool:
        state = storage_of(buffer)._state()
        future = asyncio.run_coroutine_threadsafe(state.engine.read(is_empty), state.thread.loop)
        return await asyncio.wrap_future(future)

    await until(empty)


async def test_a_take_that_is_cancelled_before_it_began_blocks_no_later_call(buffer: ReplayBuffer) -> None:
    await fill(buffer, 3)
    storage_of(buffer)._state().thread.post(time.sleep, 0.1)  # so that the call and its end are noticed together
    await by_cancel(buffer.get(3, TASK), 0.02)
    async with asyncio.timeout(5):
        assert await take_all(buffer) == [0, 1, 2]


async def test_groups_that_come_back_after_their_payloads_were_swept_are_whole(buffer: ReplayBuffer) -> None:
    await fill(buffer, 3)
    release = threading.Event()
    hold_decoding(buffer, release)
    task = asyncio.create_task(buffer.get(3, TASK))
    await taken_from(buffer)
    state = storage_of(buffer)._state()
    sweeping = state.engine.write(lambda tx: sweep(tx, time.time() + 60, 100))
    assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sweeping, state.thread.loop)) == 3
    task.cancel()
    release.set()
    assert await ended(task) is None
    assert await take_all(buffer) == [0, 1, 2]


async def test_groups_come_back_even_when_the_database_is_locked_at_first(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaybuf.storage.sql.engine.thread._RETRY_SECONDS", 0.05)
    async with build(shared_url, lock_timeout=0.2) as buffer:
        await fill(buffer, 3)
        release = threading.Event()
        hold_decoding(buffer, release)
        task = asyncio.create_task(buffer.get(3, TASK))
        await taken_from(buffer)
        async with locked(shared_url):
            task.cancel()
            release.set()
            assert await ended(task) is None
            await asyncio.sleep(0.6)
        await buffer.wait_ready({TASK: 3}, timeout=5)
        assert await take_all(buffer) == [0, 1, 2]


def locked(url: str) -> Any:
    """Another connection that holds the lock which every write needs."""
    database = open_engine(storage_of(build(url)).url, lock_timeout=5)

    class Locked:
        async def __aenter__(self) -> None:
            self.transaction = database.transaction(write=True, alone=True)
            await self.transaction.__aenter__()

        async def __aexit__(self, *_: object) -> None:
            await self.transaction.__aexit__(None, None, None)
            await database.dispose()

    return Locked()


@pytest.mark.parametrize(
    "name", ["wait_ready", "refresh", "delete", "update", "find", "save", "count", "len_while_cancelling"]
)
async def test_whatever_is_cancelled_the_groups_stay(buffer: ReplayBuffer, name: str, tmp_path: Path) -> None:
    chance = random.Random(7)
    await fill(buffer, 20)

    async def find() -> list[Any]:
        return [item async for item in buffer.find({}, limit=5)]

    async def length() -> int:
        await asyncio.sleep(0)
        await buffer.count_where({})
        return len(buffer)

    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "wait_ready": lambda: buffer.wait_ready({TASK: 21}, timeout=5),
        "refresh": lambda: buffer.refresh_staleness(task_stale_thresholds={TASK: 100}, current_train_step=3),
        "delete": lambda: buffer.delete({"task_name": "other"}),
        "update": lambda: buffer.update({}, priority=2.0),
        "find": find,
        "save": lambda: buffer.save(tmp_path / "snapshot"),
        "count": lambda: buffer.count_where({}),
        "len_while_cancelling": length,
    }
    rounds = 10 if name == "save" else 30
    for round_ in range(rounds):
        ending = ENDINGS[round_ % len(ENDINGS)]
        await ending(calls[name](), chance.random() * (0.05 if name == "save" else 0.004))
    assert sorted(await take_all(buffer)) == list(range(20))


async def test_a_cancelled_delete_removes_all_or_nothing(buffer: ReplayBuffer) -> None:
    chance = random.Random(8)
    for _ in range(20):
        await fill(buffer, 10)
        await by_cancel(buffer.delete({}), chance.random() * 0.004)
        assert await buffer.count_where({}) in (0, 10)
        await buffer.delete({})


async def test_a_cancelled_save_leaves_a_snapshot_that_is_whole_or_none(buffer: ReplayBuffer, tmp_path: Path) -> None:
    chance = random.Random(9)
    await fill(buffer, 30)
    whole = 0
    for number in range(8):
        folder = tmp_path / str(number)
        await by_cancel(buffer.save(folder), chance.random() * 0.06)
        await buffer.count_where({})
        if (folder / "replaybuf.sqlite").exists():
            async with build("sqlite:///:memory:") as copy:
                await copy.resume(folder)
                assert sorted(await take_all(copy)) == list(range(30))
            whole += 1
    await buffer.save(tmp_path / "last")
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == ["replaybuf.sqlite"]


async def test_a_find_that_is_left_in_the_middle_holds_nothing(buffer: ReplayBuffer) -> None:
    await fill(buffer, 10)
    finding = buffer.find({})
    assert number_of((await anext(finding)).item) == 0
    await no_connection_out(buffer)
    assert len(await take_all(buffer)) == 10
    await finding.aclose()  # type: ignore[attr-defined]


async def test_a_cancelled_close_still_closes(sql_url: str) -> None:
    chance = random.Random(10)
    for _ in range(10):
        buffer = build(sql_url)
        put = await buffer.put(group(1), TASK)
        assert put is not None
        await by_cancel(buffer.close(), chance.random() * 0.01)
        await buffer.close()
        assert not storage_of(buffer)._open.thread._thread.is_alive()  # type: ignore[union-attr]
        with pytest.raises(ClosedError):
            await buffer.get(1, TASK)


async def test_every_call_that_runs_into_a_close_ends(sql_url: str) -> None:
    """With its result or with ClosedError; what was delivered and what is left make up the whole."""
    chance = random.Random(11)
    durable = ":memory:" not in sql_url
    expected: list[int] = []
    delivered: list[int] = []
    for round_ in range(12):
        buffer = build(sql_url)
        await fill(buffer, 5, 5 * round_)
        expected += range(5 * round_, 5 * round_ + 5)
        takes = [asyncio.create_task(buffer.get(1, TASK)) for _ in range(3)]
        others = [
            asyncio.create_task(buffer.put(group(10_000 + 3 * round_ + i), "other"), name="put") for i in range(3)
        ]
        others += [
            asyncio.create_task(buffer.wait_ready({TASK: 10_000}, timeout=30)),
            asyncio.create_task(buffer.take_batch({TASK: 10_000}, timeout=30)),
            asyncio.create_task(buffer.count_where({})),
        ]
        await asyncio.sleep(chance.random() * 0.01)
        async with asyncio.timeout(10):
            await asyncio.gather(buffer.close(), buffer.close())
            results = await asyncio.gather(*takes, *others, return_exceptions=True)
        for result in results[:3]:
            if isinstance(result, BaseException):
                assert isinstance(result, ClosedError)
            else:
                delivered += numbers_of(result)
        assert all(isinstance(r, (ClosedError, int)) for r in results[3:])
    if durable:
        async with build(sql_url) as buffer:
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


async def test_a_second_close_returns_when_the_first_has_ended(shared_url: str) -> None:
    buffer = build(shared_url)
    await fill(buffer, 3)
    async with locked(shared_url):
        take = asyncio.create_task(buffer.get(1, TASK))
        await asyncio.sleep(0.05)
        first, second = asyncio.create_task(buffer.close()), asyncio.create_task(buffer.close())
        await asyncio.sleep(0.1)
        assert (first.done(), second.done()) == (False, False)
    await asyncio.gather(first, second, take)


async def test_a_result_that_nobody_received_at_close_goes_back(shared_url: str) -> None:
    """A loop that is busy, in another thread, when the buffer is closed, and cancels its take afterwards."""
    buffer = build(shared_url)
    await fill(buffer, 3)
    started, go_on = threading.Event(), threading.Event()
    taken: list[int] = []

    async def consume() -> None:
        task = asyncio.create_task(buffer.get(3, TASK))
        await asyncio.sleep(0)
        started.set()
        assert go_on.wait(10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ClosedError):
            taken.extend(numbers_of(await task))

    thread = threading.Thread(target=lambda: asyncio.run(consume()))
    thread.start()
    await asyncio.to_thread(started.wait, 10)
    await asyncio.sleep(0.1)
    await buffer.close()
    go_on.set()
    await asyncio.to_thread(thread.join)
    async with build(shared_url) as again:
        assert sorted(taken + await take_all(again)) == [0, 1, 2]


def test_a_loop_that_ends_in_the_middle_of_a_take_loses_nothing(sql_url: str) -> None:
    """asyncio.run cancels what still runs."""
    chance = random.Random(12)
    taken: list[int] = []
    with opened(sql_url) as buffer:
        asyncio.run(fill(buffer, 60))

        async def main() -> None:
            tasks = [asyncio.create_task(buffer.get(2, TASK)) for _ in range(2)]
            for task in tasks:
                task.add_done_callback(lambda t: None if t.cancelled() else taken.extend(numbers_of(t.result())))
            await asyncio.sleep(chance.random() * 0.006)

        for _ in range(15):
            asyncio.run(main())
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == list(range(60))


def test_a_loop_that_is_closed_with_a_pending_take_loses_nothing(sql_url: str) -> None:
    chance = random.Random(13)
    taken: list[int] = []
    with opened(sql_url) as buffer:
        asyncio.run(fill(buffer, 20))
        for _ in range(20):
            loop = asyncio.new_event_loop()
            task = loop.create_task(buffer.get(1, TASK))
            loop.run_until_complete(asyncio.sleep(chance.random() * 0.005))
            loop.close()
            if task.done():
                taken += numbers_of(task.result())
            else:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # closing it like this is bad style
            del task

        async def all_back() -> bool:
            gc.collect()  # that is what tells of the take that nobody can go on with
            return len(buffer) + len(taken) == 20

        asyncio.run(until(all_back, 60))
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == list(range(20))


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
    taken: list[int] = []
    for _ in range(2):
        script = textwrap.dedent(
            """
            import asyncio, atexit, sys
            from tests.stores import build, numbers_of
            def report(groups):
                print(*numbers_of(groups), flush=True)
            buffer = build(sys.argv[1])
            asyncio.run(buffer.count_where({}))
            """
        ) + textwrap.dedent(ENDS[end]).replace("{delay}", str(chance.random() * 0.006))
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", script, shared_url], capture_output=True, text=True, timeout=30
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        taken += map(int, ran.stdout.split())
    with opened(shared_url) as buffer:
        taken += asyncio.run(take_all(buffer))
    assert sorted(taken) == list(range(12))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_of_cancellations_loses_nothing(
    sql_url: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)
    caplog.set_level(logging.INFO)
    taken: list[int] = []
    put: set[int] = set()
    async with build(sql_url) as buffer:

        async def produce(number: int) -> None:
            if await ENDINGS[number % 3](buffer.put(group(number), TASK), chance.random() * 0.01) is not None:
                put.add(number)

        async def consume(number: int) -> None:
            call = buffer.get(2, TASK) if number % 2 else buffer.take_batch({TASK: 2}, timeout=0.01)
            try:
                result = await ENDINGS[number % 3](call, chance.random() * 0.02)
            except NotReadyError:
                return
            groups = result if isinstance(result, list) else result[0][TASK] if result else []
            taken.extend(numbers_of(groups))

        for first in range(0, 600, 30):
            await asyncio.gather(*(f(n) for n in range(first, first + 30) for f in (produce, consume)))
        taken += await take_all(buffer)
    assert len(set(taken)) == len(taken)
    assert put <= set(taken)
    assert [record for record in caplog.records if record.name == "asyncio"] == []
