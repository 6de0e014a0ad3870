"""Waits that ended by their timeout."""

from __future__ import annotations

import asyncio
import re

import pytest

from replaybuf import FullError, NotReadyError
from replaybuf.buffer import telling
from replaybuf.produce import wait_published
from replaybuf.storage.sql.inspection.gave_up import last_given_up
from replaybuf.worker_name import working_as
from tests.presence.views import list_events, seen
from tests.stores import TASK, build, fill, group, until


async def gave_up(url: str) -> list[tuple[str | None, str | None, int, str | None]]:
    """The waits that gave up, the last one first."""
    found = await seen(url, list_events, kind="gave_up")
    return [(one.worker, one.task_name, one.groups, one.detail) for one in found]


async def test_a_wait_that_gives_up_is_noted(shared_url: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for what it was, soon, or at the latest when the buffer is closed. Nothing else is one."""
    async with build(shared_url, capacity=2, on_full="block", worker="trainer-1") as buffer:
        await fill(buffer, 2)
        with pytest.raises(NotReadyError):
            await buffer.take_batch({TASK: 2}, where={"reward": {"$lt": 0}}, timeout=0.2)
        with working_as("gen-1"), pytest.raises(FullError):
            await buffer.put(group(3), TASK, timeout=0.2)

        async def both_told() -> bool:
            return len(await gave_up(shared_url)) == 2

        await until(both_told)
        cancelled = asyncio.create_task(buffer.take_batch({"code": 1}, timeout=60))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        with monkeypatch.context() as now:
            now.setattr(telling, "SHOW_SECONDS", 60)
            with pytest.raises(NotReadyError):
                await buffer.take_batch({"code": 1}, timeout=0.01)
        with working_as("gen-2"), pytest.raises(NotReadyError):
            await wait_published(buffer, timeout=0.2)
    trainer, room, groups = await gave_up(shared_url)
    assert groups[:3] == ("trainer-1", TASK, 2)
    assert groups[3] is not None
    assert re.match(r"after \ds of waiting for groups: Nothing is ready for math \(0 of 2\): ", groups[3])
    assert room[:3] == ("gen-1", TASK, 1)
    assert "of waiting for room: No room for math: 2 completed groups are buffered" in str(room[3])
    assert trainer[:3] == ("gen-2", None, 0)
    assert "of waiting for the trainer: " in str(trainer[3])
    assert "the trainer has published nothing yet" in str(trainer[3])


async def test_who_gives_up_again_and_again_leaves_one_event(shared_url: str, quick: None) -> None:
    async with build(shared_url, worker="me") as buffer:
        for _ in range(4):
            with pytest.raises(NotReadyError):
                await buffer.take_batch({TASK: 4}, timeout=0.1)
            await asyncio.sleep(0.1)
    assert len(await gave_up(shared_url)) == 1


async def test_who_gave_up_is_told_until_they_go_on(shared_url: str, quick: None) -> None:
    """A consumer until it draws, and a producer until it puts."""
    async with build(shared_url, capacity=2, on_full="block", worker="trainer-1") as buffer:
        await fill(buffer, 2)
        with working_as("gen-1"), pytest.raises(FullError):
            await buffer.put(group(3), TASK, timeout=0.2)
        with pytest.raises(NotReadyError):
            await buffer.take_batch({"code": 1}, timeout=0.2)

        async def last() -> str:
            found = await seen(shared_url, last_given_up, "default")
            return "" if found is None else found.worker

        async def trainer_told() -> bool:
            return await last() == "trainer-1"

        await until(trainer_told)
        assert await seen(shared_url, last_given_up, "default", "other") is None
        await buffer.take_batch({TASK: 1})
        assert await last() == "gen-1"
        with working_as("gen-1"):
            await buffer.put(group(3), TASK)
        assert await last() == ""
