"""Calls that a beginner gets wrong: the error says what is wrong and what to write instead."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.errors import InputError, RolloutError
from replaybuf.integrations.chunks import ChunkBufferConfig

ONE_GROUP = r"not (list|tuple); put takes one group, the rollouts of one prompt: call it once for each group of a list"


def group() -> list[RolloutState]:
    return [RolloutState(message=[], response="12", status=Status.COMPLETED)]


@pytest.fixture
async def buffer() -> AsyncIterator[ReplayBuffer]:
    async with ReplayBufferConfig(url="memory://", policy="fifo").build() as buffer:
        yield buffer


@pytest.fixture
def blocking() -> Iterator[SyncReplayBuffer]:
    with ReplayBufferConfig(url="memory://", policy="fifo").build_sync() as buffer:
        yield buffer


@pytest.mark.parametrize("groups", [[group(), group()], [tuple(group())]])
async def test_a_list_of_groups_is_told_from_a_group(buffer: ReplayBuffer, groups: Any) -> None:
    with pytest.raises(RolloutError, match=ONE_GROUP):
        await buffer.put(groups, "math")
    assert len(buffer) == 0


async def test_a_list_of_groups_of_dicts_is_told_from_a_group() -> None:
    async with ReplayBufferConfig(url="sqlite:///:memory:", rollout_type=dict).build() as buffer:
        with pytest.raises(RolloutError, match=ONE_GROUP):
            await buffer.put([[{"response": "12"}]], "math")  # type: ignore[list-item]


async def test_with_on_an_asynchronous_buffer_names_async_with(buffer: ReplayBuffer) -> None:
    built: Any = buffer
    with pytest.raises(InputError, match=r"open it by `async with`; for `with`, make one by build_sync\(\)"), built:
        pass


async def test_buffers_of_chunks_say_so_too() -> None:
    config = ChunkBufferConfig(url="memory://", fragments_per_chunk=1)
    built: Any = config.build()
    with pytest.raises(InputError, match=r"open it by `async with`; for `with`, make one by build_sync\(\)"), built:
        pass
    built = config.build_sync()
    with pytest.raises(InputError, match=r"open it by `with`; for `async with`, make one by build\(\)"):
        async with built:
            pass


async def test_async_with_on_a_synchronous_buffer_names_with(blocking: SyncReplayBuffer) -> None:
    built: Any = blocking
    with pytest.raises(InputError, match=r"open it by `with`; for `async with`, make one by build\(\)"):
        async with built:
            pass


async def test_a_lease_is_entered_as_its_buffer_is(buffer: ReplayBuffer, blocking: SyncReplayBuffer) -> None:
    leasing: Any = buffer.lease_batch({"math": 1})
    with pytest.raises(InputError, match=r"is entered by `async with`, not by `with`"), leasing:
        pass
    await leasing
    leasing = blocking.lease_batch({"math": 1})
    with pytest.raises(InputError, match=r"is entered by `with`, not by `async with`"):
        async with leasing:
            pass
    leasing.begin()


async def test_a_lease_that_nobody_begins_is_a_warning(buffer: ReplayBuffer, blocking: SyncReplayBuffer) -> None:
    with pytest.warns(RuntimeWarning, match="nothing was leased"):
        buffer.lease_batch({"math": 1})
    with pytest.warns(RuntimeWarning, match="nothing was leased") as caught:
        blocking.lease_batch({"math": 1})
    assert caught[0].filename == __file__


async def test_a_lease_that_was_begun_is_no_warning(buffer: ReplayBuffer, blocking: SyncReplayBuffer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await buffer.lease_batch({"math": 1})
        async with buffer.lease_batch({"math": 1}):
            pass
        with blocking.lease_batch({"math": 1}):
            pass
        gc.collect()
