"""Step checkpoints in databases: payloads stay while one needs them, and only then; other buffers are left alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import ConflictError, FencedError
from replaybuf.rules.query import parse
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.matching import delete_groups
from replaybuf.storage.sql.statements.past import pass_on
from replaybuf.storage.values import Cursor
from tests.cancellation.conftest import take
from tests.postgres import ask, execute
from tests.reference.snapshots import held_by
from tests.stores import TASK, build, fill, group, numbers_of, sweep_now, take_all, until


async def swept(buffer: ReplayBuffer) -> tuple[int, ...]:
    """Sweep all there is to sweep; how many payloads and past versions are left."""
    storage = buffer.storage

    def work(tx: Transaction) -> tuple[int, ...]:
        while sweep_now(tx, limit=100) or pass_on(tx, 4):
            pass
        return tuple(
            tx.value(f"SELECT count(*) FROM {table}") for table in ("rb_payload", "rb_past WHERE removed_at > 0")
        )

    return await storage.thread.run(lambda: storage.engine.write(work))


async def test_cursors_go_with_their_checkpoint(shared_url: str) -> None:
    """SQLite gives the next one the same number."""
    async with build(shared_url) as buffer:
        for step in range(3):
            await buffer.storage.move_cursor(Cursor("a", step, step, bytes([step])))
            await buffer.checkpoint(step)
            if step < 2:
                await buffer.drop_checkpoint(step)
        query = "SELECT value FROM rb_cursor WHERE checkpoint > 0"
        assert await buffer.storage._read(lambda tx: [bytes(value) for value in tx.values(query)]) == [b"\x02"]
        await buffer.storage.move_cursor(Cursor("a", 3, 3, b"three"))
        await buffer.restore(2)
        assert (await buffer.storage.cursor("a")).value == b"\x02"


async def test_a_group_that_an_earlier_restore_undid_has_its_name_in_a_later_checkpoint(shared_url: str) -> None:
    part: Any = {"group": "p1", "size": 1}
    async with build(shared_url) as buffer:
        await buffer.checkpoint(1)
        await buffer.put(group(0), TASK, **part)
        await buffer.checkpoint(2)
        await take_all(buffer)
        for step in (1, 2):
            await buffer.restore(step)
        with pytest.raises(ConflictError, match="has all its rollouts already"):
            await buffer.put(group(1), TASK, **part)
        assert await take_all(buffer) == [0]


async def test_buffers_of_a_database_are_kept_and_restored_apart(shared_url: str) -> None:
    """A restore of one fences off nobody from another, and takes none of its groups and cursors."""

    async def cursors() -> list[bytes]:
        return [(await buffer.storage.cursor("a")).value for buffer in (first, second)]

    async with build(shared_url) as first, build(shared_url, name="second") as second:
        await fill(first, 2)
        await fill(second, 3)
        await first.storage.move_cursor(Cursor("a", 0, 1, b"one"))
        await second.storage.move_cursor(Cursor("a", 0, 2, b"two"))
        await first.checkpoint(1)
        await second.checkpoint(1)
        await take_all(first)
        await take_all(second)
        await fill(second, 1, 50)
        await first.storage.move_cursor(Cursor("a", 1, 3, b"three"))
        await second.storage.move_cursor(Cursor("a", 1, 4, b"four"))
        await first.restore(1)
        assert await cursors() == [b"one", b"four"]
        assert await second.count(TASK, "completed") == 1
        assert numbers_of([item.item async for item in second.find({})]) == [50]
        await fill(second, 1, 60)
        await second.restore(1)
        assert [len(first), len(second)] == [2, 3]
        assert await cursors() == [b"one", b"two"]
        await second.drop_checkpoint(1)
        assert [checkpoint.step for checkpoint in await first.checkpoints()] == [1]
        assert await second.checkpoints() == []


async def test_a_checkpoint_keeps_nothing_of_other_buffers(shared_url: str) -> None:
    """What leaves one without checkpoints, or changes there, is swept, though another has a newer one."""
    async with build(shared_url) as first, build(shared_url, name="second") as second:
        await fill(first, 3)
        await fill(second, 2)
        await second.checkpoint(1)
        await first.update({}, priority=2)
        await first.get(2, TASK)
        assert await swept(first) == (3, 0)
        await first.checkpoint(1)
        await second.checkpoint(2)
        await take_all(first)
        assert await swept(first) == (3, 1)
        await first.restore(1)
        assert await take_all(first) == [2]
        await first.drop_checkpoint(1)
        assert await swept(first) == (2, 0)


async def test_writers_go_on_while_a_checkpoint_is_made(shared_url: str) -> None:
    """Every put and take of others is in the checkpoint or after it; nothing is there twice or lost."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        await fill(buffer, 200)
        stop = asyncio.Event()
        put_numbers: list[int] = []
        drawn: list[int] = []

        async def produce() -> None:
            for number in range(1000, 3000):
                if stop.is_set():
                    return
                await other.put(group(number), TASK)
                put_numbers.append(number)

        async def consume() -> None:
            while not stop.is_set():
                drawn.extend(numbers_of(await other.get(3, TASK)))
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(produce()), asyncio.create_task(consume())]
        for step in range(10):
            before = list(put_numbers)
            await buffer.checkpoint(step)
        stop.set()
        await asyncio.gather(*tasks)
        everyone = sorted([*range(200), *put_numbers])
        assert sorted(drawn + await take_all(other)) == everyone
        await buffer.restore(9)
        restored = await take_all(buffer)
        assert len(set(restored)) == len(restored)
        assert {*range(200), *before} <= {*restored, *drawn}
        assert set(restored) <= set(everyone)


async def test_a_checkpoint_can_be_made_by_several_at_once(shared_url: str) -> None:
    """As by all ranks of a distributed trainer: one of them stays."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        await fill(buffer, 20)
        checkpoints = await asyncio.gather(*(maker.checkpoint(5) for maker in (buffer, other, buffer, other)))
        assert {checkpoint.groups for checkpoint in checkpoints} == {20}
        assert len(await buffer.checkpoints()) == 1
        await take_all(buffer)
        await buffer.restore(5)
        assert len(buffer) == 20


@pytest.mark.parametrize("options", [{}, {"max_times_sampled": 2}, {"max_times_sampled": 0}, {"archive": 10}], ids=repr)
async def test_a_draw_that_is_undone_is_undone_in_checkpoints_too(shared_url: str, options: dict[str, Any]) -> None:
    """The groups are in those made since, and counted, as before; also in one that took the place of another.

    Of groups that can be drawn twice, two leave by the draw, and two stay.
    """
    async with build(shared_url, **options) as buffer:
        await fill(buffer, 6)
        await buffer.get(2, TASK)
        for step in (1, 2):
            await buffer.checkpoint(step)
        before = held_by(buffer)
        undo = await take(buffer, 4)
        await buffer.drop_checkpoint(2)
        await buffer.checkpoint(2)  # which has the same number in the database
        await buffer.checkpoint(3)
        await buffer.update({}, priority=1)  # which keeps the groups as they were for the checkpoint
        await undo()
        assert held_by(buffer) == before
        for step in (1, 2, 3):
            assert (await buffer.restore(step)).groups == len(before["groups"])
            assert held_by(buffer) == before


async def test_an_undone_group_was_replaced_by_one_that_a_checkpoint_has_with_its_key(shared_url: str) -> None:
    """Though that one has left since: the checkpoint would have both."""
    async with build(shared_url) as buffer:
        await buffer.put(group(1), TASK, key="k")
        undo = await take(buffer, 1)
        await buffer.put(group(2), TASK, key="k")
        await buffer.checkpoint(1)
        assert numbers_of(await buffer.get(1, TASK)) == [2]
        await undo()
        assert await take_all(buffer) == []
        await buffer.restore(1)
        assert await take_all(buffer) == [2]


async def test_an_undone_group_that_left_the_archive_since_comes_back(shared_url: str) -> None:
    """A checkpoint has itself with its key, and no other group."""
    async with build(shared_url, archive=10) as buffer:
        await buffer.put(group(1), TASK, key="k")
        undo = await take(buffer, 1)
        await buffer.checkpoint(1)
        assert await buffer.delete({"status": "archived"}) == 1
        await undo()
        assert await take_all(buffer) == [1]


async def test_each_write_is_before_a_checkpoint_or_after_it(lent_database: str) -> None:
    """It waits for those under way, and others wait for it no longer than that. (SQLite has one writer.)"""
    async with build(lent_database) as buffer, build(lent_database) as other, build(lent_database) as third:
        await fill(buffer, 4)
        await third.count(TASK, "completed")
        before = held_by(buffer)
        started, go_on = threading.Event(), threading.Event()

        def slow(tx: Transaction) -> int:
            started.set()
            assert go_on.wait(10)
            return delete_groups(tx, parse({"uid": 1}))

        writing = asyncio.create_task(other.storage._write(slow))
        assert await asyncio.to_thread(started.wait, 10)
        checkpoint = asyncio.create_task(buffer.checkpoint(1))
        await until(lambda: _waits_for_a_lock(lent_database))
        putting = asyncio.create_task(third.put(group(9), TASK))
        await asyncio.sleep(0.05)
        assert not checkpoint.done()
        assert not putting.done()
        go_on.set()
        async with asyncio.timeout(5):
            await asyncio.gather(writing, checkpoint, putting)
        assert checkpoint.result().groups == 3
        await buffer.restore(1)
        assert sorted(await take_all(buffer)) == [1, 2, 3]
        assert held_by(buffer) != before


async def _waits_for_a_lock(url: str) -> bool:
    return bool(await ask(url, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))


async def test_a_draw_of_before_a_restore_is_not_undone(shared_url: str) -> None:
    """Its groups are what the restore has made of them."""
    async with build(shared_url) as buffer:
        await fill(buffer, 2)
        await buffer.checkpoint(1)
        await fill(buffer, 2, 10)
        undo = await take(buffer, 4)
        await buffer.restore(1)
        before = held_by(buffer)
        await undo()
        assert held_by(buffer) == before
        assert sorted(await take_all(buffer)) == [0, 1]


async def test_who_restores_is_not_fenced_off_by_it(shared_url: str) -> None:
    """Puts, takes and checkpoints of the same process are before the restore or after it."""
    async with build(shared_url) as buffer:
        await fill(buffer, 5)
        await buffer.checkpoint(1)
        stop = asyncio.Event()

        async def again_and_again(call: Callable[[], Awaitable[object]]) -> None:
            while not stop.is_set():
                await call()
                await asyncio.sleep(0)

        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: buffer.put(group(9), TASK),
            lambda: buffer.get(1, TASK),
            lambda: buffer.checkpoint(1),
            buffer.storage.check_fence,
        ]
        tasks = [asyncio.create_task(again_and_again(call)) for call in calls]
        for _ in range(8):
            await buffer.restore(1)
        stop.set()
        await asyncio.gather(*tasks)


async def test_more_checkpoints_at_once_than_there_are_connections(shared_url: str) -> None:
    """None of them keeps the connection that another one needs."""
    async with build(shared_url, keep_checkpoints=None) as buffer:
        await fill(buffer, 2)
        await asyncio.gather(*(buffer.checkpoint(step) for step in range(25)), take_all(buffer))
        assert len(await buffer.checkpoints()) == 25


async def test_the_random_draws_after_a_checkpoint_of_a_resumed_buffer_are_repeated(
    shared_url: str, tmp_path: Path
) -> None:
    """Its groups have other uids than tickets, because the database had groups before."""
    async with build("memory://", policy="uniform", seed=3) as saved:
        await fill(saved, 5)
        await saved.save(tmp_path)
    async with build(shared_url, name="other") as other, build(shared_url, policy="uniform", seed=3) as buffer:
        await fill(other, 7)
        await buffer.resume(tmp_path)
        await buffer.checkpoint(1)

        async def go_on() -> list[int]:
            await fill(buffer, 20, 100)
            return await take_all(buffer)

        expected = await go_on()
        await buffer.restore(1)
        assert await go_on() == expected


async def test_who_is_fenced_off_hears_of_the_last_restore(shared_url: str, tmp_path: Path) -> None:
    """By whom it was, and to which step, though there were others, and a snapshot was resumed since."""
    async with build("memory://") as saved:
        await fill(saved, 2)
        await saved.save(tmp_path)
    async with build(shared_url) as old_buffer, build(shared_url, worker="trainer") as trainer:
        await old_buffer.count(TASK, "completed")
        await fill(trainer, 1)
        for step in (3, 7):
            await trainer.checkpoint(step)
            await trainer.restore(step)
        with pytest.raises(FencedError, match=r"restored to the checkpoint of step 7 at .* by trainer,"):
            await fill(old_buffer, 1)
        await trainer.delete({})
        for step in (3, 7):
            await trainer.drop_checkpoint(step)
        async with build(shared_url) as other:
            await other.resume(tmp_path)
        with pytest.raises(FencedError, match="restored to the checkpoint of step 7"):
            await fill(old_buffer, 1)


async def test_the_bytes_are_those_of_the_groups_that_are_there(shared_url: str) -> None:
    """Whatever makes them leave, and whether they come back."""

    def bytes_of(tx: Transaction) -> tuple[int, int]:
        counted_bytes = tx.value("SELECT sum(amount) FROM rb_tally WHERE name = 'bytes'")
        return int(counted_bytes or 0), int(tx.value("SELECT coalesce(sum(bytes), 0) FROM rb_group"))

    async def check(buffer: ReplayBuffer) -> None:
        counted_bytes, actual_bytes = await buffer.storage._read(bytes_of)
        assert counted_bytes == actual_bytes > 0

    async with build(shared_url, capacity=6, on_full="evict") as buffer:
        await fill(buffer, 9)
        await check(buffer)
        await buffer.put(group(20), TASK, key="a")
        await buffer.put(group(21, 2), TASK, key="a")
        await check(buffer)
        await buffer.checkpoint(1)
        await buffer.get(2, TASK)
        await (await take(buffer, 2))()
        await check(buffer)
        await buffer.put(group(22, 3), TASK)
        await buffer.delete({"uid": {"$lt": 7}})
        await check(buffer)
        await buffer.restore(1, keep_new=True)
        await check(buffer)
        await buffer.restore(1)
        await check(buffer)


async def test_the_first_random_draws_after_a_restore_are_repeated(shared_url: str) -> None:
    """Of groups that a process without random draws has put."""
    draws = []
    async with build(shared_url) as buffer:
        await fill(buffer, 1)
        await buffer.checkpoint(1)
    for _ in range(2):
        async with build(shared_url) as worker, build(shared_url, policy="uniform", seed=3) as trainer:
            for number in range(1, 9):
                await worker.put(group(number), TASK)
            draws.append(numbers_of(await trainer.get(9, TASK)))
            await trainer.restore(1)
    assert draws[0] == draws[1]


async def test_an_undo_takes_the_trained_step_back_from_a_version_that_a_lease_had(shared_url: str) -> None:
    async with build(shared_url, max_times_sampled=3) as buffer:
        await fill(buffer, 1)
        undo = await take(buffer, 1, train_step=5)
        lease = await buffer.lease_batch({TASK: 1}, heartbeat=False)
        await buffer.checkpoint(1)
        await undo()
        await lease.give_back()
        await buffer.restore(1)
        [item] = [item async for item in buffer.find({})]
        assert (item.times_sampled, item.trained_step) == (0, None)


async def test_a_key_is_put_again_though_the_record_of_what_it_replaced_is_damaged(tmp_path: Path) -> None:
    async with build(f"sqlite:///{tmp_path}/b.db") as buffer:
        await buffer.put(group(1), TASK, key="p")
        await buffer.checkpoint(1)
        second = await buffer.put(group(2), TASK, key="p")
        execute(tmp_path / "b.db", f"UPDATE rb_group SET made_from = '[1' WHERE uid = {second}")
        await buffer.put(group(3), TASK, key="p")
        await buffer.restore(1, keep_new=True)
        assert numbers_of([item.item async for item in buffer.find({})]) == [3]
