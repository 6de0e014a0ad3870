"""Waits that ended by their timeout."""

from __future__ import annotations

import asyncio
import re

import pytest

from replaybuf import FullError, NotReadyError
from replaybuf.buffer import wait_reports
from replaybuf.common.worker_name import working_as
from replaybuf.produce import wait_published
from replaybuf.rules.diagnosis import Reason
from replaybuf.rules.limits import Limits
from replaybuf.storage.sql.inspection.wait_facts import read_limits
from replaybuf.view.wait_reasons import DrawQuestion, read_waits
from tests.presence.conftest import list_events, seen, waits_of
from tests.scripts import run as run_script
from tests.stores import TASK, build, fill, group, until_equal


async def gave_up(url: str) -> list[tuple[str | None, str | None, int, str | None]]:
    """The waits that gave up, the last one first."""
    events = await seen(url, list_events, kind="gave_up")
    return [(event.worker, event.task_name, event.groups, event.detail) for event in events]


async def test_a_wait_that_gives_up_is_noted(shared_url: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for what it was, soon, or at the latest when the buffer is closed. Nothing else is one."""
    async with build(shared_url, capacity=2, on_full="block", worker="trainer-1") as buffer:
        await fill(buffer, 2)
        with pytest.raises(NotReadyError):
            await buffer.take_batch({TASK: 2}, where={"reward": {"$lt": 0}}, timeout=0.2)
        with working_as("gen-1"), pytest.raises(FullError):
            await buffer.put(group(3), TASK, timeout=0.2)

        async def gave_up_count() -> int:
            return len(await gave_up(shared_url))

        await until_equal(2, gave_up_count)
        cancelled = asyncio.create_task(buffer.take_batch({"code": 1}, timeout=60))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        with monkeypatch.context() as now:
            now.setattr(wait_reports, "SHOW_SECONDS", 60)
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


_DIES_OF_ITS_WAIT = """
async def main():
    buffer = ReplayBufferConfig(url=sys.argv[1], min_size=8, worker="trainer-1").build()
    for number in range(3):
        await buffer.put(group(number), "math")
    try:
        await buffer.take_batch({"math": 2}, timeout=1.2)
    except NotReadyError:
        os._exit(3)

asyncio.run(main())
"""


async def test_a_process_that_dies_of_its_wait_has_said_so_and_by_which_limits(shared_url: str) -> None:
    """Nothing is left to a beat or to the closing of the buffer: the error has killed it."""
    await asyncio.to_thread(run_script, _DIES_OF_ITS_WAIT, shared_url, expect=3)
    assert await waits_of(shared_url) == []
    [answer] = await seen(shared_url, read_waits, "default", DrawQuestion("math"))
    assert answer.last_timeout is not None
    assert (answer.last_timeout["worker"], answer.last_timeout["task_name"]) == ("trainer-1", "math")
    assert "(0 of 2): 3 completed groups are there, but min_size is 8. Wait for" in answer.last_timeout["detail"]
    [draw] = answer.waits
    assert (draw["limits"], draw["reason"]) == ({"min_size": 8}, Reason.HELD_BACK)


async def test_limits_are_those_of_who_drew_last(shared_url: str) -> None:
    """A producer with others doesn't change them."""
    async with build(shared_url, worker="trainer-1", min_size=2) as buffer:
        await fill(buffer, 3)
        await buffer.take_batch({TASK: 1})
    async with build(shared_url, worker="gen-1") as buffer:
        await fill(buffer, 1)
    assert await seen(shared_url, read_limits, "default") == Limits(min_size=2)
    async with build(shared_url, worker="trainer-1") as buffer:
        await buffer.take_batch({TASK: 1})
    assert await seen(shared_url, read_limits, "default") == Limits()
