"""Laws of taking: get and take_batch, counting, and concurrent takers."""

from __future__ import annotations

import asyncio

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.rules.policies import OrderTerm, ReplayPolicy
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import Draw
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import SOON, Harness, OpenBuffer, found, group, ids, new_group


class BestFirst(ReplayPolicy):
    """A policy of a user: highest reward first."""

    name = "best_first"
    order = (OrderTerm("reward", descending=True), OrderTerm("timestamp_id"))


async def put_steps(buffer: ReplayBuffer, *steps: int | None, train_step: int = 20) -> None:
    """Put groups 0, 1, ... with these model steps."""
    for i, step in enumerate(steps):
        await buffer.put(group(i), "math", model_step=step, current_train_step=train_step)


class TakingLaws(Harness):
    """Taking removes groups, in the policy's order, for one taker each."""

    async def test_get_takes_the_oldest_first(self, buffer: ReplayBuffer) -> None:
        """With `fifo` groups come in insertion order, and leave the buffer."""
        for i in range(5):
            await buffer.put(group(i), "math")
        assert ids(await buffer.get(2, "math")) == [0, 1]
        assert ids(await buffer.get(10, "math")) == [2, 3, 4]
        assert len(buffer) == 0

    async def test_staleness_takes_the_most_stale_first(self, open_buffer: OpenBuffer) -> None:
        """With `staleness`: those of the oldest weights first, without model steps last, then oldest."""
        buffer = await open_buffer("staleness")
        await put_steps(buffer, 7, 3, None, 7, 1, 21)
        assert ids(await buffer.get(10, "math")) == [4, 1, 0, 3, 5, 2]

    async def test_staleness_orders_after_a_refresh(self, open_buffer: OpenBuffer) -> None:
        """The order doesn't depend on the staleness that groups brought, which a refresh replaces."""
        buffer = await open_buffer("staleness")
        await buffer.put(group(0, seq_staleness=50, response_model_steps=[9]), "math")
        await buffer.put(group(1, seq_staleness=-7, response_model_steps=[2]), "math")
        await buffer.put(group(2, seq_staleness=9), "math")
        await buffer.put(group(3), "math", model_step=5, current_train_step=20)
        assert [item.staleness for item in await found(buffer, order_by="-staleness")] == [50, 14, 9, -7]
        await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=12)
        assert ids(await buffer.get(10, "math")) == [1, 3, 0, 2]

    async def test_a_policy_of_ones_own(self, open_buffer: OpenBuffer) -> None:
        """Any order of fields works; groups without a value come last."""
        buffer = await open_buffer(BestFirst())
        for i, reward in enumerate((0.5, None, 1.0, 0.5)):
            await buffer.put(group(i, reward=reward), "math")
        assert ids(await buffer.get(10, "math")) == [2, 0, 3, 1]

    async def test_get_takes_of_one_task_and_status(self, buffer: ReplayBuffer) -> None:
        """Tasks and statuses don't mix."""
        await buffer.put(group(1), "math")
        await buffer.put(group(2), "code")
        await buffer.put(group(3, status=Status.ABORTED), "math")
        assert ids(await buffer.get(9, "math")) == [1]
        assert ids(await buffer.get(9, "math", "aborted")) == [3]
        assert await buffer.get(9, "none such") == []
        assert len(buffer) == 1

    async def test_a_size_of_nothing_gives_nothing(self, buffer: ReplayBuffer) -> None:
        """0 is an empty batch, whatever the buffer holds; less is a mistake."""
        size = 0
        await buffer.put(group(1), "math")
        assert await buffer.get(size, "math") == []
        assert await buffer.take_batch({"math": size}) == ({"math": []}, {"math": 0})
        with pytest.raises(InputError):
            await buffer.take_batch({"math": -3})
        assert len(buffer) == 1

    async def test_take_batch_without_timeout_takes_what_is_there(self, buffer: ReplayBuffer) -> None:
        """Up to the sizes, of each task; the counts say how many."""
        for i in range(3):
            await buffer.put(group(i), "math")
        await buffer.put(group(9), "code")
        batch, counts = await buffer.take_batch({"math": 2, "code": 5, "none": 1})
        assert {task: ids(groups) for task, groups in batch.items()} == {"math": [0, 1], "code": [9], "none": []}
        assert counts == {"math": 2, "code": 1, "none": 0}
        assert len(buffer) == 1

    async def test_a_take_of_enough_or_nothing(self, storage: SQLStorage) -> None:
        """On the backend itself: None and nothing taken unless every task has at least as many as it has to."""
        for i in range(2):
            await storage.put(new_group(i))
        await storage.put(new_group(8, task="code"))
        for least in ({"code": 1, "math": 3}, {"code": 2, "math": 0}, {"code": 2}):
            assert await storage.take(Draw({"code": 2, "math": 3}, at_least=least)) is None
        assert len(storage) == 3
        taken = await storage.take(Draw({"code": 2, "math": 3}, at_least={"code": 1, "math": 2}))
        assert taken is not None
        assert {task: ids([item.item for item in items]) for task, items in taken.items()} == {
            "code": [8],
            "math": [0, 1],
        }
        assert len(storage) == 0

    async def test_a_group_goes_to_one_thread(self, buffer: ReplayBuffer) -> None:
        """Threads, each with an event loop of its own, put and take at the same time: every group arrives once."""

        async def put(first: int) -> None:
            for i in range(first, first + 25):
                await buffer.put(group(i), "math")

        async def take() -> list[int]:
            received: list[int] = []
            while len(received) < 50:
                batch, _ = await buffer.take_batch({"math": 5}, timeout=SOON)
                received += ids(batch["math"])
            return received

        threads = [asyncio.to_thread(asyncio.run, work) for work in (put(0), put(25), put(50), put(75), take(), take())]
        *_, one, other = await asyncio.gather(*threads)
        assert sorted([*one, *other]) == list(range(100))  # type: ignore[misc]


class CountingLaws(Harness):
    """Counts are right at any time, inside and outside of an event loop."""

    async def test_count_is_of_a_task_and_status(self, buffer: ReplayBuffer) -> None:
        """`count` takes a Status or its value, and unknown ones are refused."""
        for status in ("completed", "completed", "failed"):
            await buffer.put(group(1, status=Status(status)), "math")
        assert await buffer.count("math", "completed") == 2
        assert await buffer.count("math", Status.FAILED) == 1
        assert await buffer.count("code", Status.FAILED) == 0
        with pytest.raises(InputError, match="unknown status"):
            await buffer.count("math", "done")

    async def test_count_statuses_has_every_pair_asked_for(self, buffer: ReplayBuffer) -> None:
        """A zero where there is none."""
        await buffer.put(group(1), "math")
        counts = await buffer.count_statuses(["math", "code"], ["completed", Status.FAILED])
        assert [type(status) for status in counts["math"]] == [str, Status]  # as they were given
        none = {Status.COMPLETED: 0, Status.FAILED: 0}
        assert counts == {"math": none | {Status.COMPLETED: 1}, "code": none}

    async def test_is_ready_wants_every_task(self, buffer: ReplayBuffer) -> None:
        """True as soon as each task has as many groups of the status."""
        await buffer.put(group(1), "math")
        assert await buffer.is_ready({"math": 1})
        assert await buffer.is_ready({})
        assert await buffer.is_ready({"math": 1, "code": 0})
        assert not await buffer.is_ready({"math": 1, "code": 1})
        assert not await buffer.is_ready({"math": 2})
        assert not await buffer.is_ready({"math": 1}, "failed")

    async def test_len_counts_everything_inside_a_running_loop(self, buffer: ReplayBuffer) -> None:
        """All tasks and statuses."""
        assert len(buffer) == 0
        await buffer.put(group(1), "math")
        await buffer.put(group(2, status=Status.FAILED), "code")
        assert len(buffer) == 2

    async def test_len_counts_outside_of_the_loop(self, buffer: ReplayBuffer) -> None:
        """From a thread without an event loop."""
        await buffer.put(group(1), "math")
        assert await asyncio.to_thread(len, buffer) == 1

    async def test_count_stops_at_a_limit(self, storage: SQLStorage) -> None:
        """On the backend itself: `at_most` bounds what is counted."""
        from replaybuf.rules.query import parse

        for i in range(3):
            await storage.put(new_group(i))
        assert [await storage.count(parse({}), at_most=n) for n in (0, 2, 3, 9, None)] == [0, 2, 3, 3, 3]
