"""The state of a sampler: where its dataset is, in the store, and as a value to be kept elsewhere."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from replaybuf import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.produce import Sampler
from tests.produce.laws import drawn, questions
from tests.produce.scripted import prompts
from tests.stores import TASK, build


async def test_a_state_takes_the_dataset_back_inside_of_a_running_loop(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(9), TASK, shuffle=1)
    await sampler.sample(2)
    state = pickle.loads(pickle.dumps(sampler.state_dict()))  # as it is saved with the weights
    expected = questions(await sampler.sample(4))
    sampler.load_state_dict(state)
    assert questions(await sampler.sample(4)) == expected
    other = Sampler(buffer, prompts(9), TASK, shuffle=1)
    other.load_state_dict(state)
    assert questions(await sampler.sample(4)) == expected  # it is the ledger's place, for all samplers


def test_a_state_takes_the_dataset_back_outside_of_a_loop(url: str) -> None:
    buffer = build(url)
    try:
        sampler = Sampler(buffer, prompts(9), TASK)
        asyncio.run(sampler.sample(2))
        state = sampler.state_dict()
        asyncio.run(sampler.sample(3))
        sampler.load_state_dict(state)
        assert questions(asyncio.run(sampler.sample(2))) == ["2", "3"]
    finally:
        asyncio.run(buffer.close())


async def test_a_state_can_be_had_while_prompts_are_drawn(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(100), TASK)
    drawing = asyncio.create_task(drawn(sampler, 40))
    positions = []
    while not drawing.done():
        positions.append(sampler.state_dict()["position"])
        await asyncio.sleep(0)
    await drawing
    assert positions == sorted(positions)
    assert sampler.state_dict()["position"] == 40


async def test_the_state_of_a_new_sampler_begins_anew(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(5), TASK)
    state = sampler.state_dict()
    await sampler.sample(3)
    sampler.load_state_dict(state)
    assert questions(await sampler.sample(1)) == ["0"]


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [],
        "state",
        {"position": 1},
        {"value": b""},
        {"position": -1, "value": b""},
        {"position": 1.5, "value": b""},
        {"position": True, "value": b""},
        {"position": 2**70, "value": b""},
        {"position": 1, "value": "text"},
        {"position": 1, "value": None},
    ],
)
async def test_what_is_no_state_is_refused(url: str, state: Any) -> None:
    async with build(url) as buffer:
        sampler = Sampler(buffer, prompts(5), TASK)
        await sampler.sample(2)
        with pytest.raises(InputError, match=r"expected a dict from Sampler\.state_dict"):
            sampler.load_state_dict(state)
        assert questions(await sampler.sample(1)) == ["2"]


async def test_the_state_of_another_dataset_is_refused_when_it_is_read(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(5), TASK)
    sampler.load_state_dict({"position": 1, "value": b"garbage"})
    with pytest.raises(InputError, match="another dataset"):
        await sampler.sample()
