"""Laws of max_times_sampled: groups that are drawn several times before they leave."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.contract.harness import Harness, OpenBuffer, drawn, fill, only, total

EVERY_POLICY = pytest.mark.parametrize("policy", ["fifo", "lifo", "staleness", "uniform", "prioritized"])


class ReuseLaws(Harness):
    """A completed group leaves with its n-th draw, or never."""

    @EVERY_POLICY
    async def test_a_group_is_drawn_so_many_times(self, open_buffer: OpenBuffer, policy: str) -> None:
        """Then it has left the buffer; whatever the sizes of the draws."""
        buffer = await open_buffer(policy, max_times_sampled=3)
        uids = await fill(buffer, 5)
        counts: Counter[int] = Counter()
        for size in (2, 1, 5, 4, 3, 5, 5, 5, 5, 5):
            counts.update(await drawn(buffer, size))
        assert counts == dict.fromkeys(uids, 3)
        assert len(buffer) == 0
        assert await total(buffer, "taken") == 5

    @EVERY_POLICY
    async def test_a_group_is_not_twice_in_a_batch(self, open_buffer: OpenBuffer, policy: str) -> None:
        """However many are asked for."""
        buffer = await open_buffer(policy, max_times_sampled=0)
        uids = await fill(buffer, 4)
        for size in (3, 4, 9):
            batch = await drawn(buffer, size)
            assert len(set(batch)) == len(batch) == min(size, 4)
        assert set(batch) == set(uids)

    async def test_zero_keeps_every_group(self, open_buffer: OpenBuffer) -> None:
        """Groups stay, however often they are drawn."""
        buffer = await open_buffer("uniform", max_times_sampled=0)
        [uid] = await fill(buffer, 1)
        for times in range(1, 8):
            assert await drawn(buffer) == [uid]
            assert (await only(buffer)).times_sampled == times
        assert await total(buffer, "taken") == 0

    async def test_each_way_to_take_is_a_draw(self, open_buffer: OpenBuffer) -> None:
        """get, take_batch and sample count alike."""
        buffer = await open_buffer(max_times_sampled=3)
        [uid] = await fill(buffer, 1)
        assert len(await buffer.get(1, "math")) == 1
        assert (await buffer.take_batch({"math": 1}))[1] == {"math": 1}
        [item] = (await buffer.sample({"math": 1}))["math"]
        assert (item.uid, item.times_sampled) == (uid, 3)
        assert len(buffer) == 0

    async def test_draws_of_all_or_nothing_may_ask_for_what_stays(self, open_buffer: OpenBuffer) -> None:
        """With a timeout, a batch is ready as long as there are as many groups."""
        buffer = await open_buffer("uniform", max_times_sampled=0)
        await fill(buffer, 4)
        for _ in range(3):
            assert (await buffer.take_batch({"math": 4}, timeout=20))[1] == {"math": 4}
        assert await buffer.is_ready({"math": 4})
        assert not await buffer.is_ready({"math": 5})
