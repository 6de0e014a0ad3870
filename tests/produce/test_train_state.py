"""What the trainer publishes is what the workers read: through the store, at once, and after a restore what it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from replaybuf import FencedError, NotReadyError, ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.produce import TrainState, publish, published, wait_published
from replaybuf.rules.train_state import TRAINER
from tests.stores import build


async def test_what_was_published_last_is_read(buffer: ReplayBuffer) -> None:
    for state in (TrainState(1, 0, "weights-0"), TrainState(2, 1), TrainState(9, 9, "/weights/9", finished=True)):
        await publish(buffer, state)
        assert await published(buffer) == state


async def test_what_is_withdrawn_was_never_published(buffer: ReplayBuffer) -> None:
    await publish(buffer, TrainState(9, 8))
    await publish(buffer, None)
    assert await published(buffer) is None
    with pytest.raises(NotReadyError, match="the trainer has published nothing"):
        await wait_published(buffer, timeout=0.1)
    await publish(buffer, TrainState(1, 0))
    assert await published(buffer) == TrainState(1, 0)


async def test_trainers_that_publish_at_once_do_not_hinder_each_other(buffer: ReplayBuffer) -> None:
    states = [TrainState(step, step) for step in range(8)]
    await asyncio.gather(*(publish(buffer, state) for state in states))
    assert await published(buffer) in states


async def test_waiting_ends_when_something_new_is_published(buffer: ReplayBuffer) -> None:
    first, second = TrainState(1, 0), TrainState(2, 1)
    waiting = asyncio.create_task(wait_published(buffer, timeout=20))
    await asyncio.sleep(0.05)
    await publish(buffer, first)
    assert await waiting == first
    waiting = asyncio.create_task(wait_published(buffer, after=first, timeout=20))
    await publish(buffer, first)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await publish(buffer, second)
    assert await waiting == second


async def test_waiting_in_vain_says_what_for(buffer: ReplayBuffer) -> None:
    with pytest.raises(NotReadyError, match=r"after 0.1 s: the trainer has published nothing; is it running\?"):
        await wait_published(buffer, timeout=0.1)
    await publish(buffer, state := TrainState(3, 2))
    with pytest.raises(NotReadyError, match=r"published nothing since step 3"):
        await wait_published(buffer, after=state, timeout=0)


async def test_a_restore_takes_it_back_and_fences_those_before(shared_url: str) -> None:
    async with build(shared_url) as old, build(shared_url) as trainer:
        await publish(old, TrainState(1, 0))
        await old.checkpoint(1)
        await publish(old, TrainState(5, 4))
        await trainer.restore(1)
        assert await published(trainer) == TrainState(1, 0)
        with pytest.raises(FencedError):
            await publish(old, TrainState(6, 5))
        with pytest.raises(FencedError):
            await wait_published(old, after=TrainState(1, 0), timeout=10)
        assert await published(trainer) == TrainState(1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 0), "train_step"),
        ((1, "0"), "model_step"),
        ((1, 0, 7), "weights"),
        ((1, 0, None, 1), "finished"),
    ],
)
def test_what_is_no_state_of_a_trainer_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainState(*arguments)


@pytest.mark.parametrize("value", [b"", b"garbage", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", b"\x07"])
async def test_what_no_trainer_has_published_is_refused(buffer: ReplayBuffer, value: bytes) -> None:
    now = await buffer.cursors.read(TRAINER)
    assert await buffer.cursors.move(replace(now, position=1, value=value))
    with pytest.raises(InputError, match="not what a trainer has published"):
        await published(buffer)
