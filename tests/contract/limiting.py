"""Laws of rates: min_size, and samples_per_insert with its error buffer."""

from __future__ import annotations

import asyncio

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import FullError, InputError, NotReadyError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.filling import waits_for_room
from tests.contract.harness import SOON, Harness, OpenBuffer, drawn, fill, found, group


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

    async def test_nothing_is_drawn_below_min_size(self, open_buffer: OpenBuffer) -> None:
        """From then on, all that is asked for; other statuses are not held back."""
        buffer = await open_buffer(min_size=3)
        await fill(buffer, 2)
        await buffer.put(group(9, status=Status.ABORTED), "math")
        assert await buffer.get(9, "math") == []
        assert not await buffer.is_ready({"math": 1})
        assert len(await buffer.get(1, "math", "aborted")) == 1
        await fill(buffer, 1)
        assert await buffer.is_ready({"math": 3})
        assert len(await buffer.get(9, "math")) == 3

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
        with pytest.raises(
            FullError, match="2 completed groups were put and 0 times one was drawn, and samples_per_insert 2"
        ):
            await buffer.put(group(9), "math", timeout=0.05)
        [task] = await waits_for_room(buffer, buffer.put(group(3), "math", timeout=None))
        await drawn(buffer, 2)
        await asyncio.wait_for(task, SOON)
        assert await put_all(buffer) == 0

    async def test_the_error_stays_in_its_range(self, open_buffer: OpenBuffer) -> None:
        """An error buffer of two numbers is the range of puts * samples_per_insert - draws, whatever min_size is."""
        buffer = await open_buffer(max_times_sampled=0, samples_per_insert=2, min_size=2, error_buffer=(-1, 6))
        assert await put_all(buffer) == 3
        assert [len(await drawn(buffer, 2)) for _ in range(5)] == [2, 2, 2, 1, 0]
        with pytest.raises(NotReadyError, match="allows 0 now: 3 were put and 7 drawn"):
            await buffer.take_batch({"math": 1}, timeout=0.01)
        assert await put_all(buffer) == 3
        with pytest.raises(FullError, match=r"samples_per_insert 2 with error_buffer \(-1, 6\) allows no more"):
            await buffer.put(group(9), "math", timeout=0)
        with pytest.raises(InputError, match="widen error_buffer"):
            await buffer.take_batch({"math": 9}, timeout=1)

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

    @pytest.mark.parametrize(
        ("how", "times"), [("delete", 1), ("expire", 2), ("drop", 0), ("update", 2), ("replace", 1), ("replace", 0)]
    )
    async def test_lost_groups_bring_nothing_to_a_stop(self, open_buffer: OpenBuffer, how: str, times: int) -> None:
        """Groups lost before or after they were drawn are put again, and batches go on coming."""
        buffer = await open_buffer(
            max_times_sampled=times, samples_per_insert=times or 4, min_size=2, put_timeout=0, error_buffer=8
        )
        most = await put_all(buffer)
        largest = buffer.storage.rules.limits.largest_batch
        assert largest is not None
        size = min(largest, most)
        for round_number in range(4):
            await drawn(buffer, round_number % 2)
            await self._lose_all(buffer, how)
            await put_all(buffer)
            assert len(await drawn(buffer, size)) == size

    async def _lose_all(self, buffer: ReplayBuffer, how: str) -> None:
        if how == "delete":
            await buffer.delete({})
        elif how == "update":
            await buffer.update({}, status="filtered")
        elif how == "replace":
            there = [item.uid for item in await found(buffer)]
            await buffer.put(group(1, status=Status.ABORTED), "math", replaces=there)
        else:
            retryable = {"math": how == "expire"}
            await buffer.refresh_staleness(
                task_stale_thresholds={"math": 1}, expired_groups_retryable_by_task=retryable, current_train_step=9
            )

    async def test_evictions_bring_nothing_to_a_stop(self, open_buffer: OpenBuffer) -> None:
        """Neither puts nor draws, at any ratio."""
        for times, ratio in ((1, 0.5), (2, 2), (0, 3)):
            buffer = await open_buffer(max_times_sampled=times, samples_per_insert=ratio, capacity=4, min_size=2)
            for _ in range(6):
                for number in range(9):
                    try:
                        await buffer.put(group(number), "math", timeout=0)
                    except FullError:
                        break
                assert len(await drawn(buffer, 2)) == 2, (times, ratio)

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

    async def test_a_lease_given_back_is_no_draw(self, open_buffer: OpenBuffer) -> None:
        """The rate counts draws that stand."""
        buffer = await open_buffer(max_times_sampled=0, samples_per_insert=1, error_buffer=2)
        assert await put_all(buffer) == 2
        lease = await buffer.lease_batch({"math": 2}, seconds=600, heartbeat=False)
        await lease.give_back()
        assert await put_all(buffer) == 0
        assert len(await drawn(buffer, 2)) == 2

    async def test_limits_are_the_configs_not_the_snapshots(self, open_buffer: OpenBuffer) -> None:
        """Reverb's checkpoints bring the old limits back silently, and inserts hang."""
        buffer = await open_buffer(capacity=2, on_full="block", min_size=2)
        fresh = await open_buffer(capacity=4, on_full="reject", max_times_sampled=2)
        await fill(buffer, 2)
        fresh.load_state_dict(buffer.state_dict())
        await fill(fresh, 2)
        with pytest.raises(FullError, match="the capacity is 4"):
            await fresh.put(group(9), "math")
        assert [len(await drawn(fresh, 4)) for _ in range(3)] == [4, 4, 0]
