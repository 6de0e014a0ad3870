"""Laws of max_times_sampled: groups that are drawn several times before they leave."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from replaybuf.rollouts.rollout import Status
from tests.contract.harness import Harness, OpenBuffer, drawn, fill, found, group, only, total

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

    async def test_a_drawn_group_can_be_changed_by_its_reader(self, open_buffer: OpenBuffer) -> None:
        """The next draw gives it as it was put."""
        buffer = await open_buffer(max_times_sampled=2)
        await buffer.put(group(1), "math", tags={"a": 1})
        [item] = (await buffer.sample({"math": 1}))["math"]
        item.item[0].response = "changed"
        assert item.tags is not None
        item.tags["a"] = 2
        [again] = (await buffer.sample({"math": 1}))["math"]
        assert (again.item[0].response, again.tags) == ("the answer", {"a": 1})

    async def test_other_statuses_leave_at_once(self, open_buffer: OpenBuffer) -> None:
        """Only completed groups are for reuse; aborted ones are taken to be generated again."""
        buffer = await open_buffer(max_times_sampled=3)
        await buffer.put(group(1, status=Status.ABORTED), "math")
        assert len(await buffer.get(1, "math", "aborted")) == 1
        assert len(buffer) == 0

    @pytest.mark.parametrize("how", ["snapshot", "state"])
    async def test_the_count_outlives_the_buffer(self, open_buffer: OpenBuffer, how: str, tmp_path: Path) -> None:
        """After a resume only the remaining draws are left."""
        buffer, fresh = await open_buffer(max_times_sampled=3), await open_buffer(max_times_sampled=3)
        [uid] = await fill(buffer, 1)
        await drawn(buffer)
        await drawn(buffer)
        if how == "snapshot":
            await buffer.save(tmp_path)
            await fresh.resume(tmp_path)
        else:
            fresh.load_state_dict(buffer.state_dict())
        assert [item.times_sampled for item in await found(fresh)] == [2]
        assert await drawn(fresh) == [uid]
        assert await drawn(fresh) == []

    async def test_a_new_put_of_the_same_key_starts_anew(self, open_buffer: OpenBuffer) -> None:
        """The count of draws belongs to the group that was replaced."""
        buffer = await open_buffer(max_times_sampled=2)
        await buffer.put(group(1), "math", key="a")
        await drawn(buffer)
        await buffer.put(group(2), "math", key="a")
        assert (await only(buffer)).times_sampled == 0
        assert [len(await drawn(buffer)) for _ in range(3)] == [1, 1, 0]

    async def test_draws_of_all_or_nothing_may_ask_for_what_stays(self, open_buffer: OpenBuffer) -> None:
        """With a timeout, a batch is ready as long as there are as many groups."""
        buffer = await open_buffer("uniform", max_times_sampled=0)
        await fill(buffer, 4)
        for _ in range(3):
            assert (await buffer.take_batch({"math": 4}, timeout=20))[1] == {"math": 4}
        assert await buffer.is_ready({"math": 4})
        assert not await buffer.is_ready({"math": 5})
