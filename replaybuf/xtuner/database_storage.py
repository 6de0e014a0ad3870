"""A replaybuf buffer as xtuner's storage backend, and the operations on groups that the database does by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import check_step
from replaybuf.errors import MissingSnapshotError, NotEmptyError, UnsupportedError
from replaybuf.rollouts.model_steps import fill_model_steps
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import ExpiryRule
from replaybuf.rollouts.statuses import OUR_STATUSES
from replaybuf.storage.values import StorageItem as OurItem
from replaybuf.xtuner.installed import THEIR_FILE, their_status
from replaybuf.xtuner.parts import Query, StorageBackend, StorageItem, as_ours

#: xtuner's order of precedence: the status of a group is the first that any of its rollouts has, or COMPLETED.
_PRECEDENCE: Final = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


@dataclass(frozen=True, slots=True)
class GroupPut:
    """A group to be put, its status, and the rule by which it expires.

    `model_step` is that of new tokens, `train_step` the one for which the staleness is computed; None leaves them.
    """

    group: list[Any]
    task_name: str
    status: Status
    model_step: int | None
    train_step: int | None
    rule: ExpiryRule


def fill_tokens(new: GroupPut, kind: RolloutType) -> None:
    """Fill the model steps of the group's tokens as xtuner does: a response without token ids stays without any.

    The buffer's own `model_step` would date such a response, which then expires.
    """
    if new.model_step is not None:
        step = check_step(new.model_step, "model_step")
        for rollout in new.group:
            fill_model_steps(rollout, step, kind)


def status_of(group: Iterable[Any]) -> Status:
    """Return the status of a group by its rollouts, as xtuner has it: one without FAILED, ... ones is COMPLETED."""
    present = {OUR_STATUSES.check(rollout.status) for rollout in group}
    return next((status for status in _PRECEDENCE if status in present), Status.COMPLETED)


# As many uids as a query takes in one $in.
_UIDS = 500


class DatabaseStorage(StorageBackend):
    """The groups of a replaybuf buffer, for replay policies of your own: `ReplayBuffer(MyPolicy(), storage)`.

    `get` reads all groups that match, and taking them out is another transaction: two processes may get the same ones.
    The policies that replaybuf has, which a config names, draw in one transaction and read only what they return.
    """

    def __init__(self, buffer: ReplayBuffer[Any]) -> None:
        self.buffer = buffer

    async def put(self, item: StorageItem) -> int:
        return await self.buffer.put(item.item, item.task_name, status=item.status) or 0

    async def get(self, query: Query) -> list[StorageItem]:
        return [_as_theirs(one) async for one in self.buffer.find(as_ours(query))]

    async def count(self, query: Query) -> int:
        return await self.buffer.count_where(as_ours(query))

    async def delete(self, uids: list[int]) -> None:
        for first in range(0, len(uids), _UIDS):
            await self.buffer.delete({"uid": {"$in": list(uids[first : first + _UIDS])}})

    async def update(self, items: list[StorageItem]) -> None:
        """Raise UnsupportedError: rollouts that are stored don't change, and `refresh_staleness` does the rest."""
        raise UnsupportedError(
            "update() can't replace the rollouts of a group that is in the database; put it anew, or set its status "
            "with storage.buffer.update(query, status=...)"
        )

    def __len__(self) -> int:
        return len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(state)


def _as_theirs(one: OurItem) -> StorageItem:
    return StorageItem(one.item, one.uid, one.timestamp_id, one.task_name, their_status(one.status), one.staleness)


class DatabaseOperations:
    """How the groups of a `DatabaseStorage` are put, taken, refreshed and saved: a transaction each.

    Groups that leave for good are added to `dropped`, for their sessions to be released.
    """

    def __init__(self, buffer: ReplayBuffer[Any]) -> None:
        self.buffer = buffer
        self._used = False  # by this run
        self._step: int | None = None  # the train step that was named last

    async def put(self, new: GroupPut, dropped: list[list[Any]]) -> None:
        self._used = True
        self._step = self._step if new.train_step is None else new.train_step
        # Asking for what leaves has its price: puts are then committed one by one.
        evicts = self.buffer.limits.capacity is not None
        left: list[OurItem] = []
        fill_tokens(new, self.buffer.rollout_type)
        try:
            uid = await self.buffer.put(
                new.group,
                new.task_name,
                status=new.status,
                current_train_step=new.train_step,
                stale_threshold=new.rule.stale_threshold,
                token_stale_threshold=new.rule.token_stale_threshold,
                expired_groups_retryable=new.rule.retryable,
                dropped=left if evicts else None,
            )
        finally:
            dropped += _groups(left)
        if uid is None and not evicts:
            dropped.append(new.group)

    async def take(self, sizes: Mapping[str, int], status: Status) -> dict[str, list[list[Any]]]:
        self._used = True
        step = self._step if status == Status.COMPLETED else None  # others are drawn to be generated again
        taken, _ = await self.buffer.take_batch(sizes, group_status=status, current_train_step=step)
        return taken

    async def count(self, tasks: Sequence[str], statuses: Sequence[Status]) -> dict[str, dict[Status, int]]:
        return await self.buffer.count_statuses(tasks, statuses)

    async def is_ready(self, sizes: Mapping[str, int], status: Status) -> bool:
        return await self.buffer.is_ready(sizes, status)

    async def refresh(
        self, rules: Mapping[str, ExpiryRule], step: int, statuses: Sequence[Status], dropped: list[list[Any]]
    ) -> dict[str, int]:
        """Return the number of groups that are EXPIRED afterwards, or were dropped as such."""
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
        if kept and Status.EXPIRED in statuses:  # those that were EXPIRED before count, too
            counts |= {task: by[Status.EXPIRED] for task, by in (await self.count(kept, [Status.EXPIRED])).items()}
        return counts

    async def save(self, folder: Path) -> Path:
        return await self.buffer.save(folder)

    async def resume(self, folder: Path) -> None:
        """Load a snapshot, in place of what an earlier run has left in the database. Raises NotEmptyError.

        A trainer that starts again resumes before it does anything else. Then the groups that are there already are
        those of its run before, from after the checkpoint: they go, as they would have with a process's memory.
        """
        try:
            await self._resume(folder)
        except NotEmptyError:
            if self._used or await self.buffer.checkpoints():  # which `buffer.restore` brings back
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
    return [one.item for one in left if one.item]  # none where a group can't be decoded
