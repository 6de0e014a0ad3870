"""Checkpoints that are made in pieces on SQLite: what is in them, and what others may do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update

from replaybuf import FencedError, ReplayBuffer, Status
from replaybuf.doctor import CheckContext, Severity
from replaybuf.doctor.examine import examine
from replaybuf.errors import LockedError
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.schema.tables import checkpoint
from replaybuf.storage.sql.statements.buffer_facts import MAKER_SILENT_SECONDS
from replaybuf.storage.sql.tasks import incremental_checkpoint as making
from replaybuf.storage.sql.tasks.incremental_checkpoint import IncrementalCheckpoint
from tests.cancellation.ways import take
from tests.contract.checkpointing import go_on, state_of
from tests.contract.leasing import LONG
from tests.contract.persistence import fill as fill_with_everything
from tests.storage.test_checkpoints import swept
from tests.stores import TASK, build, fill, group, take_all


class Held:
    """A maker that stops after its second piece, until it is let go."""

    def __init__(self) -> None:
        self.stopped, self.let_go = threading.Event(), threading.Event()
        self.armed = False
        self.pieces = 0

    async def pause(self, _seconds: float) -> None:
        self.pieces += 1
        if self.armed:
            self.armed = False
            self.stopped.set()
            assert await asyncio.to_thread(self.let_go.wait, 10)

    @asynccontextmanager
    async def making(self, buffer: ReplayBuffer, step: int = 1) -> AsyncIterator[asyncio.Task[Any]]:
        """A checkpoint that is being made within the block, and goes on after it."""
        self.stopped.clear()
        self.let_go.clear()
        self.armed, self.pieces = True, 0
        task = asyncio.create_task(buffer.checkpoint(step))
        assert await asyncio.to_thread(self.stopped.wait, 10)
        try:
            yield task
        finally:
            self.let_go.set()
            await asyncio.wait([task])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Pieces of two groups, and makers that stop in the middle."""
    held = Held()
    for name in ("FIRST", "FEWEST", "MOST"):
        monkeypatch.setattr(making, name, 2)
    monkeypatch.setattr(IncrementalCheckpoint, "_pause", lambda _, seconds: held.pause(seconds))
    yield held
    held.let_go.set()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "sqlite:///:memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/run.db"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/run.db"


async def in_database(buffer: ReplayBuffer, function: Callable[[Any], Any]) -> Any:
    store = buffer.storage
    return await store.thread.run(lambda: store.transactions.write(function))


async def test_it_is_what_was_when_it_was_begun(url: str, held: Held) -> None:
    """Whatever is put, drawn, changed, refreshed and deleted before it is whole; nobody sees it before that."""
    async with build(url, policy="prioritized", seed=1) as buffer:
        await fill_with_everything(buffer)
        before = state_of(buffer)
        async with held.making(buffer, 8) as task:
            await go_on(buffer)
            assert await buffer.checkpoints() == []
        made = await task
        assert held.pieces >= 2
        after = state_of(buffer)
        await buffer.restore(8)
        assert state_of(buffer) == before != after
        assert [made] == await buffer.checkpoints()
        assert made.groups == len(before["storage"]["groups"])


async def test_it_replaces_the_older_one_of_its_step_when_it_is_whole(url: str, held: Held) -> None:
    async with build(url, keep_checkpoints=1) as buffer:
        await fill(buffer, 2)
        older = await buffer.checkpoint(1)
        await fill(buffer, 8, 10)
        async with held.making(buffer) as task:
            assert await buffer.checkpoints() == [older]
        assert await buffer.checkpoints() == [await task]
        assert await swept(buffer) == (10, 0, 10)


async def test_payloads_stay_for_it(url: str, held: Held) -> None:
    """Of groups that are taken and swept before it has come to them."""
    async with build(url) as buffer:
        await fill(buffer, 9)
        async with held.making(buffer):
            await take_all(buffer)
            assert (await swept(buffer))[0] == 9
        await buffer.restore(1)
        assert await take_all(buffer) == list(range(9))


@pytest.mark.parametrize("options", [{}, {"max_times_sampled": 3}, {"archive": 10}])
@pytest.mark.parametrize("drawn", ["before", "meanwhile", "both"])
async def test_a_draw_that_is_undone_is_undone_in_it(
    file_url: str, held: Held, options: dict[str, Any], drawn: str
) -> None:
    """While it is made, of groups that it has already and others; and when it is whole."""
    async with build(file_url, **options) as buffer:
        await fill(buffer, 8)
        before = state_of(buffer)
        undo: list[Callable[[], Awaitable[None]]] = []
        if drawn != "meanwhile":
            undo.append(await take(buffer, 3))
        async with held.making(buffer) as task:
            if drawn != "before":
                undo.append(await take(buffer, 5))
            for one in reversed(undo):
                await one()
        assert state_of(buffer) == before
        assert (await task).groups == (await buffer.restore(1)).groups == 8
        assert state_of(buffer) == before


async def test_a_restore_that_keeps_new_groups_knows_what_they_replaced_meanwhile(url: str, held: Held) -> None:
    """Neither prompts that were copied before nor those after it come back beside their results."""
    async with build(url) as buffer:
        for number in range(6):
            await buffer.put(group(number, status=Status.INIT), TASK)
        lease = await buffer.lease_batch({TASK: 6}, group_status="init", seconds=LONG, heartbeat=False)
        async with held.making(buffer):
            for place, uid in enumerate(sorted(lease.open)):
                await lease.finish(group(10 + place), TASK, replaces=[uid])
        await buffer.restore(1, keep_new=True)
        assert sorted(await take_all(buffer)) == list(range(10, 16))
        assert len(buffer) == 0


async def test_who_is_cancelled_leaves_nothing_behind(url: str, held: Held) -> None:
    """Others go on at once."""
    async with build(url) as buffer:
        await fill(buffer, 9)
        async with held.making(buffer) as task:
            task.cancel()
            await asyncio.wait([task])
        await buffer.put(group(9), TASK)
        assert task.cancelled()
        assert held.pieces == 1
        assert await swept(buffer) == (10, 0, 0)
        assert await triggers(buffer) == []
        assert (await buffer.checkpoint(2)).groups == 10


async def triggers(buffer: ReplayBuffer) -> list[str]:
    names = text("SELECT name FROM sqlite_master WHERE type = 'trigger'")
    return list(await in_database(buffer, lambda tx: tx.execute(names).scalars()))


async def test_who_was_fenced_off_meanwhile_leaves_nothing_behind(file_url: str, held: Held) -> None:
    async with build(file_url) as buffer, build(file_url) as other:
        await fill(buffer, 2)
        await buffer.checkpoint(0)
        await fill(buffer, 7, 10)
        async with held.making(buffer) as task:
            await other.restore(0)
        with pytest.raises(FencedError):
            task.result()
        assert await swept(other) == (2, 0, 2)
        assert await triggers(other) == []


async def test_after_a_restore_of_its_own_process_it_is_made_anew(url: str, held: Held) -> None:
    async with build(url) as buffer:
        await fill(buffer, 5)
        await buffer.checkpoint(0)
        await take_all(buffer)
        await fill(buffer, 9, 10)
        async with held.making(buffer) as task:
            await buffer.restore(0)
        assert (await task).groups == 5


async def test_who_makes_one_at_the_same_time_waits(file_url: str, held: Held) -> None:
    """And hears of it after the lock timeout; also for another buffer. Writers don't wait."""
    async with build(file_url) as buffer, build(file_url, name="other", lock_timeout=0.2) as other:
        await fill(buffer, 9)
        await fill(other, 3)
        async with held.making(buffer) as task:
            with pytest.raises(LockedError, match=r"somebody else .* more than 0\.2 s"):
                await other.checkpoint(1)
            await other.put(group(9), TASK)
        await task
        assert (await other.checkpoint(1)).groups == 4


async def test_one_whose_maker_is_gone_is_dropped(file_url: str, held: Held) -> None:
    """By the sweep, or by who makes the next one; if the maker comes back, it begins anew."""
    async with build(file_url) as buffer, build(file_url) as other:
        await fill(buffer, 9)
        async with held.making(buffer) as task:
            look = CheckContext(file_url, Path(file_url.removeprefix("sqlite:///")))
            assert Severity.PROBLEM not in [found.level for found in examine(open_reader(file_url), look)]
            assert await in_database(other, _silence) == 1
            assert (await swept(other))[2] == 0
            assert await triggers(other) == []
            await other.get(1, TASK)
        assert (await task).groups == 8
        async with held.making(buffer, 2) as task:
            await in_database(other, _silence)
            assert (await other.checkpoint(3)).groups == 8
        assert (await task).groups == 8
        assert [made.step for made in await buffer.checkpoints()] == [1, 3, 2]


def _silence(tx: Any) -> int:
    """Let the maker have been silent for too long; return how many there are."""
    made = checkpoint.c.copied_to.is_not(None)
    later = checkpoint.c.created_at - MAKER_SILENT_SECONDS - 1
    tx.execute(update(checkpoint).where(made).values(created_at=later))
    return len(tx.execute(select(checkpoint.c.id).where(made)).all())
