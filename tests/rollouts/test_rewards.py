"""Rewards that SQL can't read are kept as they are, and told of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from replaybuf import ConfigError, ReplayBuffer, RolloutState, Status
from replaybuf.produce.agent_loop import reward_varies
from replaybuf.rules.words import brief
from replaybuf.values.rollouts.rewards import reward_value
from tests.stores import TASK, build

PARTS = {"accuracy": 0.25, "format": 1.0, "note": "short"}

NUMBERS = [(0.5, 0.5), (True, 1.0), (np.float32(0.5), 0.5), (np.array([0.5]), 0.5), ({"score": 1}, 1.0)]
INFINITE = [math.nan, -math.inf, 10**400, -(10**400), np.array([10**400], dtype=object), np.array(math.inf)]
NONE = [None, {"score": None}, "0.5", {"score": 10**400}, np.array([0.5, 1.0]), [0.5], PARTS, {"score": "1"}, 1j]


def group(*rewards: Any) -> list[RolloutState]:
    return [RolloutState(message=[], response="4", reward=one, status=Status.COMPLETED) for one in rewards]


async def only(buffer: ReplayBuffer) -> Any:
    (item,) = [item async for item in buffer.find({})]
    return item


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "replaybuf.rewards"]


@pytest.mark.parametrize(("reward", "number"), [*NUMBERS, *((one, None) for one in INFINITE + NONE)], ids=str)
def test_a_reward_is_a_finite_number_or_none(reward: Any, number: float | None) -> None:
    assert reward_value(reward) == number


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
    assert f"task {TASK}: the reward of rollouts[1] is {brief(repr(reward))}. It is stored as it is" in warning


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
