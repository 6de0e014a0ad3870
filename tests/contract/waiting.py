"""Laws of waiting, and of close."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import ClosedError, NotReadyError
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import CODEC, SOON, Harness, group, ids, new_group
from tests.stores import set_by


async def waiting(buffer: ReplayBuffer, wait: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task that runs `wait`, as soon as it waits for a change of the storage."""
    begun = asyncio.Event()
    original = buffer.storage.changed

    async def changed(timeout: float, since: int) -> None:
        begun.set()
        await original(timeout, since)

    buffer.storage.changed = changed  # type: ignore[method-assign]
    task = asyncio.create_task(wait)
    await set_by(begun, task, SOON)
    return task


class WaitingLaws(Harness):
    """wait_ready and take_batch with a timeout."""

    async def test_what_is_ready_is_not_waited_for(self, buffer: ReplayBuffer) -> None:
        """Also with a timeout of 0, and for nothing at all."""
        await buffer.put(group(1), "math")
        await buffer.wait_ready({"math": 1}, timeout=0)
        await buffer.wait_ready({}, timeout=0)
        await buffer.wait_ready({"code": 0}, timeout=None)

    async def test_a_put_wakes_those_who_wait(self, buffer: ReplayBuffer) -> None:
        """wait_ready returns soon after another task has put the last group."""
        await buffer.put(group(1), "math")
        task = await waiting(buffer, buffer.wait_ready({"math": 2, "code": 1}, timeout=None))
        await buffer.put(group(2), "math")
        assert not task.done()
        await buffer.put(group(3), "code")
        await asyncio.wait_for(task, SOON)

    async def test_a_put_from_another_thread_wakes(self, buffer: ReplayBuffer) -> None:
        """From an event loop of its own."""
        task = await waiting(buffer, buffer.take_batch({"math": 1}, timeout=None))
        thread = threading.Thread(target=lambda: asyncio.run(_put(buffer)))
        thread.start()
        batch, _ = await asyncio.wait_for(task, SOON)
        assert ids(batch["math"]) == [7]
        await asyncio.to_thread(thread.join)

    @pytest.mark.parametrize(
        "change",
        [
            lambda buffer: buffer.update({}, status="completed"),
            lambda buffer: buffer.put(group(2), "math", key="a"),
        ],
        ids=["update", "replace"],
    )
    async def test_other_changes_wake_too(
        self, buffer: ReplayBuffer, change: Callable[[ReplayBuffer], Coroutine[Any, Any, Any]]
    ) -> None:
        """A group may become ready without being put."""
        await buffer.put(group(1, status=Status.ABORTED), "math", key="a")
        task = await waiting(buffer, buffer.wait_ready({"math": 1}, timeout=None))
        await change(buffer)
        await asyncio.wait_for(task, SOON)

    async def test_a_group_set_aside_wakes(self, storage: SQLStorage) -> None:
        """Those who wait for FAILED groups see one that a take could not decode."""
        uid = await storage.put(new_group(1))
        await self.damage(storage, uid)
        buffer = ReplayBuffer(storage, CODEC.rollout_type)
        task = await waiting(buffer, buffer.wait_ready({"math": 1}, "failed", timeout=None))
        assert await buffer.get(1, "math") == []
        await asyncio.wait_for(task, SOON)

    async def test_waiting_ends_at_its_timeout(self, buffer: ReplayBuffer) -> None:
        """With an error that is a TimeoutError too and says what is missing."""
        await buffer.put(group(1), "math")
        begun = time.monotonic()
        with pytest.raises(
            NotReadyError,
            match=r"task code: 0 completed groups there, 1 needed.* ready for math \(1 of 2\)",
        ) as caught:
            await buffer.wait_ready({"math": 2, "code": 1}, timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert 0.05 <= time.monotonic() - begun < SOON

    async def test_take_batch_waits_for_all_tasks(self, buffer: ReplayBuffer) -> None:
        """It takes nothing until every task is ready, and then all at once."""
        await buffer.put(group(1), "math")
        task = await waiting(buffer, buffer.take_batch({"math": 2, "code": 1}, timeout=SOON))
        await buffer.put(group(2), "math")
        assert len(buffer) == 2
        await buffer.put(group(3), "code")
        batch, counts = await asyncio.wait_for(task, SOON)
        assert (ids(batch["math"]), ids(batch["code"]), counts) == ([1, 2], [3], {"math": 2, "code": 1})
        assert len(buffer) == 0

    async def test_those_who_wait_share_what_comes(self, buffer: ReplayBuffer) -> None:
        """Several waiting takers get whole batches, each group once."""
        tasks = [await waiting(buffer, buffer.take_batch({"math": 2}, timeout=SOON)) for _ in range(4)]
        await asyncio.gather(*(buffer.put(group(i), "math") for i in range(8)))
        batches = [batch["math"] for batch, _ in await asyncio.gather(*tasks)]
        assert sorted(i for batch in batches for i in ids(batch)) == list(range(8))

    async def test_changed_returns_by_its_timeout(self, storage: SQLStorage) -> None:
        """On the backend itself: without a change, `changed` returns at the timeout, without an error."""
        async with asyncio.timeout(SOON):
            await storage.changed(0.01, storage.version())
            waits = asyncio.create_task(storage.changed(SOON * 2, storage.version()))
            await asyncio.sleep(0)
            await storage.put(new_group(1))
            await waits


class ClosingLaws(Harness):
    """After close there is nothing but ClosedError."""

    async def test_close_can_be_called_again(self, buffer: ReplayBuffer) -> None:
        """By the buffer and on the backend itself; also when nothing was ever done."""
        await buffer.close()
        await buffer.close()
        await buffer.storage.close()

    async def test_a_buffer_is_closed_at_the_end_of_its_block(self, buffer: ReplayBuffer) -> None:
        """`async with` opens and closes."""
        async with buffer as same:
            assert same is buffer
            await buffer.put(group(1), "math")
        with pytest.raises(ClosedError):
            len(buffer)
        with pytest.raises(ClosedError):
            await buffer.__aenter__()

    async def test_everything_after_close_is_an_error(self, buffer: ReplayBuffer) -> None:
        """Every method, with a message that says what to do."""
        await buffer.put(group(1), "math")
        await buffer.close()
        calls: list[Callable[[], Any]] = [
            lambda: buffer.put(group(1), "math"),
            lambda: buffer.put([], "math"),
            lambda: buffer.get(1, "math"),
            lambda: buffer.get(0, "math"),
            lambda: buffer.take_batch({"math": 1}),
            lambda: buffer.take_batch({"math": 1}, timeout=None),
            lambda: buffer.sample({"math": 1}),
            lambda: buffer.lease_batch({"math": 1}),
            lambda: buffer.is_ready({"math": 1}),
            lambda: buffer.wait_ready({}, timeout=1),
            lambda: buffer.count("math", "completed"),
            lambda: buffer.count_statuses(["math"], ["completed"]),
            lambda: buffer.count_where({}),
            lambda: buffer.dropped("math"),
            lambda: buffer.find({}),
            lambda: buffer.delete({}),
            lambda: buffer.update({}, priority=1),
            lambda: buffer.update_priorities({}),
            lambda: buffer.metrics(),
            lambda: buffer.refresh_staleness(task_stale_thresholds={}, current_train_step=1),
            lambda: buffer.save("never"),
            lambda: buffer.resume("never"),
            buffer.state_dict,
            lambda: buffer.load_state_dict({}),
            lambda: len(buffer),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="build a new one"):
                await call()

    async def test_close_ends_those_who_wait(self, buffer: ReplayBuffer) -> None:
        """With ClosedError, however long they would have waited."""
        tasks = [
            await waiting(buffer, buffer.wait_ready({"math": 1}, timeout=None)),
            await waiting(buffer, buffer.take_batch({"math": 1}, timeout=SOON * 10)),
        ]
        await buffer.close()
        async with asyncio.timeout(SOON):
            for task in tasks:
                with pytest.raises(ClosedError):
                    await task


async def _put(buffer: ReplayBuffer) -> None:
    await buffer.put(group(7), "math")
