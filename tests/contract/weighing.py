"""Laws of the metadata of a `sample`: probabilities and importance weights."""

from __future__ import annotations

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.storage.values import StorageItem
from tests.contract.harness import Harness, OpenBuffer, fill, ids


def odds(item: StorageItem) -> list[float]:
    """Return the probability and the weight of a draw."""
    assert item.probability is not None
    assert item.weight is not None
    return [item.probability, item.weight]


class WeightLaws(Harness):
    """The metadata of a `sample`, with `beta`."""

    async def test_sample_gives_what_is_known_of_each_group(self, buffer: ReplayBuffer) -> None:
        """uid, priority, draws, tags and the group itself; probability and weight only with a beta."""
        [uid] = await fill(buffer, 1, priority=2.5, tags={"a": 1})
        [item] = (await buffer.sample({"math": 1}))["math"]
        assert (item.uid, item.priority, item.times_sampled, item.tags) == (uid, 2.5, 1, {"a": 1})
        assert ids([item.item]) == [0]
        assert (item.probability, item.weight) == (None, None)

    @pytest.mark.parametrize("beta", [0, 0.4, 1])
    async def test_prioritized_weights(self, open_buffer: OpenBuffer, beta: float) -> None:
        """p is priority / sum of priorities, the weight (N p)^-beta, where N is the number before the draw."""
        buffer = await open_buffer("prioritized", seed=1)
        for priority in (0.5, 1.5, 2, 4):
            await fill(buffer, 1, priority=priority)
        for item in (await buffer.sample({"math": 3}, beta=beta))["math"]:
            assert odds(item) == pytest.approx([item.priority / 8, (4 * item.priority / 8) ** -beta])

    async def test_weights_of_other_policies(self, open_buffer: OpenBuffer) -> None:
        """p is 1/N and the weight 1, whatever the priorities are."""
        for policy in ("uniform", "fifo"):
            buffer = await open_buffer(policy)
            for priority in (0, 1, 5, 2):
                await fill(buffer, 1, priority=priority)
            for item in (await buffer.sample({"math": 4}, beta=0.7))["math"]:
                assert odds(item) == pytest.approx([1 / 4, 1])

    async def test_weights_of_groups_of_priority_zero(self, open_buffer: OpenBuffer) -> None:
        """p is one over their number."""
        buffer = await open_buffer("prioritized", seed=1)
        await fill(buffer, 1, priority=3)
        await fill(buffer, 4, priority=0)
        first, *rest = (await buffer.sample({"math": 5}, beta=1))["math"]
        assert odds(first) == pytest.approx([1, 1 / 5])
        for item in rest:
            assert odds(item) == pytest.approx([1 / 4, 4 / 5])

    async def test_extreme_priorities_lose_no_batch(self, open_buffer: OpenBuffer) -> None:
        """A weight beyond all floats is infinite."""
        buffer = await open_buffer("prioritized", seed=1)
        for priority in (1.7e308, 1.7e308, 1e-308):
            await fill(buffer, 1, priority=priority)
        items = (await buffer.sample({"math": 3}, beta=1))["math"]
        assert len(items) == 3
        assert all(item.weight is not None and item.weight > 0 for item in items)

    async def test_the_smallest_priorities_are_equal(self, open_buffer: OpenBuffer) -> None:
        """Below 1e-200 they draw alike."""
        buffer = await open_buffer("prioritized", seed=1)
        for priority in (5e-324, 1e-300, 1e-201, 1e-200):
            await fill(buffer, 1, priority=priority)
        assert odds((await buffer.sample({"math": 1}, beta=1))["math"][0]) == pytest.approx([1 / 4, 1])
