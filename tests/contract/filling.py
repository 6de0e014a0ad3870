"""Laws of full buffers, evictions and rates."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import FullError, InputError, NotReadyError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import SOON, Harness, OpenBuffer, drawn, fill, found, group, ids, total
from tests.reference.snapshots import load_snapshot, snapshot_of
from tests.stores import until


async def numbers(buffer: ReplayBuffer, query: Any = None) -> list[int]:
    """Return the numbers of the groups in the buffer, in insertion order."""
    return ids([item.item for item in await found(buffer, query)])


async def waits_for_room(buffer: ReplayBuffer, *puts: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Start puts as tasks, each waiting in line before the next one begins."""
    tasks = []
    for waiting_put in puts:
        before = _in_line(buffer)
        task = asyncio.create_task(waiting_put)
        await until(lambda: task.done() or _in_line(buffer) > before, SOON)  # noqa: B023
        assert not task.done()
        tasks.append(task)
    return tasks


def _in_line(buffer: ReplayBuffer) -> int:
    """Return the number of puts of this event loop that wait for room."""
    lines = buffer.waits._queues.get(asyncio.get_running_loop(), {})
    return sum(line.waiting for line in lines.values())


class EvictionLaws(Harness):
    """With `on_full="evict"` a put makes room for itself."""

    @pytest.mark.parametrize("status", [Status.FILTERED, Status.FAILED])
    async def test_what_is_not_trained_on_takes_no_room(self, open_buffer: OpenBuffer, status: Status) -> None:
        """Whether put or updated: it evicts nothing, and nothing evicts it."""
        buffer = await open_buffer(capacity=4)
        await fill(buffer, 4)
        for number in range(4, 8):
            await buffer.put(group(number, status=status), "math")
        assert await numbers(buffer) == list(range(8))
        await buffer.update({"uid": (await found(buffer))[0].uid}, status=status)
        await fill(buffer, 2, first=8)
        assert await numbers(buffer, {"status": "completed"}) == [2, 3, 8, 9]
        assert await numbers(buffer, {"status": status.value}) == [0, 4, 5, 6, 7]
        assert await total(buffer, "evicted") == 1

    async def test_an_evicted_group_cannot_be_drawn(self, open_buffer: OpenBuffer) -> None:
        """Readers see it no more, and a batch above the capacity is refused, not waited for."""
        buffer = await open_buffer("uniform", capacity=3, max_times_sampled=0)
        uids = await fill(buffer, 5)
        assert sorted((await buffer.take_batch({"math": 9}))[1].values()) == [3]
        with pytest.raises(InputError, match="a batch of 4 groups of task math would wait for ever: the capacity is 3"):
            await buffer.take_batch({"math": 4}, timeout=None)
        assert await buffer.update_priorities(dict.fromkeys(uids, 2.0)) == 3


async def full(open_buffer: OpenBuffer, capacity: int = 1) -> ReplayBuffer:
    """Return a buffer without room, in which puts wait for it."""
    buffer = await open_buffer(capacity=capacity, on_full="block")
    await fill(buffer, capacity)
    return buffer


class FullLaws(Harness):
    """With `on_full="block"` a put waits for room; with "reject" it doesn't."""

    async def test_a_full_buffer_refuses_when_it_is_told_to(self, open_buffer: OpenBuffer) -> None:
        """FullError, which is a TimeoutError, says why; nothing is stored, and it is counted."""
        buffer = await open_buffer(capacity=2, on_full="reject")
        await fill(buffer, 2)
        with pytest.raises(
            FullError,
            match=r"the capacity is 2; nothing was stored\. Draw some, or raise the limit; with on_full='block'",
        ) as caught:
            await buffer.put(group(9), "math", timeout=SOON)
        assert isinstance(caught.value, TimeoutError)
        assert await numbers(buffer) == [0, 1]
        assert (await total(buffer, "refused"), await total(buffer, "put")) == (1, 2)
        assert await buffer.put(group(9), "code") is not None

    async def test_what_expires_makes_room(self, open_buffer: OpenBuffer) -> None:
        """Workers would otherwise wait for ever for groups to leave that only they take."""
        buffer = await open_buffer("staleness", capacity=2, on_full="block")
        for number in range(2):
            await buffer.put(group(number), "math", model_step=1, current_train_step=2)
        [task] = await waits_for_room(buffer, buffer.put(group(2), "math", timeout=None))
        await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=5)
        await asyncio.wait_for(task, SOON)
        for number in range(3, 9):
            await buffer.put(group(number, status=Status.ABORTED), "math", timeout=0)
        assert await buffer.count_statuses(["math"], ["completed", "expired", "aborted"]) == {
            "math": {"completed": 1, "expired": 2, "aborted": 6}
        }

    async def test_waiting_for_room_ends_at_its_timeout(self, open_buffer: OpenBuffer) -> None:
        """That of the put, or else of the buffer, with FullError that says why; nothing is stored."""
        buffer = await open_buffer(capacity=2, on_full="block", put_timeout=0.05)
        await fill(buffer, 2)
        reason = "math: 2 completed groups are buffered, and the capacity is 2"
        for options, after in (({"timeout": 0}, "task"), ({"timeout": 0.1}, "after 0.1 s"), ({}, "after 0.05 s")):
            with pytest.raises(FullError, match=f"^{after}.*{reason}"):
                await buffer.put(group(9), "math", **options)
        assert await numbers(buffer) == [0, 1]
        assert await total(buffer, "refused") == 3

    async def test_a_take_lets_the_next_put_in(self, open_buffer: OpenBuffer) -> None:
        """As soon as there is room, in the order in which the puts came."""
        buffer = await full(open_buffer, 2)
        tasks = await waits_for_room(buffer, *(buffer.put(group(n), "math", timeout=None) for n in (2, 3, 4)))
        for number in range(3):
            assert ids(await buffer.get(1, "math")) == [number]
            assert await asyncio.wait_for(tasks[number], SOON) is not None
        assert await numbers(buffer) == [3, 4]
        metrics = await buffer.metrics()
        assert metrics["waits"]["room"]["count"] == 3

    @pytest.mark.parametrize("how", ["delete", "lease", "update"])
    async def test_other_changes_make_room_too(self, open_buffer: OpenBuffer, how: str) -> None:
        """Deleted, leased and archived groups aren't in the buffer."""
        buffer = await full(open_buffer)
        [task] = await waits_for_room(buffer, buffer.put(group(1), "math"))
        if how == "delete":
            await buffer.delete({})
        elif how == "lease":
            lease = await buffer.lease_batch({"math": 1}, seconds=600, heartbeat=False)
            assert lease.counts == {"math": 1}
        else:
            await buffer.update({}, status="archived")
        await asyncio.wait_for(task, SOON)

    async def test_a_full_task_holds_up_no_other(self, open_buffer: OpenBuffer) -> None:
        """Puts of another task, or of another status while the rate is limited, go in while one waits."""
        buffer = await full(open_buffer)
        [task] = await waits_for_room(buffer, buffer.put(group(1), "math"))
        async with asyncio.timeout(SOON):
            await buffer.put(group(5), "code")
        assert not task.done()
        await buffer.take_batch({"math": 1, "code": 1}, timeout=SOON)
        await asyncio.wait_for(task, SOON)

    async def test_a_cancelled_wait_for_room_stores_nothing(self, open_buffer: OpenBuffer) -> None:
        """And the next in line gets in."""
        buffer = await full(open_buffer)
        first, second, third = await waits_for_room(
            buffer, *(buffer.put(group(n), "math", timeout=None) for n in (1, 2, 3))
        )
        for task in (first, third):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await buffer.get(1, "math")
        await asyncio.wait_for(second, SOON)
        assert await numbers(buffer) == [2]

    async def test_puts_and_takes_at_once_keep_to_the_capacity(self, open_buffer: OpenBuffer) -> None:
        """Many producers and consumers: every group arrives once, and there are never more than fit."""
        buffer = await open_buffer(capacity=3, on_full="block")
        received: list[int] = []
        highest = 0

        async def consume() -> None:
            nonlocal highest
            while len(received) < 40:
                highest = max(highest, len(buffer))
                try:
                    batch, _ = await buffer.take_batch({"math": 2}, timeout=0.2)
                except NotReadyError:
                    continue
                received.extend(ids(batch["math"]))

        async with asyncio.timeout(SOON * 3):
            puts = [buffer.put(group(number), "math", timeout=None) for number in range(40)]
            await asyncio.gather(*puts, consume(), consume())
        assert sorted(received) == list(range(40))
        assert highest <= 3


async def put_all(buffer: ReplayBuffer, task: str = "math") -> int:
    """Put groups until one is refused. Return the number stored."""
    for number in range(1000):
        try:
            await buffer.put(group(number, response_model_steps=[1, 1, 1]), task, timeout=0)
        except FullError:
            return number
    raise AssertionError("puts are not limited")


class RateLaws(Harness):
    """Draws wait for puts, and puts for draws."""

    async def test_min_size_is_of_each_task(self, open_buffer: OpenBuffer) -> None:
        """A batch of two tasks waits for both, and the error says what holds it back."""
        buffer = await open_buffer(min_size=2, max_times_sampled=0)
        await fill(buffer, 2)
        await fill(buffer, 1, "code")
        with pytest.raises(NotReadyError, match="task code: 1 completed group there, 1 needed, but min_size is 2"):
            await buffer.take_batch({"math": 1, "code": 1}, timeout=0.05)
        waits = asyncio.create_task(buffer.take_batch({"math": 1, "code": 1}, timeout=None))
        await fill(buffer, 1, "code")
        await asyncio.wait_for(waits, SOON)

    async def test_draws_wait_for_puts(self, open_buffer: OpenBuffer) -> None:
        """There are at most samples_per_insert draws for each put, plus the error buffer."""
        buffer = await open_buffer(max_times_sampled=0, samples_per_insert=2, error_buffer=3)
        await fill(buffer, 1)
        assert [len(await drawn(buffer)) for _ in range(7)] == [1, 1, 1, 1, 1, 0, 0]
        with pytest.raises(NotReadyError, match="samples_per_insert 2 allows 0 now: 1 were put and 5 drawn"):
            await buffer.take_batch({"math": 1}, timeout=0.05)
        waits = asyncio.create_task(buffer.take_batch({"math": 1}, timeout=None))
        await fill(buffer, 1)
        await asyncio.wait_for(waits, SOON)
        assert [len(await drawn(buffer)) for _ in range(2)] == [1, 0]

    async def test_puts_wait_for_draws(self, open_buffer: OpenBuffer) -> None:
        """Producers get as far ahead of the draws as the error buffer allows."""
        buffer = await open_buffer(max_times_sampled=0, samples_per_insert=2, error_buffer=4)
        assert await put_all(buffer) == 2
        with pytest.raises(FullError, match="2 completed groups were put and 0 drawn, and samples_per_insert 2"):
            await buffer.put(group(9), "math", timeout=0.05)
        [task] = await waits_for_room(buffer, buffer.put(group(3), "math", timeout=None))
        await drawn(buffer, 2)
        await asyncio.wait_for(task, SOON)
        assert await put_all(buffer) == 0

    async def test_other_statuses_are_not_held_back(self, open_buffer: OpenBuffer) -> None:
        """Only completed groups are drawn for training, and limited; also behind puts that wait."""
        buffer = await open_buffer(samples_per_insert=1)
        await put_all(buffer)
        [task] = await waits_for_room(buffer, buffer.put(group(1), "math", timeout=None))
        async with asyncio.timeout(SOON):
            for number in range(9):
                await buffer.put(group(number, status=Status.ABORTED), "math")
        assert not task.done()
        await buffer.get(1, "math")
        await asyncio.wait_for(task, SOON)

    async def test_batches_that_could_never_be_ready_are_refused(self, open_buffer: OpenBuffer) -> None:
        """InputError at once, not a wait for ever; without waiting, the groups that are there are taken."""
        buffer = await open_buffer(max_times_sampled=0, samples_per_insert=4, error_buffer=8)
        assert await put_all(buffer) == 2
        for call in (
            buffer.take_batch({"math": 3}, timeout=None),
            buffer.wait_ready({"math": 3}, timeout=None),
            buffer.sample({"math": 3}, timeout=SOON),
        ):
            with pytest.raises(InputError, match="a batch of 3 groups of task math would wait for ever"):
                await call
        assert len(await drawn(buffer, 3)) == 2

    async def test_limits_are_the_configs_not_the_snapshots(self, open_buffer: OpenBuffer) -> None:
        """Reverb's checkpoints bring the old limits back silently, and inserts hang."""
        buffer = await open_buffer(capacity=2, on_full="block", min_size=2)
        fresh = await open_buffer(capacity=4, on_full="reject", max_times_sampled=2)
        await fill(buffer, 2)
        load_snapshot(fresh, snapshot_of(buffer))
        await fill(fresh, 2)
        with pytest.raises(FullError, match="the capacity is 4"):
            await fresh.put(group(9), "math")
        assert [len(await drawn(fresh, 4)) for _ in range(3)] == [4, 4, 0]
