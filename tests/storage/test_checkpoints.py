"""Step checkpoints in databases: payloads stay while one needs them, and only then; other buffers are left alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from replaybuf import ReplayBuffer
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import checkpoint_group, garbage, payload
from replaybuf.storage.sql.statements.checkpoints import make_checkpoint, sweep_forgotten
from replaybuf.storage.sql.statements.upkeep import sweep
from replaybuf.storage.sql.tasks import transactions
from tests.cancellation.ways import take
from tests.contract.checkpointing import state_of
from tests.stores import TASK, build, fill, group, numbers_of, take_all

ALWAYS = 1e12


async def swept(buffer: ReplayBuffer) -> tuple[int, ...]:
    """Sweep all there is to sweep; how many payloads, unswept groups and rows of checkpoints are left."""
    opened = buffer.storage

    async def work() -> tuple[int, ...]:
        while await opened.engine.write(lambda tx: sweep_forgotten(tx, 4, time.time()), fenced=False):
            pass
        while await opened.engine.write(lambda tx: sweep(tx, ALWAYS, 100), fenced=False):
            pass
        return await opened.engine.read(
            lambda tx: tuple(
                tx.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (payload, garbage, checkpoint_group)
            )
        )

    return await opened.thread.run(work)


async def test_payloads_stay_while_a_checkpoint_needs_them(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        await fill(buffer, 6)
        await buffer.checkpoint(1)
        await take_all(buffer)
        assert await swept(buffer) == (6, 0, 6)
        await buffer.restore(1)
        assert await swept(buffer) == (6, 0, 6)
        assert sorted(await take_all(buffer)) == list(range(6))


async def test_payloads_go_with_the_last_checkpoint_that_needs_them(shared_url: str) -> None:
    async with build(shared_url) as buffer:
        await fill(buffer, 4)
        await buffer.checkpoint(1)
        await buffer.get(1, TASK)
        await buffer.checkpoint(2)
        await buffer.get(1, TASK)
        await swept(buffer)
        await buffer.drop_checkpoint(1)
        assert await swept(buffer) == (3, 0, 3)
        await buffer.drop_checkpoint(2)
        assert await swept(buffer) == (2, 0, 0)


async def test_a_restore_leaves_nothing_behind(shared_url: str) -> None:
    """Groups that were put since are swept, also after many restores."""
    async with build(shared_url, keep_checkpoints=1) as buffer:
        await fill(buffer, 3)
        for step in range(4):
            await buffer.checkpoint(step)
            await fill(buffer, 5, 100)
            await buffer.get(2, TASK)
            await buffer.restore(step)
        assert await swept(buffer) == (3, 0, 3)


async def test_buffers_of_a_database_are_kept_and_restored_apart(shared_url: str) -> None:
    """A restore of one fences off nobody from another, and takes none of its groups."""
    async with build(shared_url) as first, build(shared_url, name="second") as second:
        await fill(first, 2)
        await fill(second, 3)
        await first.checkpoint(1)
        await second.checkpoint(1)
        await take_all(first)
        await take_all(second)
        await fill(second, 1, 50)
        await first.restore(1)
        assert await second.count(TASK, "completed") == 1
        await fill(second, 1, 60)
        await second.restore(1)
        assert [len(first), len(second)] == [2, 3]
        await second.drop_checkpoint(1)
        assert [made.step for made in await first.checkpoints()] == [1]
        assert await second.checkpoints() == []


async def test_writers_go_on_while_a_checkpoint_is_made(shared_url: str) -> None:
    """Every put and take of others is in the checkpoint or after it; nothing is there twice or lost."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        await fill(buffer, 200)
        stop = asyncio.Event()
        put: list[int] = []
        taken: list[int] = []

        async def produce() -> None:
            for number in range(1000, 3000):
                if stop.is_set():
                    return
                await other.put(group(number), TASK)
                put.append(number)

        async def consume() -> None:
            while not stop.is_set():
                taken.extend(numbers_of(await other.get(3, TASK)))
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(produce()), asyncio.create_task(consume())]
        for step in range(10):
            before = list(put)
            await buffer.checkpoint(step)
        stop.set()
        await asyncio.gather(*tasks)
        everyone = sorted([*range(200), *put])
        assert sorted(taken + await take_all(other)) == everyone
        await buffer.restore(9)
        back = await take_all(buffer)
        assert len(set(back)) == len(back)
        assert {*range(200), *before} <= {*back, *taken}
        assert set(back) <= set(everyone)


async def test_a_checkpoint_can_be_made_by_several_at_once(shared_url: str) -> None:
    """As by all ranks of a distributed trainer: one of them stays."""
    async with build(shared_url) as buffer, build(shared_url) as other:
        await fill(buffer, 20)
        made = await asyncio.gather(*(one.checkpoint(5) for one in (buffer, other, buffer, other)))
        assert {one.groups for one in made} == {20}
        assert len(await buffer.checkpoints()) == 1
        await take_all(buffer)
        await buffer.restore(5)
        assert len(buffer) == 20


async def test_a_draw_that_is_undone_is_undone_in_checkpoints_too(shared_url: str) -> None:
    """A take that was cancelled when a checkpoint had just been made: the groups are in it, and counted."""
    for options in ({}, {"max_times_sampled": 3}, {"archive": 10}):
        async with build(shared_url, **options) as buffer:
            await buffer.delete({})
            await fill(buffer, 4)
            await buffer.checkpoint(1)
            before = state_of(buffer)
            undo = await take(buffer, 2)
            await buffer.checkpoint(2)
            await undo()
            assert state_of(buffer) == before
            for step in (1, 2):
                assert (await buffer.restore(step)).groups == 4
                assert state_of(buffer) == before


class Copied:
    """A checkpoint on PostgreSQL that is copied, and not committed before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copied, self._let_go = threading.Event(), threading.Event()
        monkeypatch.setattr(transactions, "make_checkpoint", self._make)

    def _make(self, tx: Transaction, *args: Any) -> Any:
        made = make_checkpoint(tx, *args)
        self._copied.set()
        assert self._let_go.wait(10)
        return made

    @asynccontextmanager
    async def being_made(self, buffer: ReplayBuffer) -> AsyncIterator[None]:
        """Step 1, by another buffer than those in the block: its thread waits."""
        task = asyncio.create_task(buffer.checkpoint(1))
        assert await asyncio.to_thread(self._copied.wait, 10)
        try:
            async with asyncio.timeout(5):
                yield
        finally:
            self._let_go.set()
            await task


async def test_nobody_waits_for_a_checkpoint_that_is_being_made(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those who write alone, nor who undoes a draw, which is undone in it once it is there."""
    copied = Copied(monkeypatch)
    async with build(postgres_database) as buffer, build(postgres_database) as other:
        await fill(buffer, 4)
        before = state_of(buffer)
        undo = await take(buffer, 2)
        async with copied.being_made(other):
            await undo()
            assert state_of(buffer) == before
            await buffer.refresh_staleness(task_stale_thresholds={TASK: 3}, current_train_step=4)
            await buffer.put(group(9), TASK)
        assert (await buffer.restore(1)).groups == 4
        assert state_of(buffer) == before


async def test_what_is_replaced_while_a_checkpoint_is_made_does_not_come_back_beside_it(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a restore that keeps new groups. On SQLite: tests/storage/test_checkpoints_in_pieces.py."""
    copied = Copied(monkeypatch)
    async with build(postgres_database) as buffer, build(postgres_database) as other:
        uid = await buffer.put(group(1), TASK)
        async with copied.being_made(other):
            await buffer.put(group(2), TASK, replaces=[uid])
        await buffer.restore(1, keep_new=True)
        assert await take_all(buffer) == [2]


async def test_a_draw_of_before_a_restore_is_not_undone(shared_url: str) -> None:
    """Its groups are what the restore has made of them."""
    async with build(shared_url) as buffer:
        await fill(buffer, 2)
        await buffer.checkpoint(1)
        await fill(buffer, 2, 10)
        undo = await take(buffer, 4)
        await buffer.restore(1)
        before = state_of(buffer)
        await undo()
        assert state_of(buffer) == before
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
        for _ in range(20):
            await buffer.restore(1)
        stop.set()
        await asyncio.gather(*tasks)


async def test_more_checkpoints_at_once_than_there_are_connections(shared_url: str) -> None:
    """None of them keeps the connection that another one needs."""
    async with build(shared_url, keep_checkpoints=None) as buffer:
        await fill(buffer, 2)
        await asyncio.gather(*(buffer.checkpoint(step) for step in range(40)), take_all(buffer))
        assert len(await buffer.checkpoints()) == 40


async def test_an_undone_draw_is_undone_in_the_checkpoint_that_took_the_place_of_another(shared_url: str) -> None:
    """Also where that has got the same number in the database."""
    async with build(shared_url) as buffer:
        await fill(buffer, 4)
        await buffer.checkpoint(1)
        before = state_of(buffer)
        undo = await take(buffer, 2)
        await buffer.drop_checkpoint(1)
        await buffer.checkpoint(1)
        await undo()
        await buffer.restore(1)
        assert state_of(buffer) == before


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

        drawn = await go_on()
        await buffer.restore(1)
        assert await go_on() == drawn
