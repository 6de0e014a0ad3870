"""The replay buffer: the rules of putting, taking, waiting and refreshing, over a storage backend and a policy."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from replaybuf.checks import (
    MAX_STEP,
    check_by_task,
    check_folder,
    check_key,
    check_limit,
    check_list,
    check_priority,
    check_sizes,
    check_status,
    check_step,
    check_tags,
    check_task_name,
    check_timeout,
)
from replaybuf.errors import (
    ClosedError,
    InputError,
    MissingSnapshotError,
    NotPicklableError,
    NotReadyError,
    ReplayBufError,
    RolloutError,
    SnapshotError,
    SnapshotMismatchError,
)
from replaybuf.policy import OrderTerm, ReplayPolicy, parse_order
from replaybuf.query import LogicNode, Query, ScalarNode, parse
from replaybuf.rollout import Status, group_status
from replaybuf.rollout_type import RolloutType, get_field, set_field
from replaybuf.staleness import (
    EXPIRING_STATUSES,
    ExpiryRule,
    fill_model_steps,
    find_expired,
    group_staleness,
    refresh_group,
    reset_response,
)
from replaybuf.storage.base import UNSET, Changes, NewGroup, Refresh, StorageBackend, StorageItem, Tags, Unset

SNAPSHOT_FILE = "replaybuf.sqlite"

_LONGEST_WAIT = 60.0
_RETRY_SECONDS = 0.02

# Lists of more tokens than this are looked through in another thread, to keep the event loop free.
_MANY_TOKENS = 10_000


class ReplayBuffer:
    """Groups of rollouts between generation and training.

    Opens its storage at first use. Every coroutine may be called from any event loop and is safe to cancel: either the
    caller has the groups or the store has. Usually built by `ReplayBufferConfig(...).build()`.
    """

    def __init__(self, policy: ReplayPolicy, storage: StorageBackend, rollout_type: RolloutType) -> None:
        self.policy = policy
        self.storage = storage
        self._type = rollout_type
        self._closed = False

    async def __aenter__(self) -> Self:
        self._check_open()
        try:
            await self.storage.open()
        except BaseException:
            await self.close()  # nobody else will
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Commit what waits to be put, end all waits with ClosedError, and let go of the database. Idempotent."""
        self._closed = True
        await self.storage.close()

    def __reduce__(self) -> str:
        raise NotPicklableError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage!r}, policy={self.policy.name!r})"

    def __bool__(self) -> bool:
        """Always true, also of an empty buffer: `if buffer:` asks whether there is one."""
        return True

    def __len__(self) -> int:
        """The number of groups in the buffer, of all tasks and statuses. Blocks for the time of one query."""
        self._check_open()
        return len(self.storage)

    # Putting

    async def put(
        self,
        items: Sequence[Any],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
        priority: float = 1.0,
        tags: Tags | None = None,
        key: str | None = None,
    ) -> int | None:
        """Store a group of rollouts and return its uid; when it returns, the group is committed.

        `model_step` fills `response_model_steps` up to the length of `response_ids`; `current_train_step` recomputes
        `seq_staleness`. Rollouts of completed, aborted or expired groups expire when their staleness is at least
        `stale_threshold`, or when none of their trainable tokens has a staleness below `token_stale_threshold`: they
        lose their response and wait as EXPIRED to be generated again. With `expired_groups_retryable=False` the group
        is dropped instead, and counted (`dropped`). The rollouts given are changed in place accordingly.

        The same `key` in the same task replaces the group instead of adding one. `tags` can be queried
        (`tags.NAME`). Returns None for an empty list and for a dropped group.

        Raises RolloutError, EncodeError or ValueError for what can't be stored, and StorageError; then nothing is.
        """
        self._check_open()
        check_task_name(task_name)
        if model_step is not None:
            model_step = check_step(model_step, "model_step")
        if current_train_step is not None:
            current_train_step = check_step(current_train_step, "current_train_step")
        rule = _expiry_rule(stale_threshold, token_stale_threshold, expired_groups_retryable)
        if token_stale_threshold is not None and current_train_step is None:
            raise InputError(
                "token_stale_threshold needs current_train_step: the staleness of a token is relative to it"
            )
        rollouts = _as_list(items)
        if not rollouts:
            return None
        new = NewGroup(
            task_name=task_name,
            status=Status.INIT,
            staleness=0,
            rollouts=rollouts,
            created_at=time.time(),
            train_step=current_train_step,
            priority=check_priority(priority),
            tags=check_tags(tags),
            key=check_key(key),
        )
        self._require_fields(rollouts, model_step, current_train_step, rule)
        if _count_tokens(rollouts) < _MANY_TOKENS:
            keep = self._normalise(new, model_step, rule)
        else:
            keep = await asyncio.to_thread(self._normalise, new, model_step, rule)
        if keep:
            return await self.storage.put(new)
        await self.storage.drop(task_name)
        return None

    def _require_fields(
        self, rollouts: list[Any], model_step: int | None, train_step: int | None, rule: ExpiryRule
    ) -> None:
        features: list[tuple[str, tuple[str, ...]]] = [("put", ("status",))]
        if model_step is not None:
            features.append(("model_step", ("response_ids", "response_model_steps")))
        if train_step is not None:
            features.append(("current_train_step", ("seq_staleness", "response_model_steps")))
        if rule.active:
            features.append(("stale_threshold", ("seq_staleness",)))
        if rule.token_stale_threshold is not None:
            features.append(("token_stale_threshold", ("response_ids", "response_model_steps")))
        for rollout in rollouts:
            self._type.require_all(rollout, features)

    def _normalise(self, new: NewGroup, model_step: int | None, rule: ExpiryRule) -> bool:
        """Bring the rollouts into the state in which they are stored; False when the group is to be dropped."""
        try:
            return self._apply_rules(new, model_step, rule)
        except ReplayBufError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise RolloutError(f"the rollouts' response_ids, steps or staleness can't be used: {error}") from error

    def _apply_rules(self, new: NewGroup, model_step: int | None, rule: ExpiryRule) -> bool:
        rollouts, train_step = new.rollouts, new.train_step
        new.status = _status_of(rollouts)
        if model_step is not None:
            for rollout in rollouts:
                fill_model_steps(rollout, model_step)
        if train_step is not None:
            refresh_group(rollouts, train_step)
        new.staleness = group_staleness(rollouts)
        if abs(new.staleness) >= MAX_STEP:
            raise RolloutError(f"seq_staleness is {new.staleness:.4g}, which is no number of training steps")
        if not rule.active or new.status not in EXPIRING_STATUSES:
            return True
        expired = find_expired(rollouts, rule, train_step)
        if not expired:
            return True
        if not rule.retryable:
            for rollout in rollouts:
                set_field(rollout, "status", Status.EXPIRED)
            return False
        for index in expired:
            reset_response(rollouts[index])
        new.status, new.train_step = Status.EXPIRED, None
        return True

    # Taking

    async def get(
        self,
        batch_size: int,
        task_name: str,
        group_status: Status | str = Status.COMPLETED,
        *,
        where: Query | None = None,
    ) -> list[list[Any]]:
        """Take up to `batch_size` groups of a task in the policy's order; they leave the buffer as they are returned.

        `where` narrows them further. A size of 0 or less gives an empty list.
        """
        self._check_open()
        status = check_status(group_status)
        node = None if where is None else parse(where)
        taken = await self.storage.take(
            check_sizes({task_name: batch_size}), status=status, order=self.policy.order, where=node
        )
        return [item.item for item in (taken or {}).get(task_name, [])]

    async def take_batch(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: Status | str = Status.COMPLETED,
        timeout: float | None = 0,
    ) -> tuple[dict[str, list[list[Any]]], dict[str, int]]:
        """Take `sizes[task]` groups of each task in one transaction: the groups by task, and how many of each.

        With `timeout=0` what is there is taken, up to the sizes. Otherwise the call waits until every task has as many
        as asked for (seconds; None: for ever) and takes them all, or nothing: then it raises NotReadyError, which is
        also a TimeoutError and says what was missing.
        """
        self._check_open()
        wanted, status = check_sizes(sizes), check_status(group_status)
        limit = check_timeout(timeout)
        taken = await self._take(wanted, status, limit)
        batch = {task_name: [item.item for item in items] for task_name, items in taken.items()}
        return batch, {task_name: len(groups) for task_name, groups in batch.items()}

    async def _take(self, wanted: dict[str, int], status: Status, timeout: float) -> dict[str, list[StorageItem]]:
        whole = timeout > 0
        deadline = time.monotonic() + timeout
        while True:
            if whole:
                await self._wait(wanted, status, deadline, timeout)
            taken = await self.storage.take(wanted, status=status, order=self.policy.order, all_or_nothing=whole)
            if taken is not None:
                return taken
            # Someone else was faster, or holds some of the groups at this moment.
            await asyncio.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))

    async def is_ready(self, sizes: Mapping[str, int], group_status: Status | str = Status.COMPLETED) -> bool:
        """Whether every task has at least `sizes[task]` groups of the status."""
        self._check_open()
        wanted, status = check_sizes(sizes), check_status(group_status)
        return not _missing(wanted, await self._available(wanted, status))

    async def wait_ready(
        self, sizes: Mapping[str, int], group_status: Status | str = Status.COMPLETED, *, timeout: float | None
    ) -> None:
        """Wait until every task has at least `sizes[task]` groups of the status, whoever puts them.

        Raises NotReadyError (a TimeoutError) after `timeout` seconds (None: never), saying what is missing.
        """
        self._check_open()
        limit = check_timeout(timeout)
        await self._wait(check_sizes(sizes), check_status(group_status), time.monotonic() + limit, limit)

    async def _wait(self, wanted: dict[str, int], status: Status, deadline: float, timeout: float) -> None:
        while True:
            self._check_open()
            seen = self.storage.version()
            available = await self._available(wanted, status)
            missing = _missing(wanted, available)
            if not missing:
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                lines = await self._describe_missing(missing, wanted, available, status)
                raise NotReadyError(f"after {timeout:g} s: {lines}; nothing was taken")
            await self.storage.changed(min(remaining, _LONGEST_WAIT), seen)

    async def _describe_missing(
        self, missing: list[str], wanted: Mapping[str, int], available: Mapping[str, int], status: Status
    ) -> str:
        """`task math: 12 of 64 completed groups (3 expired, 1 failed)` for each task that lacks groups."""
        counts = await self.storage.count_statuses()
        lines = []
        for name in missing:
            others = [f"{n} {other}" for (task, other), n in counts.items() if task == name and other != status]
            rest = f" ({', '.join(sorted(others))})" if others else ""
            lines.append(f"task {name}: {available[name]} of {wanted[name]} {status} groups{rest}")
        return "; ".join(lines)

    async def _available(self, wanted: Mapping[str, int], status: Status) -> dict[str, int]:
        return {
            name: await self.storage.count(_lane(name, status), at_most=size) if size > 0 else 0
            for name, size in wanted.items()
        }

    # Counting and reading

    async def count(self, task_name: str, group_status: Status | str) -> int:
        """How many groups of a task have this status."""
        self._check_open()
        return await self.storage.count(_lane(check_task_name(task_name), check_status(group_status)))

    async def count_statuses(
        self, tasks: Iterable[str], statuses: Iterable[Status | str]
    ) -> dict[str, dict[Status, int]]:
        """How many groups each task has of each status."""
        self._check_open()
        tasks = [check_task_name(task) for task in check_list(tasks, "tasks")]
        wanted = [check_status(status) for status in check_list(statuses, "statuses")]
        counts = await self.storage.count_statuses()
        return {task: {status: counts.get((task, status), 0) for status in wanted} for task in tasks}

    async def count_where(self, query: Query) -> int:
        """How many groups match a query."""
        self._check_open()
        return await self.storage.count(parse(query))

    async def dropped(self, task_name: str) -> int:
        """How many groups of a task were dropped because they expired and weren't retryable, since the beginning."""
        self._check_open()
        return await self.storage.dropped(check_task_name(task_name))

    def find(
        self,
        query: Query,
        *,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[StorageItem]:
        """Read the groups that match, without consuming them, as a stream of `StorageItem`s.

        `order_by` is a field or several, with a leading "-" for descending; insertion order breaks ties. Groups that
        leave the buffer meanwhile are left out. A group that can't be decoded comes with an empty `item` and the reason
        in `error`. Raises QueryError.
        """
        self._check_open()
        return self.storage.find(parse(query), order=parse_order(order_by), limit=check_limit(limit))

    # Changing

    async def delete(self, query: Query) -> int:
        """Remove the groups that match; how many. `{}` removes all."""
        self._check_open()
        return await self.storage.delete(parse(query))

    async def update(
        self,
        query: Query,
        *,
        status: Status | str | Unset = UNSET,
        priority: float | Unset = UNSET,
        tags: Tags | Unset | None = UNSET,
    ) -> int:
        """Set the status, priority or tags of the groups that match; how many. Order, staleness and rollouts stay.

        A new status clears the `error` of a group that was set aside as FAILED.
        """
        self._check_open()
        changes = Changes(
            status=status if isinstance(status, Unset) else check_status(status),
            priority=priority if isinstance(priority, Unset) else check_priority(priority),
            tags=tags if isinstance(tags, Unset) else check_tags(tags),
        )
        return await self.storage.update(parse(query), changes)

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int | None],
        current_train_step: int,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        statuses: Iterable[Status | str] | None = None,
    ) -> dict[str, int]:
        """Move the tasks to a new train step and expire what has become too old; the number of expired groups by task.

        Afterwards every group of those tasks and `statuses` (default: completed, aborted and expired) has the
        staleness of `current_train_step`, and those at or over the thresholds are EXPIRED, or dropped where the task's
        groups aren't retryable, as in `put`.
        """
        self._check_open()
        step = check_step(current_train_step, "current_train_step")
        tokenwise = check_by_task(task_token_stale_thresholds, "task_token_stale_thresholds")
        retryable = check_by_task(expired_groups_retryable_by_task, "expired_groups_retryable_by_task")
        rules = {
            name: ExpiryRule(threshold, tokenwise.get(name), retryable.get(name, True))
            for name, threshold in check_by_task(task_stale_thresholds, "task_stale_thresholds").items()
        }
        for name in (*tokenwise, *retryable):
            if name not in rules:
                raise InputError(f"task {name!r} has no entry in task_stale_thresholds (None: no such limit)")
        chosen = EXPIRING_STATUSES if statuses is None else tuple(map(check_status, check_list(statuses, "statuses")))
        return await self.storage.refresh(Refresh(step, rules, chosen))

    # Snapshots

    async def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained snapshot into the folder `path`, without stopping writers; the file that it is in."""
        self._check_open()
        folder = check_folder(path)
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"can't make the folder {folder} for the snapshot: {error}") from error
        file = folder / SNAPSHOT_FILE
        await self.storage.save(str(file), {"policy": self.policy.name})
        return file

    async def resume(self, path: str | os.PathLike[str]) -> None:
        """Load the snapshot in the folder `path` into this buffer.

        Raises NotEmptyError when the buffer isn't empty, MissingSnapshotError, and SnapshotMismatchError or SchemaError
        when the snapshot is of another policy or schema.
        """
        self._check_open()
        file = check_folder(path) / SNAPSHOT_FILE
        if not await asyncio.to_thread(file.is_file):
            raise MissingSnapshotError(f"there is no snapshot in {file.parent}: expected the file {SNAPSHOT_FILE}")
        await self.storage.resume(str(file), {"policy": self.policy.name})

    def state_dict(self) -> dict[str, Any]:
        """The whole buffer as a dict of plain values, for frameworks that want one. Blocks; `save` doesn't."""
        self._check_open()
        return {"policy": self.policy.name, "storage": self.storage.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave into this buffer, which must be empty. Blocks."""
        self._check_open()
        if not isinstance(state, Mapping) or "storage" not in state:
            raise SnapshotMismatchError("expected a dict from ReplayBuffer.state_dict()")
        if state.get("policy") != self.policy.name:
            raise SnapshotMismatchError(
                f"the state was saved with policy {state.get('policy')!r}, and this buffer has {self.policy.name!r}"
            )
        self.storage.load_state_dict(state["storage"])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError


_expiry_rule = lru_cache(typed=True)(ExpiryRule)  # typed: True equals 1, and is no threshold


def _as_list(items: Any) -> list[Any]:
    if isinstance(items, (list, tuple)):
        return list(items)
    raise RolloutError(f"expected a list of rollouts (a group), got {type(items).__name__}")


def _count_tokens(rollouts: Sequence[Any]) -> int:
    """How many response tokens the group has, as far as can be told."""
    lists = (get_field(rollout, "response_ids") for rollout in rollouts)
    return sum(len(tokens) for tokens in lists if isinstance(tokens, (list, tuple)))


def _status_of(rollouts: Sequence[Any]) -> Status:
    statuses = []
    for index, rollout in enumerate(rollouts):
        value = get_field(rollout, "status")
        try:
            statuses.append(Status(value))
        except ValueError:
            known = ", ".join(Status)
            raise RolloutError(f"rollouts[{index}].status is {value!r}; expected one of {known}") from None
    return group_status(statuses)


def _lane(task_name: str, status: Status) -> LogicNode:
    return LogicNode("$and", (ScalarNode("task_name", "$eq", task_name), ScalarNode("status", "$eq", status.value)))


def _missing(wanted: Mapping[str, int], available: Mapping[str, int]) -> list[str]:
    return [name for name, size in wanted.items() if available[name] < size]
