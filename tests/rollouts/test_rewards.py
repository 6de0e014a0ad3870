"""Rewards that SQL can't read are kept as they are, and told of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from replaybuf import ConfigError, ReplayBuffer, RolloutState, Status
from replaybuf.produce.agent_loop import reward_varies
from replaybuf.values.rollouts.rewards import reward_value, unreadable
from tests.stores import TASK, build

PARTS = {"accuracy": 0.25, "format": 1.0, "note": "short"}

#: Rewards, and what they are for people; None for those that are numbers, or none at all.
REWARDS: list[tuple[Any, str | None]] = [
    (None, None),
    (0.5, None),
    (True, None),
    (np.float32(0.5), None),
    (np.array([0.5]), None),
    ({"score": 1}, None),
    ({"score": None}, None),
    ("0.5", "a text"),
    (math.nan, "a number that isn't finite"),
    (-math.inf, "a number that isn't finite"),
    (10**400, "a number that isn't finite"),
    (-(10**400), "a number that isn't finite"),
    ({"score": 10**400}, "'score': a number that isn't finite"),
    (np.array([10**400], dtype=object), "a number that isn't finite"),
    (np.array(math.inf), "a number that isn't finite"),
    (np.array([0.5, 1.0]), "an array of 2"),
    ([0.5], "a list"),
    (PARTS, "a dict without 'score'"),
    ({"score": "1"}, "'score': a text"),
    (1j, "a complex"),
]


def group(*rewards: Any) -> list[RolloutState]:
    return [RolloutState(message=[], response="4", reward=one, status=Status.COMPLETED) for one in rewards]


async def only(buffer: ReplayBuffer) -> Any:
    (item,) = [item async for item in buffer.find({})]
    return item


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "replaybuf.rewards"]


@pytest.mark.parametrize(("reward", "what"), REWARDS, ids=lambda value: str(value)[:30])
def test_what_a_reward_is_that_is_no_number(reward: Any, what: str | None) -> None:
    assert unreadable(reward) == what
    if what is not None:
        assert reward_value(reward) is None


@pytest.mark.parametrize("reward", ["0.5", math.nan, PARTS, np.array([0.5, 1.0]), [0.5]], ids=str)
async def test_it_is_stored_as_it_is_with_one_warning(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with build("memory://") as buffer:
        for _ in range(2):
            await buffer.put(group(1.0, reward), TASK, key="one")
        item = await only(buffer)
        assert item.reward == 1.0
        assert str(item.item[1].reward) == str(reward)
        await buffer.put(group(1.0, None), TASK)
    (warning,) = warnings(caplog)
    assert f"task {TASK}: the reward of rollouts[1] is {unreadable(reward)}. It is stored as it is" in warning


async def test_the_warning_names_the_parts_of_a_dict(caplog: pytest.LogCaptureFixture) -> None:
    async with build("memory://") as buffer:
        await buffer.put(group(PARTS), TASK)
    assert "reward_key= in the config: accuracy and format" in warnings(caplog)[0]


async def test_the_reward_key_names_the_part_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    """In means and queries; the other parts stay."""
    async with build("memory://", reward_key="accuracy") as buffer:
        await buffer.put(group(PARTS, {"accuracy": 0.75}), TASK)
        assert await buffer.count_where({"reward": 0.5}) == 1
        assert (await only(buffer)).item[0].reward == PARTS
    assert warnings(caplog) == []


def test_groups_differ_by_the_part_that_counts() -> None:
    same = group({"accuracy": 1.0, "format": 0.0}, {"accuracy": 1.0, "format": 1.0})
    assert not reward_varies(same, reward_key="accuracy")
    assert reward_varies(same, reward_key="format")


@pytest.mark.parametrize("key", ["", 5, None])
def test_a_reward_key_is_a_name(key: Any) -> None:
    with pytest.raises(ConfigError, match="reward_key"):
        build("sqlite:///:memory:", reward_key=key)
