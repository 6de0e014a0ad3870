"""Laws of policies: the order in which groups are drawn. Probabilities are tested in `chances.py`."""

from __future__ import annotations

import pytest

from tests.contract.harness import Harness, OpenBuffer, drawn, fill, found, group, ids

RANDOM = pytest.mark.parametrize("policy", ["uniform", "prioritized"])


class PolicyLaws(Harness):
    """lifo, uniform and prioritized."""

    async def test_lifo_takes_the_newest_first(self, open_buffer: OpenBuffer) -> None:
        """The last group put is the first to leave."""
        buffer = await open_buffer("lifo")
        await fill(buffer, 3)
        assert ids(await buffer.get(1, "math")) == [2]
        await buffer.put(group(3), "math")
        assert ids(await buffer.get(9, "math")) == [3, 1, 0]

    @pytest.mark.parametrize("policy", ["fifo", "lifo", "staleness", "uniform", "prioritized"])
    async def test_a_batch_never_holds_part_of_a_group(self, open_buffer: OpenBuffer, policy: str) -> None:
        """Trinity-RFT counts rows and splits groups; here a group is drawn, with all of its rollouts."""
        buffer = await open_buffer(policy, seed=1, max_times_sampled=2)
        for number in range(6):
            await buffer.put(group(*[number] * (1 + number % 3)), "math", priority=number)
        for _ in range(3):
            for rollouts in await buffer.get(4, "math"):
                number = rollouts[0].rollout_id
                assert [rollout.rollout_id for rollout in rollouts] == [number] * (1 + number % 3)

    @RANDOM
    async def test_a_random_draw_takes_each_group_once(self, open_buffer: OpenBuffer, policy: str) -> None:
        """All of them in the end, in an order of their own."""
        buffer = await open_buffer(policy, seed=3)
        uids = await fill(buffer, 12)
        taken = [uid for size in (5, 5, 5) for uid in await drawn(buffer, size)]
        assert sorted(taken) == uids
        assert taken != uids

    async def test_priorities_can_be_changed(self, open_buffer: OpenBuffer) -> None:
        """By uid, and by a query; groups that aren't there are not counted."""
        buffer = await open_buffer("prioritized")
        uids = await fill(buffer, 4)
        assert await buffer.update_priorities({uids[0]: 4, uids[1]: 3.0, uids[2]: 2, uids[3] + 99: 9}) == 3
        assert [item.priority for item in await found(buffer)] == [4, 3, 2, 1]
        assert await buffer.update({"uid": {"$in": uids[:2]}}, priority=1.5) == 2
        assert [item.priority for item in await found(buffer)] == [1.5, 1.5, 2, 1]

    async def test_groups_of_priority_zero_come_last(self, open_buffer: OpenBuffer) -> None:
        """No draw fails or is short because of them."""
        buffer = await open_buffer("prioritized", seed=1, max_times_sampled=0)
        idle = await fill(buffer, 4, priority=0)
        weighty = await fill(buffer, 2)
        for _ in range(5):
            batch = await drawn(buffer, 3)
            assert set(batch[:2]) == set(weighty)
            assert batch[2] in idle
        assert sorted(await drawn(buffer, 9)) == sorted(idle + weighty)
