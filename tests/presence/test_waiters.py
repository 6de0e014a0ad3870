"""Who waits for a buffer, for what and why, as other processes see it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from replaybuf import FullError, NotReadyError
from replaybuf.produce import wait_published
from replaybuf.rules.needs import Reason
from tests.presence.views import list_waiters, seen, waits_of
from tests.stores import TASK, build, fill, group, until


async def test_waits_are_shown_while_they_last(shared_url: str, quick: None) -> None:
    """For groups, for room, and for the trainer; each with what it goes by."""
    options: dict[str, Any] = {"capacity": 2, "on_full": "block", "min_size": 2, "worker": "me"}
    async with build(shared_url, **options) as buffer:
        await fill(buffer, 2)
        begun = time.time()
        tasks = [
            asyncio.create_task(buffer.take_batch({TASK: 2}, where={"reward": {"$lt": 0.5}}, timeout=60)),
            asyncio.create_task(buffer.put(group(3), TASK)),
            asyncio.create_task(buffer.put(group(4), TASK)),
            asyncio.create_task(wait_published(buffer, timeout=None)),
        ]

        async def all_shown() -> bool:
            return len(await waits_of(shared_url)) == 3

        await until(all_shown)
        waits = {one.kind: one for one in await waits_of(shared_url)}
        groups, room, trainer = waits["groups"], waits["room"], waits["trainer"]
        assert groups.wants == {TASK: 2}
        assert groups.query == '{"reward": {"$lt": 0.5}}'
        assert groups.deadline is not None
        assert 59 < groups.deadline.timestamp() - groups.since.timestamp() < 61
        assert abs(groups.since.timestamp() - begun) < 5
        assert "none matches" in groups.reason
        assert room.wants == {TASK: 2}
        assert "the capacity is 2" in room.reason
        assert trainer.deadline is None
        assert {one.worker for one in waits.values()} == {"me"}
        assert groups.limits == {"capacity": 2, "on_full": "block", "min_size": 2}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

        async def none_shown() -> bool:
            return not await seen(shared_url, list_waiters, live=False)

        await until(none_shown)


async def test_a_reason_is_kept_up_to_date(shared_url: str, quick: None) -> None:
    async with build(shared_url) as buffer, build(shared_url) as other:
        waiting = asyncio.create_task(buffer.take_batch({TASK: 3}, timeout=60))
        for there in range(3):

            async def says_so(there: int = there) -> bool:
                return any(f"({there} of 3)" in one.reason for one in await waits_of(shared_url))

            await until(says_so)
            await other.put(group(there), TASK)
        async with asyncio.timeout(10):
            await waiting


async def test_who_waits_for_each_other_in_one_process_is_told_so(quick: None) -> None:
    """Whatever the store: here, one in memory."""
    async with build("memory://", capacity=2, on_full="block") as buffer:
        await fill(buffer, 2)
        drawing = asyncio.create_task(buffer.take_batch({TASK: 1}, where={"reward": {"$lt": 0.5}}, timeout=60))
        await asyncio.sleep(0.2)
        with pytest.raises(FullError, match="waits itself for 1 completed group"):
            await buffer.put(group(3), TASK, timeout=0.1)
        drawing.cancel()


async def test_a_short_wait_tells_nobody(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with build(shared_url) as buffer:
        monkeypatch.setattr(buffer.storage, "announce", lambda _: pytest.fail("it was announced"))
        with pytest.raises(NotReadyError):
            await buffer.take_batch({TASK: 1}, timeout=0.3)


async def test_errors_and_why_have_the_reason(shared_url: str) -> None:
    """A sentence, and then the numbers. Nothing is taken by asking."""
    async with build(shared_url, capacity=3, on_full="block") as buffer:
        await fill(buffer, 3)
        assert (await buffer.why({TASK: 3})).reason == Reason.READY
        assert (await buffer.why({TASK: 3}, where={"reward": {"$lt": 0}})).reason == Reason.NO_MATCH
        with pytest.raises(
            NotReadyError,
            match=r"^after 0.1 s: Nothing is ready for code .*; task code: 0 completed groups there, 1 needed;",
        ) as none:
            await buffer.take_batch({"code": 1}, timeout=0.1)
        assert none.value.diagnosis.reason == Reason.NO_SUCH_TASK
        with pytest.raises(FullError, match=r"^after 0.1 s: No room for math: .* the capacity is 3; .*") as full:
            await buffer.put(group(4), TASK, timeout=0.1)
        assert full.value.diagnosis.reason == Reason.HELD_BACK
        assert await buffer.count(TASK, "completed") == 3
