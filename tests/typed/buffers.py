"""Buffers of every kind of class, and what a type checker has to find out about them by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

from replaybuf import AsyncReplayBufferConfig, ReplayBuffer, ReplayBufferConfig, RolloutState, SyncReplayBufferConfig
from replaybuf.buffer.lease import Lease
from replaybuf.storage.values import StorageItem


@dataclass
class Sample:
    tokens: list[int]
    reward: float = 0.0


class Row(TypedDict):
    tokens: list[int]


def built_by_configs() -> None:
    assert_type(ReplayBufferConfig(url="memory://").build(), ReplayBuffer[RolloutState])
    assert_type(ReplayBufferConfig(url="memory://", rollout_type=Sample).build(), ReplayBuffer[Sample])
    assert_type(ReplayBufferConfig(url="memory://", rollout_type=Row).build(), ReplayBuffer[Row])
    assert_type(ReplayBufferConfig(url="memory://", types=[Sample]).build(), ReplayBuffer[RolloutState])
    assert_type(ReplayBufferConfig(url="memory://", password="tokens:token").build(), ReplayBuffer[RolloutState])
    assert_type(ReplayBufferConfig(url="memory://", password=lambda: "token").build(), ReplayBuffer[RolloutState])
    assert_type(SyncReplayBufferConfig(rollout_type=Sample).build(), ReplayBuffer[Sample])
    assert_type(AsyncReplayBufferConfig(rollout_type=Sample).build(), ReplayBuffer[Sample])


def of_a_file(config: ReplayBufferConfig[Any]) -> ReplayBuffer[Sample]:
    return config.build()


async def draws(buffer: ReplayBuffer[Sample]) -> None:
    assert_type(await buffer.get(1, "math"), list[list[Sample]])
    assert_type(await buffer.take_batch({"math": 1}), tuple[dict[str, list[list[Sample]]], dict[str, int]])
    assert_type(await buffer.sample({"math": 1}), dict[str, list[StorageItem[Sample]]])
    async for item in buffer.find({"reward": 1}):
        assert_type(item.item, list[Sample])


async def leases(buffer: ReplayBuffer[Sample]) -> None:
    async with buffer.lease_batch({"math": 1}) as lease:
        assert_type(lease, Lease[Sample])
        assert_type(lease.batch, dict[str, list[list[Sample]]])
        assert_type(lease.items["math"][0], StorageItem[Sample])
        await lease.finish([Sample([1])], "math", replaces=[1])
    assert_type(await buffer.lease_batch({"math": 1}), Lease[Sample])


async def puts(buffer: ReplayBuffer[Sample]) -> None:
    await buffer.put([Sample([1])], "math")
    await buffer.put([RolloutState(message=[])], "math")  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


async def without_a_type(buffer: ReplayBuffer) -> Any:
    return (await buffer.get(1, "math"))[0][0].whatever
