"""xtuner's ReplayBuffer: its calls, over a database; and its configs of replay buffers, with a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ImportString

from replaybuf import config
from replaybuf.buffer.replay_buffer import ReplayBuffer as OurBuffer
from replaybuf.cancellation import to_its_end
from replaybuf.integrations.xtuner.operations import DatabaseOperations, fill_tokens, status_of
from replaybuf.integrations.xtuner.parts import config_class, release, rollout_class
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.staleness import EXPIRING_STATUSES, ExpiryRule
from replaybuf.rollouts.statuses import OUR_STATUSES, StatusLike
from replaybuf.rules.policies import ReplayPolicy as OurPolicy

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
        self._operations = DatabaseOperations(buffer)

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
        thresholds = (None, None) if step is None else (stale_threshold, token_stale_threshold)
        rule = ExpiryRule(*thresholds, retryable=expired_groups_retryable)
        if model_step is not None:
            fill_tokens(items, model_step, self._operations.kind)
        dropped: list[Group] = []
        try:
            await self._operations.put(items, task_name, status, step, rule, dropped)
        finally:  # also if the call is cancelled
            await to_its_end(release(dropped))

    async def get(self, batch_size: int, task_name: str, group_status: StatusLike) -> list[Group]:
        """Take up to `batch_size` groups of a task and status; an empty list where there are none."""
        taken = await self._take({task_name: batch_size}, group_status)
        return taken.get(task_name, [])

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: StatusLike = Status.COMPLETED
    ) -> tuple[dict[str, list[Group]], dict[str, int]]:
        """Take up to `task_batch_sizes` groups of each task, in one transaction. Return groups and counts by task."""
        taken = await self._take(task_batch_sizes, group_status)
        batch = {task: taken.get(task, []) for task in task_batch_sizes}
        return batch, {task: len(groups) for task, groups in batch.items()}

    async def _take(self, sizes: Mapping[str, int], group_status: StatusLike) -> dict[str, list[Group]]:
        status = OUR_STATUSES.check(group_status)
        wanted = {task: size for task, size in sizes.items() if size > 0}
        if not wanted or status == Status.ARCHIVED:  # archived groups are never drawn
            return {}
        return await self._operations.take(wanted, status)

    async def count(self, task_name: str, group_status: StatusLike) -> int:
        """Return the number of groups of a task and status."""
        status = OUR_STATUSES.check(group_status)
        return (await self._operations.count([task_name], [status]))[task_name][status]

    async def count_statuses(self, task_names: list[str], statuses: list[Any]) -> dict[str, dict[Any, int]]:
        """Return the number of groups by task and status, in one snapshot."""
        ours = {status: OUR_STATUSES.check(status) for status in statuses}
        counts = await self._operations.count(task_names, list(ours.values()))
        return {task: {theirs: counts[task][status] for theirs, status in ours.items()} for task in task_names}

    async def is_ready(
        self, task_batch_sizes: Mapping[str, int], *, group_status: StatusLike = Status.COMPLETED
    ) -> bool:
        """Return whether each task has as many groups as its batch size."""
        wanted = {task: size for task, size in task_batch_sizes.items() if size > 0}
        return not wanted or await self._operations.is_ready(wanted, OUR_STATUSES.check(group_status))

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
        tokens, retryable = task_token_stale_thresholds or {}, expired_groups_retryable_by_task or {}
        rules = {
            task: ExpiryRule(threshold, tokens.get(task), retryable.get(task, True))
            for task, threshold in task_stale_thresholds.items()
        }
        chosen = EXPIRING_STATUSES if statuses is None else tuple(map(OUR_STATUSES.check, statuses))
        dropped: list[Group] = []
        try:
            return await self._operations.refresh(
                rules, current_train_step, [one for one in chosen if one in EXPIRING_STATUSES], dropped
            )
        finally:
            await to_its_end(release(dropped))

    def __len__(self) -> int:
        """Return the number of groups, of all tasks and statuses. Blocks for the time of one query."""
        return len(self.buffer)

    async def save(self, path: str | Path) -> None:
        """Write all groups to the folder `path`, which is created if missing."""
        folder = Path(path)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await self._operations.save(folder)

    async def resume(self, path: str | Path) -> None:
        """Load the groups that `save` wrote to `path`, in place of an earlier run's groups; see `docs/xtuner.md`.

        Raises SnapshotError, a RuntimeError, if this run has used the buffer already and it isn't empty;
        SnapshotError, a ValueError, for a snapshot of another policy; SnapshotError, a
        FileNotFoundError.
        """
        await self._operations.resume(Path(path))

    async def close(self) -> None:
        """Close the connections. xtuner doesn't call this, and need not: everything is committed."""
        await self.buffer.close()


# The configs are subclasses of xtuner's, because its trainers' configs declare and check these classes.
_TheirSync: Any = config_class("SyncReplayBufferConfig")
_TheirAsync: Any = config_class("AsyncReplayBufferConfig")


class _OverDatabase(config.ReplayBufferConfig[Any]):
    """Takes every setting of `replaybuf.ReplayBufferConfig`, and builds xtuner's face of the buffer.

    `rollout_type` is xtuner's RolloutState, or a subclass. Without a url the buffer is a private one in memory, as
    xtuner's is. Raises MissingDriverError where xtuner isn't installed.
    """

    url: str = "sqlite:///:memory:"
    rollout_type: type | ImportString[Any] = Field(default_factory=rollout_class)

    def build(self) -> ReplayBuffer:  # type: ignore[override]
        """Return the buffer that this config describes; it connects at first use. Raises ConfigError."""
        return ReplayBuffer(super().build())


class SyncReplayBufferConfig(_OverDatabase, _TheirSync):  # type: ignore[misc]
    """For synchronous training: oldest first."""

    policy: str | OurPolicy | type[OurPolicy] = "fifo"


class AsyncReplayBufferConfig(_OverDatabase, _TheirAsync):  # type: ignore[misc]
    """For asynchronous training: most stale first."""

    policy: str | OurPolicy | type[OurPolicy] = "staleness"
