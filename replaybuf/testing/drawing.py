"""Laws that all draws share: the status, the query and the timeout mean the same for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError, NotReadyError
from replaybuf.rollouts.rollout import Status
from replaybuf.testing.harness import SOON, Harness, fill, group, ids

#: Each way to draw: the ids of the groups of the task "math" that it gives.
Way = Callable[..., Coroutine[Any, Any, list[int]]]


async def by_get(buffer: ReplayBuffer, size: int, **options: Any) -> list[int]:
    return ids(await buffer.get(size, "math", **options))


async def by_take_batch(buffer: ReplayBuffer, size: int, **options: Any) -> list[int]:
    batch, counts = await buffer.take_batch({"math": size}, **options)
    assert counts == {"math": len(batch["math"])}
    return ids(batch["math"])


async def by_sample(buffer: ReplayBuffer, size: int, **options: Any) -> list[int]:
    return ids([item.item for item in (await buffer.sample({"math": size}, **options))["math"]])


WAYS: dict[str, Way] = {"get": by_get, "take_batch": by_take_batch, "sample": by_sample}


class DrawingLaws(Harness):
    """`get`, `take_batch` and `sample` take the same keywords."""

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_draw_is_narrowed_by_status_and_query(self, buffer: ReplayBuffer, way: str) -> None:
        """Others stay."""
        await fill(buffer, 3)
        for number in (7, 8):
            await buffer.put(group(number, status=Status.FAILED), "math", priority=number)
        assert await WAYS[way](buffer, 9, where={"uid": {"$gt": 1}}) == [1, 2]
        assert await WAYS[way](buffer, 9, group_status="failed", where={"priority": 8}) == [8]
        assert await WAYS[way](buffer, 9, group_status="failed") == [7]

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_draw_waits_until_all_is_there(self, buffer: ReplayBuffer, way: str) -> None:
        """With a timeout it takes as many as it was asked for, of those that match."""
        await fill(buffer, 2)
        drawing = asyncio.create_task(WAYS[way](buffer, 2, where={"priority": 2.0}, timeout=SOON))
        for number in (5, 6):
            await buffer.put(group(number), "math", priority=2.0)
        assert await drawing == [5, 6]
        assert await WAYS[way](buffer, 9) == [0, 1]

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_draw_that_waited_for_nothing_takes_nothing(self, buffer: ReplayBuffer, way: str) -> None:
        """NotReadyError says what is missing."""
        await fill(buffer, 2)
        with pytest.raises(NotReadyError, match="task math: 2 of 3 completed groups"):
            await WAYS[way](buffer, 3, timeout=0.01)
        assert await WAYS[way](buffer, 9) == [0, 1]

    @pytest.mark.parametrize("way", WAYS)
    async def test_archived_groups_are_never_drawn(self, buffer: ReplayBuffer, way: str) -> None:
        """InputError says how they are read."""
        with pytest.raises(InputError, match="find"):
            await WAYS[way](buffer, 1, group_status="archived")

    async def test_readiness_can_be_narrowed(self, buffer: ReplayBuffer) -> None:
        """As a draw would be."""
        await fill(buffer, 2)
        await buffer.put(group(5), "math", priority=2.0)
        assert await buffer.is_ready({"math": 1}, where={"priority": 2.0})
        assert not await buffer.is_ready({"math": 2}, where={"priority": 2.0})
        await buffer.wait_ready({"math": 1}, where={"priority": 2.0}, timeout=0)
        with pytest.raises(NotReadyError):
            await buffer.wait_ready({"math": 2}, where={"priority": 2.0}, timeout=0)
