"""Puts of many tokens that begin together: the event loop has other turns in between."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from replaybuf import RolloutState
from replaybuf.rollouts.normalise import Turns, normalise
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import ExpiryRule

PUTS = 5
KIND = RolloutType(RolloutState)


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One put takes all the time of a turn."""
    monkeypatch.setattr(Turns, "SECONDS", -1.0)


async def turns_between(tokens: Any) -> int:
    """Return how many turns the loop had while groups of these response tokens were brought into form."""
    groups = [[RolloutState(message=[], response_ids=tokens)] for _ in range(PUTS)]
    turns, done = 0, False

    async def count() -> None:
        nonlocal turns
        while not done:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    rule = ExpiryRule(None, None, True)
    await asyncio.gather(*(normalise(group, KIND, 1, 2, rule) for group in groups))
    done = True
    await counting
    assert all(list(group[0].response_model_steps) == [1] * len(tokens) for group in groups)
    return turns


async def test_arrays_of_many_tokens_take_turns() -> None:
    assert await turns_between(np.zeros(10_000, np.int32)) >= PUTS


async def test_short_arrays_need_none() -> None:
    assert await turns_between(np.zeros(100, np.int32)) < PUTS


async def test_a_put_that_is_cancelled_while_it_waits_for_its_turn_holds_up_no_other() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    await turns.begin(loop)
    waiting = [asyncio.create_task(turns.begin(loop)) for _ in range(2)]
    waiting[0].cancel()
    async with asyncio.timeout(10):
        await waiting[1]
    assert waiting[0].cancelled()
