"""replaybuf itself, on either database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import groups
from benchmarks.databases import MODEL_STEP, TASK, TRAIN_STEP, put_all
from benchmarks.floor import copy_log_back
from benchmarks.peers.adapter import Adapter, Group, Place
from replaybuf import ReplayBufferConfig


class ReplayBuf(Adapter):
    """Puts from 256 coroutines, each of which waits for its own; `get(64)` of decoded rollouts."""

    def __init__(self, place: Place, payloads: str = "database") -> None:
        super().__init__(place)
        self._file = "" if place.url else f"{place.folder}/run.db"
        self._buffer = ReplayBufferConfig(url=place.url or f"sqlite:///{self._file}", payloads=payloads).build()

    async def open(self) -> None:
        await self._buffer.__aenter__()

    async def close(self) -> None:
        await self._buffer.__aexit__(None, None, None)

    def prepare(self, group: Group) -> Any:
        return groups.rollouts(group)

    async def put(self, prepared: Sequence[Any]) -> None:
        await put_all(self._buffer, prepared)

    async def take(self, count: int) -> Sequence[Any]:
        return await self._buffer.get(count, TASK)

    async def wait_for_one(self) -> None:
        await self._buffer.take_batch({TASK: 1}, timeout=60)

    def settle(self) -> None:
        if self._file:
            copy_log_back(self._file)

    def tokens(self, group: Any) -> int:
        return super().tokens([{"tokens": rollout.tokens} for rollout in group])


class ReplayBufMany(ReplayBuf):
    """The same with puts by `put_many`, one call after the other."""

    async def put(self, prepared: Sequence[Any]) -> None:
        for start in range(0, len(prepared), self.batch):
            await self._buffer.put_many(
                prepared[start : start + self.batch], TASK, model_step=MODEL_STEP, current_train_step=TRAIN_STEP
            )


class ReplayBufWithFolder(ReplayBuf):
    """The same with large payloads in a folder."""

    def __init__(self, place: Place) -> None:
        folder = Path(place.folder) / "payloads"
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(place, str(folder))
