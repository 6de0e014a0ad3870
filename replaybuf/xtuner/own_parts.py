"""Buffers with a storage backend or a replay policy of the user's own: what xtuner does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from replaybuf.errors import MissingSnapshotError, NotEmptyError, SnapshotMismatchError
from replaybuf.rollouts.normalise import Normalised, normalise
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import ExpiryRule
from replaybuf.xtuner.database_storage import GroupPut, fill_tokens, status_of
from replaybuf.xtuner.installed import THEIR_FILE, rollout_class, their_status
from replaybuf.xtuner.parts import ReplayPolicy, StorageBackend, StorageItem


class OwnOperations:
    """Does the operations by a policy and a storage, one at a time: these know only this process."""

    def __init__(self, policy: ReplayPolicy, storage: StorageBackend) -> None:
        self._policy = policy
        self._storage = storage
        self._lock = asyncio.Lock()

    @cached_property
    def _kind(self) -> RolloutType:
        return RolloutType(rollout_class())

    async def put(self, new: GroupPut, dropped: list[list[Any]]) -> None:
        fill_tokens(new, self._kind)
        normal = await normalise(new.group, self._kind, None, new.train_step, new.rule, new.status)
        if normal.dropped:
            dropped.append(new.group)
            return
        status = their_status(normal.status)
        async with self._lock:
            await self._policy.put(StorageItem(new.group, 0, 0, new.task_name, status, normal.staleness), self._storage)

    async def take(self, sizes: Mapping[str, int], status: Status) -> dict[str, list[list[Any]]]:
        take = self._policy.get
        async with self._lock:
            return {task: await take(size, _lane(task, status), self._storage) for task, size in sizes.items()}

    async def count(self, tasks: Sequence[str], statuses: Sequence[Status]) -> dict[str, dict[Status, int]]:
        async with self._lock:
            return {
                task: {one: await self._policy.count(_lane(task, one), self._storage) for one in statuses}
                for task in tasks
            }

    async def is_ready(self, sizes: Mapping[str, int], status: Status) -> bool:
        counts = await self.count(list(sizes), [status])
        return all(counts[task][status] >= size for task, size in sizes.items())

    async def refresh(
        self, rules: Mapping[str, ExpiryRule], step: int, statuses: Sequence[Status], dropped: list[list[Any]]
    ) -> dict[str, int]:
        async with self._lock:
            return {task: await self._refresh(task, rule, step, statuses, dropped) for task, rule in rules.items()}

    async def _refresh(
        self, task: str, rule: ExpiryRule, step: int, statuses: Sequence[Status], dropped: list[list[Any]]
    ) -> int:
        theirs = [their_status(status) for status in statuses]
        records = await self._storage.get({"$and": [{"task_name": task}, {"status": {"$in": theirs}}]})
        refreshed: list[tuple[StorageItem, Normalised]] = [
            (one, await normalise(one.item, self._kind, None, step, rule, status_of(one.item))) for one in records
        ]
        gone = [one for one, normal in refreshed if normal.dropped]
        await self._storage.delete([one.uid for one in gone])
        dropped += [one.item for one in gone]
        await self._storage.update(
            [
                replace(one, status=their_status(normal.status), staleness=normal.staleness)
                for one, normal in refreshed
                if not normal.dropped
            ]
        )
        return sum(normal.status == Status.EXPIRED for _, normal in refreshed)

    async def save(self, folder: Path) -> Path:
        async with self._lock:
            state = {**self._about(), "storage_state": self._storage.state_dict()}
        await asyncio.to_thread(_torch().save, state, folder / THEIR_FILE)
        return folder / THEIR_FILE

    async def resume(self, folder: Path) -> None:
        if len(self._storage):
            raise NotEmptyError
        file = folder / THEIR_FILE
        try:  # a file of the user's own storage, with whatever classes its state has: a checkpoint is trusted
            state = await asyncio.to_thread(_torch().load, file, map_location="cpu", weights_only=False)
        except FileNotFoundError:
            raise MissingSnapshotError(f"there is no {THEIR_FILE} in {str(folder)!r:.200}") from None
        for part, name in self._about().items():
            if state[part] != name:
                raise SnapshotMismatchError(f"it was saved with the {part} {state[part]}, and this buffer has {name}")
        async with self._lock:
            self._storage.load_state_dict(state["storage_state"])

    def _about(self) -> dict[str, str]:
        return {"policy": type(self._policy).__name__, "storage": type(self._storage).__name__}


def _torch() -> Any:
    return import_module("torch")  # which xtuner has brought along


def _lane(task: str, status: Status) -> dict[str, Any]:
    return {"$and": [{"task_name": task}, {"status": their_status(status)}]}
