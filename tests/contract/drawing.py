"""Laws that all draws share: the status, the query and the timeout mean the same for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import NotReadyError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import SOON, Harness, fill, group, ids

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
        with pytest.raises(NotReadyError, match="task math: 2 completed groups there, 3 needed"):
            await WAYS[way](buffer, 3, timeout=0.01)
        assert await WAYS[way](buffer, 9) == [0, 1]

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_draw_waits_for_at_least_so_many(self, buffer: ReplayBuffer, way: str) -> None:
        """And takes as many as are there then, up to its size, of those that match."""
        await fill(buffer, 2)
        options = {"where": {"priority": 2.0}, "timeout": SOON, "at_least": 2}
        drawing = asyncio.create_task(WAYS[way](buffer, 4, **options))
        await fill(buffer, 2, first=5, priority=2.0)
        assert await drawing == [5, 6]
        await fill(buffer, 5, first=10, priority=2.0)
        assert await WAYS[way](buffer, 4, **options) == [10, 11, 12, 13]

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("timeout", [0, 0.01])
    async def test_a_draw_of_less_than_it_needs_takes_nothing(
        self, buffer: ReplayBuffer, way: str, timeout: float
    ) -> None:
        """However short its timeout; needing nothing, it takes what is there at once, however long."""
        await fill(buffer, 2)
        with pytest.raises(
            NotReadyError, match=r"task math: 2 completed groups there, at least 3 needed.*; nothing was taken"
        ):
            await WAYS[way](buffer, 5, timeout=timeout, at_least=3)
        assert await WAYS[way](buffer, 5, timeout=None, at_least=0) == [0, 1]
        assert await WAYS[way](buffer, 0, timeout=None, at_least=3) == []

    async def test_each_task_has_its_own_least(self, buffer: ReplayBuffer) -> None:
        """All are waited for, and drawn from at once; one that isn't named needs none."""
        await fill(buffer, 3)
        sizes = {"math": 4, "code": 4, "chess": 0}
        with pytest.raises(
            NotReadyError, match=r"^after 0 s: .* task code: 0 completed groups there, at least 1 needed"
        ):
            await buffer.take_batch(sizes, at_least=1)
        taking = asyncio.create_task(buffer.take_batch(sizes, at_least={"code": 2}, timeout=SOON))
        await fill(buffer, 2, "code")
        _, counts = await taking
        assert counts == {"math": 3, "code": 2, "chess": 0}

    async def test_a_lease_of_at_least_so_many(self, buffer: ReplayBuffer) -> None:
        """The same of groups that come back: those of others aren't there."""
        await fill(buffer, 3)
        lease = await buffer.lease_batch({"math": 5}, at_least=3, heartbeat=False)
        with pytest.raises(NotReadyError, match=r"0 completed groups there, at least 2 needed \(3 leased\)"):
            await buffer.lease_batch({"math": 5}, at_least=2, heartbeat=False)
        await lease.give_back()
        assert len(await buffer.get(5, "math", at_least=3)) == 3

    async def test_readiness_can_be_narrowed(self, buffer: ReplayBuffer) -> None:
        """As a draw would be."""
        await fill(buffer, 2)
        await buffer.put(group(5), "math", priority=2.0)
        assert await buffer.is_ready({"math": 1}, where={"priority": 2.0})
        assert not await buffer.is_ready({"math": 2}, where={"priority": 2.0})
        await buffer.wait_ready({"math": 1}, where={"priority": 2.0}, timeout=0)
        with pytest.raises(NotReadyError):
            await buffer.wait_ready({"math": 2}, where={"priority": 2.0}, timeout=0)
