"""Synchronous buffers, and what a type checker has to find out about them by itself.

Signatures are known to every checker. mypy also knows the class of the rollouts; pyright takes them for Any.
"""

from __future__ import annotations

from typing import assert_type

from replaybuf import ReplayBufferConfig
from replaybuf.buffer.sync import SyncLease, SyncReplayBuffer
from replaybuf.storage.values import StorageItem
from tests.typed.buffers import Sample


def built_by_configs() -> None:
    assert_type(ReplayBufferConfig(url="memory://", rollout_type=Sample).build_sync(), SyncReplayBuffer[Sample])


def draws(buffer: SyncReplayBuffer[Sample]) -> None:
    assert_type(buffer.get(1, "math"), list[list[Sample]])  # pyright: ignore[reportAssertTypeFailure]
    assert_type(buffer.count("math", "completed"), int)
    for item in buffer.find({"reward": 1}):
        assert_type(item, StorageItem[Sample])  # pyright: ignore[reportAssertTypeFailure]
    buffer.get("math", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def leases(buffer: SyncReplayBuffer[Sample]) -> None:
    with buffer.lease_batch({"math": 1}) as lease:
        assert_type(lease, SyncLease[Sample])  # pyright: ignore[reportAssertTypeFailure]
        assert_type(lease.finish([Sample([1])], "math", replaces=[1], priority=2.0), int | None)
        lease.finish([Sample([1])], "math", priority=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def puts(buffer: SyncReplayBuffer[Sample]) -> None:
    assert_type(buffer.put([Sample([1])], "math", priority=2.0), int | None)
    buffer.put([Sample([1])], "math", priorty=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    buffer.put([3], "math")  # type: ignore[list-item]
