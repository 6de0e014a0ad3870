"""Laws of policies: the order in which groups are drawn. Probabilities are tested in `chances.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
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

    @RANDOM
    async def test_the_same_seed_draws_the_same(self, open_buffer: OpenBuffer, policy: str) -> None:
        """With the same calls in the same order; another seed draws differently."""
        draws = []
        for seed in (1, 1, 2):
            buffer = await open_buffer(policy, seed=seed, max_times_sampled=2)
            uids = await fill(buffer, 6)
            sequence = [await drawn(buffer, 2) for _ in range(3)]
            await buffer.update_priorities({uids[0]: 3.0, uids[5]: 0.0})
            await fill(buffer, 3)
            draws.append(sequence + [await drawn(buffer, 4) for _ in range(3)])
        assert draws[0] == draws[1] != draws[2]

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

    @RANDOM
    @pytest.mark.parametrize("how", ["snapshot", "state"])
    async def test_a_resumed_buffer_draws_what_would_have_been_drawn(
        self, open_buffer: OpenBuffer, policy: str, how: str, tmp_path: Path
    ) -> None:
        """The sequence of draws goes on as in the uninterrupted buffer, with new groups and priorities too."""
        rules: dict[str, Any] = {"seed": 11, "max_times_sampled": 3}
        buffer, fresh = await open_buffer(policy, **rules), await open_buffer(policy, **rules)
        for number in range(12):
            await buffer.put(group(number), "math", priority=number / 4)
        for _ in range(5):
            await drawn(buffer, 3)
        if how == "snapshot":
            await buffer.save(tmp_path)
            await fresh.resume(tmp_path)
        else:
            fresh.load_state_dict(buffer.state_dict())
        assert await self._go_on(fresh) == await self._go_on(buffer)

    async def _go_on(self, buffer: ReplayBuffer) -> list[list[int]]:
        sequence = [await drawn(buffer, 2) for _ in range(3)]
        uids = await fill(buffer, 4, priority=2.0)
        await buffer.update_priorities({uids[0]: 0.5, uids[1]: 0})
        return sequence + [await drawn(buffer, 3) for _ in range(8)]
