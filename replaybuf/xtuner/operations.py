"""The operations of xtuner's buffer on groups: over a database, and over a user's own policy and storage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import check_step
from replaybuf.errors import MissingSnapshotError, NotEmptyError, SnapshotMismatchError
from replaybuf.rollouts.normalise import normalise
from replaybuf.rollouts.rollout import Status, group_status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import ExpiryRule, fill_model_steps
from replaybuf.rollouts.statuses import OUR_STATUSES
from replaybuf.storage.values import StorageItem as OurItem
from replaybuf.xtuner.parts import THEIR_FILE, ReplayPolicy, StorageBackend, StorageItem, rollout_class, their_status


def fill_tokens(group: Iterable[Any], model_step: int, kind: RolloutType) -> None:
    """Fill the model steps of the group's tokens as xtuner does: a response without token ids gets none.

    The buffer's own `model_step` would set one for such a response, which could then expire.
    """
    step = check_step(model_step, "model_step")
    for rollout in group:
        fill_model_steps(rollout, step, kind)


def status_of(group: Iterable[Any]) -> Status:
    """Return the status of a group by its rollouts, by xtuner's rule: COMPLETED if none is FAILED, ..."""
    statuses = (OUR_STATUSES.check(rollout.status) for rollout in group)
    return group_status(status for status in statuses if status not in (Status.INIT, Status.ARCHIVED))


class DatabaseOperations:
    """Operations on the groups of a `DatabaseStorage`, in one transaction each.

    Groups that are removed for good are added to `dropped`, so that their sessions are released.
    """

    def __init__(self, buffer: ReplayBuffer[Any]) -> None:
        self.buffer = buffer
        self.kind = buffer.rollout_type
        self.count, self.is_ready, self.save = buffer.count_statuses, buffer.is_ready, buffer.save
        self._used = False  # whether this run has used the buffer
        self._step: int | None = None  # the last train step passed to a call

    async def put(
        self, group: list[Any], task: str, status: Status, step: int | None, rule: ExpiryRule, dropped: list[list[Any]]
    ) -> None:
        self._used = True
        self._step = self._step if step is None else step
        # A put that returns evicted groups is committed by itself, without group commit.
        evicts = self.buffer.limits.capacity is not None
        left: list[OurItem] = []
        try:
            uid = await self.buffer.put(
                group,
                task,
                status=status,
                current_train_step=step,
                stale_threshold=rule.stale_threshold,
                token_stale_threshold=rule.token_stale_threshold,
                expired_groups_retryable=rule.retryable,
                dropped=left if evicts else None,
            )
        finally:
            dropped += _groups(left)
        if uid is None and not evicts:
            dropped.append(group)

    async def take(self, sizes: Mapping[str, int], status: Status) -> dict[str, list[list[Any]]]:
        self._used = True
        step = self._step if status == Status.COMPLETED else None  # other groups are drawn for generation, not training
        taken, _ = await self.buffer.take_batch(sizes, group_status=status, current_train_step=step)
        return taken

    async def refresh(
        self, rules: Mapping[str, ExpiryRule], step: int, statuses: Sequence[Status], dropped: list[list[Any]]
    ) -> dict[str, int]:
        """Return the number of groups that are EXPIRED afterwards, or were dropped as expired."""
        self._used, self._step = True, step
        left: list[OurItem] = []
        try:
            counts = await self.buffer.refresh_staleness(
                task_stale_thresholds={task: rule.stale_threshold for task, rule in rules.items()},
                task_token_stale_thresholds={task: rule.token_stale_threshold for task, rule in rules.items()},
                expired_groups_retryable_by_task={task: rule.retryable for task, rule in rules.items()},
                current_train_step=step,
                statuses=statuses,
                dropped=None if all(rule.retryable for rule in rules.values()) else left,
            )
        finally:
            dropped += _groups(left)
        kept = [task for task, rule in rules.items() if rule.retryable]
        if kept and Status.EXPIRED in statuses:  # groups that were EXPIRED before count, too
            counts |= {task: by[Status.EXPIRED] for task, by in (await self.count(kept, [Status.EXPIRED])).items()}
        return counts

    async def resume(self, folder: Path) -> None:
        """Load a snapshot, in place of an earlier run's groups. Raises NotEmptyError if this run has used the buffer.

        A restarted trainer resumes before any other call. Then the groups in the database are those of its earlier
        attempt: they are removed, as they would have been with a process's memory.
        """
        try:
            await self._resume(folder)
        except NotEmptyError:
            if self._used or await self.buffer.checkpoints():  # checkpoints are for `buffer.restore` instead
                raise
            await self.buffer.delete({})
            await self._resume(folder)
        self._used = True

    async def _resume(self, folder: Path) -> None:
        try:
            await self.buffer.resume(folder)
        except MissingSnapshotError as error:
            if not await asyncio.to_thread((folder / THEIR_FILE).is_file):
                raise
            raise MissingSnapshotError(
                f"{error}; there is a {THEIR_FILE} of xtuner's own buffer: replaybuf import URL {THEIR_FILE} reads it"
            ) from None


def _groups(left: Sequence[OurItem]) -> list[list[Any]]:
    return [one.item for one in left if one.item]  # undecodable groups have no item


class OwnOperations:
    """Operations by a user's own policy and storage, serialised by a lock, since both are local to this process."""

    def __init__(self, policy: ReplayPolicy, storage: StorageBackend) -> None:
        self._policy = policy
        self._storage = storage
        self._lock = asyncio.Lock()

    @cached_property
    def kind(self) -> RolloutType:
        """The description of xtuner's RolloutState."""
        return RolloutType(rollout_class())

    async def put(
        self, group: list[Any], task: str, status: Status, step: int | None, rule: ExpiryRule, dropped: list[list[Any]]
    ) -> None:
        normal = await normalise(group, self.kind, None, step, rule, status)
        if normal.dropped:
            dropped.append(group)
            return
        new = StorageItem(group, 0, 0, task, their_status(normal.status), normal.staleness)
        async with self._lock:
            await self._policy.put(new, self._storage)

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
        gone, kept, expired = [], [], 0
        for one in await self._storage.get({"$and": [{"task_name": task}, {"status": {"$in": theirs}}]}):
            normal = await normalise(one.item, self.kind, None, step, rule, status_of(one.item))
            expired += normal.status == Status.EXPIRED
            if normal.dropped:
                gone.append(one)
            else:
                kept.append(replace(one, status=their_status(normal.status), staleness=normal.staleness))
        await self._storage.delete([one.uid for one in gone])
        dropped += [one.item for one in gone]
        await self._storage.update(kept)
        return expired

    async def save(self, folder: Path) -> Path:
        async with self._lock:
            state = {**self._about(), "storage_state": self._storage.state_dict()}
        await asyncio.to_thread(_torch().save, state, folder / THEIR_FILE)
        return folder / THEIR_FILE

    async def resume(self, folder: Path) -> None:
        if len(self._storage):
            raise NotEmptyError
        file = folder / THEIR_FILE
        try:  # a file of the user's own storage may have any classes: checkpoints are trusted
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
    return import_module("torch")  # installed, since xtuner requires it


def _lane(task: str, status: Status) -> dict[str, Any]:
    return {"$and": [{"task_name": task}, {"status": their_status(status)}]}
