"""Where the payloads of rollouts with large arrays are, and leases of these with deferred fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from tests.stores import TASK

#: The settings by which payloads are kept somewhere.
PLACES = ["sqlite", "sqlite, folder", "sqlite, objects", "memory", "postgresql", "postgresql, folder"]
LARGE = 40_000  # items


def experts(number: int = 0, size: int = LARGE) -> np.ndarray[Any, Any]:
    return np.arange(number, number + size, dtype=np.int32).reshape(-1, 8)


def rollout(number: int = 0, **extra: Any) -> RolloutState:
    return RolloutState(
        message=[],
        rollout_id=number,
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        response_mask=[1, 1],
        response_model_steps=[1, 8],
        logprobs=[-0.5, -0.25],
        routed_experts=experts(number),
        extra_fields=extra,
        reward=1.0,
        status=Status.COMPLETED,
    )


@dataclass
class Kept:
    """Where the payloads of a test are."""

    url: str
    payloads: str = "database"

    def config(self, **options: Any) -> ReplayBufferConfig[Any]:
        return ReplayBufferConfig(url=self.url, payloads=self.payloads, **({"policy": "fifo"} | options))

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[ReplayBuffer[Any]]:
        async with self.config(**options).build() as buffer:
            yield buffer

    def files(self) -> list[Path]:
        return sorted(Path(self.payloads, "files").glob("*.bin"))


def kept_at(place: str, request: pytest.FixtureRequest, folder: Path) -> Kept:
    database, _, apart = place.partition(", ")
    url = {"sqlite": f"sqlite:///{folder}/buffer.db", "memory": "memory://"}.get(database)
    payloads = "database"
    if apart == "folder":
        payloads = str(folder / "payloads")
        Path(payloads).mkdir()
    elif apart:
        payloads = str(request.getfixturevalue("bucket"))
    return Kept(url or str(request.getfixturevalue("lent_database")), payloads)


async def lent(buffer: ReplayBuffer[Any], count: int = 1, deferred: Any = ("routed_experts",)) -> Any:
    """A lease, and the first rollouts of its groups."""
    lease = await buffer.lease_batch({TASK: count}, deferred=list(deferred), timeout=0)
    return lease, [item.item[0] for item in lease.items[TASK]]


def same(found: Any, expected: np.ndarray[Any, Any]) -> bool:
    return (
        type(found) is np.ndarray
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and found.flags.fnc == expected.flags.fnc
        and bytes(found.tobytes()) == expected.tobytes()
    )
