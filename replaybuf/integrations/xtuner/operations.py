"""The operations of xtuner's buffer on groups: over a database, and over a user's own policy and storage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import check_step
from replaybuf.errors import SnapshotError
from replaybuf.integrations.xtuner.parts import THEIR_FILE
from replaybuf.rollouts.rollout import Status, group_status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import ExpiryRule, fill_model_steps
from replaybuf.rollouts.statuses import OUR_STATUSES
from replaybuf.storage.values import StorageItem


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
        left: list[StorageItem] = []
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
        left: list[StorageItem] = []
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
        """Load a snapshot, in place of an earlier run's groups. Raises SnapshotError if this run has used the buffer.

        A restarted trainer resumes before any other call. Then the groups in the database are those of its earlier
        attempt: they are removed, as they would have been with a process's memory.
        """
        try:
            await self._resume(folder)
        except SnapshotError as error:
            if (
                error.reason != "not empty" or self._used or await self.buffer.checkpoints()
            ):  # checkpoints are for `buffer.restore` instead
                raise
            await self.buffer.delete({})
            await self._resume(folder)
        self._used = True

    async def _resume(self, folder: Path) -> None:
        try:
            await self.buffer.resume(folder)
        except SnapshotError as error:
            if error.reason != "missing" or not await asyncio.to_thread((folder / THEIR_FILE).is_file):
                raise
            raise SnapshotError(
                f"{error}; there is a {THEIR_FILE} of xtuner's own buffer: replaybuf import URL {THEIR_FILE} reads it",
                reason="missing",
            ) from None


def _groups(left: Sequence[StorageItem]) -> list[list[Any]]:
    return [one.item for one in left if one.item]  # undecodable groups have no item
