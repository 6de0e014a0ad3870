"""Buffers to export from and import into."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.values import StorageItem


@pytest.fixture
async def memory() -> AsyncIterator[ReplayBuffer]:
    """A buffer that only this test has."""
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        yield buffer


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    """An export of five groups of two rollouts."""
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await fill(buffer)
        await buffer.export(tmp_path / "a.jsonl")
    return tmp_path / "a.jsonl"


#: A row of others' that can be imported.
GOOD = {"message": "1 + 1?", "response": "2", "task_name": "math"}
#: What another store gives anew.
_ANEW = {"uid", "timestamp_id", "item"}


async def contents(buffer: Any) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the metadata and the rollouts of all groups, in their order."""
    return [(metadata(item), item.item) async for item in buffer.find({})]


def metadata(item: StorageItem) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item) if field.name not in _ANEW}


def rollout(number: int) -> RolloutState:
    """Return a rollout with a value in every kind of field."""
    return RolloutState(
        rollout_id=number,
        message=[{"role": "user", "content": f"What is {number} + {number}? \u2028 \U0001f600"}],
        prompt_ids=np.arange(4, dtype=np.int32),
        response=f"{2 * number}\n",
        response_ids=np.arange(number % 5, dtype=np.int64),
        logprobs=np.linspace(-1, 0, 3, dtype=np.float32),
        response_mask=[1, 0, 1],
        routed_experts=np.arange(6, dtype=np.uint8).reshape(3, 2),
        reward={"score": number / 7},
        status=Status.COMPLETED,
        extra_fields={"pair": (1, b"\xff"), "nested": {"a": [None, float("inf")]}},
    )


async def fill(buffer: Any, groups: int = 5, size: int = 2) -> None:
    """Put groups with metadata of every kind."""
    for number in range(groups):
        await buffer.put(
            [rollout(size * number + index) for index in range(size)],
            "math" if number % 2 else "code",
            priority=number / 3,
            tags={"level": number, "name": "é"} if number % 2 else None,
            key=f"k{number}" if number % 3 == 0 else None,
            model_step=7,
            current_train_step=9,
        )


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)
