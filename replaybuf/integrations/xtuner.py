"""The replay buffer of InternLM xtuner, over a database: the names of `xtuner.v1.rl.replay_buffer`, call for call.

    from replaybuf.integrations.xtuner import AsyncReplayBufferConfig

    trainer = RLColocateTrainerConfig(replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"), ...)

xtuner's trainers, agent-loop managers, samplers and producers run over it unchanged. `docs/xtuner.md` explains the
benefits and differences. xtuner is imported with this module, where it is installed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field, ImportString

from replaybuf import config
from replaybuf.buffer.replay_buffer import ReplayBuffer as OurBuffer
from replaybuf.common.cancellation import shielded
from replaybuf.common.checks import check_step, import_optional
from replaybuf.common.units import number_of
from replaybuf.errors import SnapshotError
from replaybuf.rules.policies import ReplayPolicy as OurPolicy
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.group_fields import fields_of
from replaybuf.values.rollouts.rollout import Status, group_status
from replaybuf.values.rollouts.segments import flat
from replaybuf.values.rollouts.staleness import EXPIRING_STATUSES, date_responses
from replaybuf.values.rollouts.statuses import OUR_STATUSES, StatusLike

__all__ = ["AsyncReplayBufferConfig", "ReplayBuffer", "SyncReplayBufferConfig"]

_DATA = "xtuner.v1.data_proto.rl_data"
_SESSIONS = "xtuner.v1.rl.rollout.trace_store"
_BUFFERS = "xtuner.v1.rl.replay_buffer"

_logger = logging.getLogger("replaybuf.xtuner")
_RELEASE_SECONDS = 60.0  # also the longest time for which a cancelled call goes on


def _module(name: str) -> Any:
    return import_optional(
        name, "this module works with xtuner: pip install it from https://github.com/InternLM/xtuner"
    )


def rollout_class() -> type[Any]:
    """Return xtuner's RolloutState. Raises MissingDriverError."""
    rollout_type: type[Any] = _module(_DATA).RolloutState
    return rollout_type


async def release(groups: Sequence[list[Any]]) -> None:
    """Release the resources of rollouts (sessions of the trace store, Ray objects), and reset them to EXPIRED.

    One call for all groups, since their sessions are released by one remote call. xtuner doesn't bound it.
    """
    if not groups:
        return
    limit = asyncio.timeout(_RELEASE_SECONDS)
    try:
        async with limit:
            await _module(_SESSIONS).release_and_discard_rollout_groups(list(groups))
    except TimeoutError:
        if not limit.expired():
            raise
        _logger.warning(
            "xtuner's trace store didn't answer for %g s: the sessions of %s that left the buffer may not be released",
            _RELEASE_SECONDS,
            number_of(len(groups), "group"),
        )
    status = _module(_DATA).Status(Status.EXPIRED.value)
    for group in groups:
        for rollout in group:
            rollout.status = status


def config_class(name: str) -> type[Any]:
    """Return xtuner's config class of this name, or `object` if xtuner isn't installed."""
    if find_spec("xtuner") is None:
        return object
    config_type: type[Any] = getattr(_module(_BUFFERS), name)
    return config_type


Group = list[Any]
"""The rollouts of a prompt, xtuner's RolloutStates."""


class ReplayBuffer:
    """Holds xtuner's groups between generation and training, call for call as its ReplayBuffer does.

    Built by a config. Each call is one transaction, any number of processes share the groups, and the effects of a call
    survive the process once it has returned. `buffer` is the replaybuf buffer, for its other calls.

    Errors are replaybuf's, which derive from the built-in ones that xtuner raises (ValueError, RuntimeError, ...).
    """

    def __init__(self, buffer: OurBuffer[Any]) -> None:
        self.buffer = buffer
        self._is_used = False  # whether this run has used the buffer
        self._step: int | None = None  # the last train step passed to a call

    async def put(
        self,
        items: Group,
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
    ) -> None:
        """Store a group; it is committed when this returns. The rollouts are changed in place, as xtuner changes them.

        `model_step` fills their `response_model_steps`; `current_train_step` sets their staleness and applies the
        thresholds, to completed, aborted and expired groups. A group that has expired and isn't retryable isn't stored:
        its sessions are released and its rollouts discarded, as are those of evicted groups.
        """
        if not items:
            return
        status = status_of(items)
        step = current_train_step if status in EXPIRING_STATUSES else None
        if model_step is not None:  # unlike the buffer's own `model_step`, a response without token ids gets none
            kind = self.buffer.rollout_type
            date_responses(items, fields_of(items, kind), check_step(model_step, "model_step"), kind, texts=False)
        self._is_used = True
        self._step = self._step if step is None else step
        # A put that returns evicted groups is committed by itself, without group commit.
        evicts = self.buffer.limits.capacity is not None
        evicted: list[StorageItem] = []
        removed: list[Group] = []
        try:
            uid = await self.buffer.put(
                _segments_by_session(items),
                task_name,
                status=status,
                current_train_step=step,
                stale_threshold=None if step is None else stale_threshold,
                token_stale_threshold=None if step is None else token_stale_threshold,
                expired_groups_retryable=expired_groups_retryable,
                dropped=evicted if evicts else None,
            )
            if uid is None and not evicts:
                removed.append(items)
        finally:  # also if the call is cancelled
            await shielded(release([*_groups(evicted), *removed]))

    async def get(self, batch_size: int, task_name: str, group_status: StatusLike) -> list[Group]:
        """Take up to `batch_size` groups of a task and status; an empty list where there are none."""
        batch, _ = await self.take_batch({task_name: batch_size}, group_status=group_status)
        return batch[task_name]

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: StatusLike = Status.COMPLETED
    ) -> tuple[dict[str, list[Group]], dict[str, int]]:
        """Take up to `task_batch_sizes` groups of each task, in one transaction. Return groups and counts by task."""
        status, sizes = OUR_STATUSES.check(group_status), _requested_sizes(task_batch_sizes)
        batch: dict[str, list[Group]] = {task: [] for task in task_batch_sizes}
        if sizes and status != Status.ARCHIVED:  # archived groups are never drawn
            self._is_used = True
            step = self._step if status == Status.COMPLETED else None  # others are drawn for generation, not training
            by_task, _ = await self.buffer.take_batch(sizes, group_status=status, current_train_step=step)
            batch |= {task: [*map(flat, groups)] for task, groups in by_task.items()}
        return batch, {task: len(groups) for task, groups in batch.items()}

    async def count(self, task_name: str, group_status: StatusLike) -> int:
        """Return the number of groups of a task and status."""
        return await self.buffer.count(task_name, group_status)

    async def count_statuses(self, task_names: list[str], statuses: list[Any]) -> dict[str, dict[Any, int]]:
        """Return the number of groups by task and status, in one snapshot."""
        return await self.buffer.count_statuses(task_names, statuses)

    async def is_ready(
        self, task_batch_sizes: Mapping[str, int], *, group_status: StatusLike = Status.COMPLETED
    ) -> bool:
        """Return whether each task has as many groups as its batch size."""
        return await self.buffer.is_ready(_requested_sizes(task_batch_sizes), group_status)

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int],
        task_token_stale_thresholds: Mapping[str, int] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        current_train_step: int,
        statuses: Iterable[StatusLike] | None = None,
    ) -> dict[str, int]:
        """Move tasks to a train step. Return by task the number of EXPIRED groups, earlier ones included.

        EXPIRED groups of tasks that aren't retryable are removed, then their sessions are released by one call.
        """
        tasks = task_stale_thresholds.keys()  # the other arguments may name more
        retryable = dict.fromkeys(tasks, True) | _values_of_tasks(tasks, expired_groups_retryable_by_task)
        candidates = EXPIRING_STATUSES if statuses is None else map(OUR_STATUSES.check, statuses)
        expiring = [status for status in candidates if status in EXPIRING_STATUSES]
        self._is_used, self._step = True, current_train_step
        removed: list[StorageItem] = []
        try:
            counts = await self.buffer.refresh_staleness(
                task_stale_thresholds=task_stale_thresholds,
                task_token_stale_thresholds=_values_of_tasks(tasks, task_token_stale_thresholds),
                expired_groups_retryable_by_task=retryable,
                current_train_step=current_train_step,
                statuses=expiring,
                dropped=None if all(retryable.values()) else removed,
            )
        finally:
            await shielded(release(_groups(removed)))
        kept_tasks = [task for task, is_kept in retryable.items() if is_kept]
        if kept_tasks and Status.EXPIRED in expiring:  # groups that were EXPIRED before count, too
            expired_counts = await self.buffer.count_statuses(kept_tasks, [Status.EXPIRED])
            counts |= {task: by_status[Status.EXPIRED] for task, by_status in expired_counts.items()}
        return counts

    def __len__(self) -> int:
        """Return the number of groups, of all tasks and statuses. Blocks for the time of one query."""
        return len(self.buffer)

    async def save(self, path: str | Path) -> None:
        """Write all groups to the folder `path`, which is created if missing."""
        await self.buffer.save(path)

    async def resume(self, path: str | Path) -> None:
        """Load the groups that `save` wrote to `path`, in place of an earlier run's groups; see `docs/xtuner.md`.

        A restarted trainer resumes before any other call. Then the groups in the database are those of its earlier
        attempt: they are removed, as they would have been with a process's memory. Raises SnapshotError if this run has
        used the buffer already and it isn't empty, for a snapshot of another policy, and where there is none.
        """
        try:
            await self.buffer.resume(path)
        except SnapshotError as error:
            if (
                error.reason != "not empty" or self._is_used or await self.buffer.checkpoints()
            ):  # checkpoints are for `buffer.restore` instead
                raise
            await self.buffer.delete({})
            await self.buffer.resume(path)
        self._is_used = True

    async def close(self) -> None:
        """Close the connections. xtuner doesn't call this, and need not: everything is committed."""
        await self.buffer.close()


def status_of(group: Iterable[Any]) -> Status:
    """Return the status of a group by its rollouts, by xtuner's rule: COMPLETED if none is FAILED, ..."""
    statuses = (OUR_STATUSES.check(rollout.status) for rollout in group)
    return group_status(status for status in statuses if status not in (Status.INIT, Status.ARCHIVED))


def _requested_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {task: size for task, size in sizes.items() if size > 0}


def _values_of_tasks(tasks: Collection[str], values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {task: value for task, value in (values or {}).items() if task in tasks}


def _groups(items: Sequence[StorageItem]) -> list[list[Any]]:
    return [item.flat for item in items if item.item]  # undecodable groups have no item


def _segments_by_session(group: Group) -> list[Any]:
    """Return a group with the segments of each model session in a list: xtuner's trainer counts them as one rollout."""
    sessions = groupby(group, lambda seg: (seg.rollout_id or id(seg)) if seg.session_id is None else seg.session_id)
    rollouts = [list(segments) for _, segments in sessions]
    return group if len(rollouts) == len(group) else rollouts


# The configs are subclasses of xtuner's, because its trainers' configs declare and check these classes.
_XtunerSyncConfig: Any = config_class("SyncReplayBufferConfig")
_XtunerAsyncConfig: Any = config_class("AsyncReplayBufferConfig")


class _DatabaseConfig(config.ReplayBufferConfig[Any]):
    """Takes every setting of `replaybuf.ReplayBufferConfig`, and builds xtuner's face of the buffer.

    `rollout_type` is xtuner's RolloutState, or a subclass. Without a url the buffer is a private one in memory, as
    xtuner's is. Raises MissingDriverError where xtuner isn't installed.
    """

    url: str = "sqlite:///:memory:"
    rollout_type: type | ImportString[Any] = Field(default_factory=rollout_class)

    def build(self) -> ReplayBuffer:  # type: ignore[override]
        """Return the buffer that this config describes; it connects at first use. Raises ConfigError."""
        return ReplayBuffer(super().build())


class SyncReplayBufferConfig(_DatabaseConfig, _XtunerSyncConfig):  # type: ignore[misc]
    """For synchronous training: oldest first."""

    policy: str | OurPolicy | type[OurPolicy] = "fifo"


class AsyncReplayBufferConfig(_DatabaseConfig, _XtunerAsyncConfig):  # type: ignore[misc]
    """For asynchronous training: most stale first."""

    policy: str | OurPolicy | type[OurPolicy] = "staleness"
