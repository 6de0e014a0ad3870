"""The replay buffer: puts, draws, waits and refreshes, on top of the store, which applies the rules."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, Unpack

from replaybuf.buffer import spans
from replaybuf.buffer.copies import BufferCopies
from replaybuf.buffer.drawing import AtLeast, DrawRequest
from replaybuf.buffer.lease import Cursors, Lease, Leasing
from replaybuf.buffer.putting import PUT_TIMEOUT, PutOptions, Putting, check_dropped
from replaybuf.buffer.task_names import TaskNames
from replaybuf.cancellation import to_its_end
from replaybuf.checks import (
    Tags,
    check_by_task,
    check_list,
    check_priorities,
    check_priority,
    check_seconds,
    check_step,
    check_tags,
)
from replaybuf.errors import InputError, ReplayBufError
from replaybuf.query import Query
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import EXPIRING_STATUSES, ExpiryRule
from replaybuf.rollouts.statuses import StatusLike
from replaybuf.rules.diagnosis import Diagnosis
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import (
    KEEP_CHECKPOINTS,
    LEASE_SECONDS,
    UNSET,
    Changes,
    Leased,
    R,
    Refresh,
    StorageItem,
    Unset,
    check_database,
)
from replaybuf.tracing import traced


class ReplayBuffer(BufferCopies[R], Generic[R]):
    """Holds groups of rollouts between generation and training. `R` is the class of the rollouts, for type checkers.

    Opens its storage at first use. Every coroutine may be called from any event loop and is safe to cancel: either the
    caller has the groups or the store has them. Usually built by `ReplayBufferConfig(...).build()`.
    """

    def __init__(
        self,
        storage: SQLStorage,
        rollout_type: RolloutType,
        *,
        put_timeout: float | None = PUT_TIMEOUT,
        keep_checkpoints: int | None = KEEP_CHECKPOINTS,
        free_object_refs: bool = False,
        worker: str | None = None,
    ) -> None:
        super().__init__(storage, rollout_type, keep_checkpoints, worker)
        self.putting = Putting(
            storage, rollout_type, self.waits, put_timeout, free_object_refs=free_object_refs, worker=self._worker
        )
        self.cursors = Cursors(self.putting)
        self.task_names = TaskNames(storage)

    # Putting

    @traced("replaybuf.put", spans.of_put, spans.of_uid)
    async def put(
        self,
        items: Sequence[R],
        task_name: str,
        *,
        replaces: Iterable[int] = (),
        timeout: float | Unset | None = UNSET,
        **options: Unpack[PutOptions],
    ) -> int | None:
        """Store a group of rollouts and return its uid; when it returns, the group is committed.

        The options are those of `PutOptions`.

        `model_step` fills `response_model_steps` up to the length of `response_ids`, or, for the text of a `response`
        without token ids, with one step; `current_train_step` recomputes `seq_staleness`. Rollouts of completed,
        aborted or expired groups expire when their staleness is at least `stale_threshold`, or when none of their
        trainable tokens has a staleness below `token_stale_threshold`: they lose their response and wait as EXPIRED to
        be generated again; with a train step, so do those that were EXPIRED before (put without one, at the next
        refresh). With `expired_groups_retryable=False` the group is dropped instead, and counted (`dropped`), also when
        it was EXPIRED before. In kept responses, tokens at or over `token_stale_threshold` are masked out
        (`response_mask` 0). The rollouts given are changed in place accordingly.

        A group with the same `key` in the same task is replaced. `replaces` are the uids of groups that are removed in
        the same transaction, also if the new one is dropped; results of leased groups are stored by the lease
        (`Lease.finish`, `Lease.save`). `tags` can be queried (`tags.NAME`). `status` overrides the status derived from
        the rollouts: COMPLETED, if all are, or if their class has no status, or if they have responses and rewards and
        their status was never set. Returns None for an empty list and for a dropped
        group. With `keep_unfit=False` a FILTERED or FAILED group isn't stored, either, but counted (`pruned`).

        All groups removed by this call are appended to the list `dropped` after the commit, for callers that release
        resources of theirs: this group (with the uid 0) if it is dropped, the ones that it replaces, and evicted ones.
        A group that can't be decoded has an `error`, and no rollouts. With `dropped`, a cancelled call still waits for
        its transaction, so the list is complete.

        If the limits leave no room, the put waits for up to `timeout` seconds (default: the config's put_timeout;
        None: for ever), and then raises FullError, which is also a TimeoutError; with `on_full="reject"` at once.

        Raises RolloutError or ValueError for values that can't be stored, ConflictError if a group to be
        replaced doesn't exist, FencedError if the buffer was restored since it was opened here, and StorageError; then
        nothing is stored or removed.
        """
        return await self.putting.put(items, task_name, replaces=replaces, timeout=timeout, **options)

    async def put_many(
        self,
        groups: Sequence[Sequence[R]],
        task_name: str | Sequence[str],
        *,
        each: Sequence[PutOptions] | None = None,
        timeout: float | Unset | None = UNSET,
        **options: Unpack[PutOptions],
    ) -> list[int | None]:
        """Store many groups as `put` does, in as few transactions as their sizes allow; return their uids in order.

        `task_name` is one name for all groups, or a list with one for each. `options` are the options of `put`, for all
        groups; `each` overrides them for each group. Empty and dropped groups have None in place of a uid.

        A group may be refused by itself (RolloutError, FullError, ConflictError, or StorageError as too large). If all
        are refused, the first error is raised; if some are, the others are stored, and PartlyStoredError has the
        `results` of each. When the call is cancelled, each group is stored wholly or not at all.
        """
        groups = check_list(groups, "groups")
        names = [task_name] * len(groups) if isinstance(task_name, str) else check_list(task_name, "task_name")
        more: Sequence[PutOptions] = [PutOptions()] * len(groups) if each is None else check_list(each, "each")
        for what, given in (("task_name", names), ("each", more)):
            if len(given) != len(groups):
                raise InputError(f"{what} has {len(given)} entries for {len(groups)} groups: give one for each")
        merged = [PutOptions(**{**options, **one}) for one in more]
        return await self.putting.put_many(groups, names, merged, timeout)

    # Taking

    async def get(
        self,
        batch_size: int,
        task_name: str,
        group_status: StatusLike = Status.COMPLETED,
        *,
        where: Query | None = None,
        current_train_step: int | None = None,
        timeout: float | None = 0,
        at_least: AtLeast | None = None,
    ) -> list[list[R]]:
        """Take up to `batch_size` groups of a task in the policy's order, and remove them from the buffer.

        The same as `take_batch` for one task: with a timeout it waits for `batch_size` groups, or for `at_least`. A
        size of 0 or less gives an empty list.
        """
        sizes = {task_name: batch_size}
        request = self._request(sizes, group_status, where, timeout, at_least, train_step=current_train_step)
        taken = await request.take(self.storage, self.waits)
        return [item.item for item in taken.get(task_name, [])]

    async def take_batch(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: StatusLike = Status.COMPLETED,
        where: Query | None = None,
        current_train_step: int | None = None,
        timeout: float | None = 0,
        at_least: AtLeast | None = None,
    ) -> tuple[dict[str, list[list[R]]], dict[str, int]]:
        """Take `sizes[task]` groups of each task in one transaction. Return the groups and their number, by task.

        The groups have the status `group_status`, match the query `where`, and are removed. (With `max_times_sampled`
        other than 1, completed groups stay for their next draw.)

        With `timeout=0` the call takes the available groups, up to the sizes. Otherwise it waits (seconds; None: for
        ever) until every task has as many as asked for, and takes all of them; after the timeout it takes none and
        raises NotReadyError, which is also a TimeoutError and names what was missing.

        `at_least` lowers the number to wait for: one number for every task with a size above 0, or numbers by task (0
        for other tasks). The call then takes as many groups as are available, up to the sizes, and raises NotReadyError
        after `timeout` seconds, also after 0.

        `current_train_step` is the train step of this batch, recorded with the draw (the view `batches`) and with kept
        groups (`trained_step`); default: the step of the last refresh.
        """
        request = self._request(sizes, group_status, where, timeout, at_least, train_step=current_train_step)
        taken = await request.take(self.storage, self.waits)
        batch = {task_name: [item.item for item in items] for task_name, items in taken.items()}
        return batch, {task_name: len(groups) for task_name, groups in batch.items()}

    async def sample(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: StatusLike = Status.COMPLETED,
        where: Query | None = None,
        current_train_step: int | None = None,
        timeout: float | None = 0,
        at_least: AtLeast | None = None,
        beta: float | None = None,
    ) -> dict[str, list[StorageItem[R]]]:
        """Take groups as `take_batch` does, with their metadata: `uid`, `priority`, `times_sampled`, and so on.

        With `beta` each group also has the probability p with which it was drawn (`probability`) and its importance
        `weight` (N p)^-beta, N being the number of groups drawn from (Schaul et al., "Prioritized experience replay",
        2016). p is priority / sum of priorities for prioritized draws and 1/N otherwise. Groups of priority 0 are drawn
        after all others, with p = 1/N0, N0 being their number. This reads the priorities of all groups of the task.
        """
        request = self._request(sizes, group_status, where, timeout, at_least, beta, train_step=current_train_step)
        return await request.take(self.storage, self.waits)

    def lease_batch(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: StatusLike = Status.COMPLETED,
        where: Query | None = None,
        current_train_step: int | None = None,
        timeout: float | None = 0,
        at_least: AtLeast | None = None,
        beta: float | None = None,
        seconds: float = LEASE_SECONDS,
        heartbeat: bool = True,
        deferred: Iterable[str] = (),
    ) -> Leasing[R]:
        """Draw groups as `sample` does, but only hide them until the lease is acknowledged.

            async with buffer.lease_batch({"math": 64}, timeout=600) as lease:
                await train(lease.batch["math"])

        Leaving the block acknowledges all open groups. An exception gives them back as a failed delivery, cancellation
        without counting one. If this process dies, the groups become drawable `seconds` later; while it lives, a
        heartbeat in its own thread renews the lease, however long the block takes. `heartbeat=False` leaves that to
        `lease.extend()`. A group is set aside as FAILED after `max_deliveries` failed deliveries. Leaving the block
        raises LeaseLostError if the lease had ended and no longer holds the groups.

        The arrays and tensors in the fields `deferred` of the rollouts, at any depth, aren't read: an `ArrayHandle`
        takes the place of each. It can be sent to the process that needs the array, and is valid as long as the lease.

        `await` instead of `async with` gives a Lease to be settled by hand.
        """
        later = self.rollout_type.deferrable(check_list(deferred, "deferred"))
        request = self._request(
            sizes, group_status, where, timeout, at_least, beta, train_step=current_train_step, deferred=later
        )
        duration = check_seconds(seconds, "seconds")
        storage = self.storage

        async def begin() -> Lease[R]:
            leased = await request.lease(storage, self.waits, duration)
            return Lease(storage, self.putting, leased, duration, heartbeat=heartbeat)

        return Leasing(begin)

    def adopt(self, handle: Leased, *, seconds: float = LEASE_SECONDS, heartbeat: bool = True) -> Lease[R]:
        """Continue a lease of another process in this one, given its `Lease.handle`.

        Its items have no rollouts. `seconds` and `heartbeat` are as in `lease_batch`. The store isn't accessed:
        `await lease.extend()` checks that the lease hasn't ended, `acknowledge` that it still holds its groups. A lease
        of another database raises LeaseLostError, here or, if this buffer isn't open yet, in its first call.
        """
        self._check_open()
        if not isinstance(handle, Leased):
            raise InputError(f"handle must be the handle of a Lease, got {type(handle).__name__}")
        check_database(handle, self.storage.identity)
        return Lease(self.storage, self.putting, handle, check_seconds(seconds, "seconds"), heartbeat=heartbeat)

    async def is_ready(
        self,
        sizes: Mapping[str, int],
        group_status: StatusLike = Status.COMPLETED,
        *,
        where: Query | None = None,
    ) -> bool:
        """Return whether `sizes[task]` groups with the status could be drawn of every task."""
        return await self.waits.ready(self._request(sizes, group_status, where, at_least=sizes).draw)

    async def wait_ready(
        self,
        sizes: Mapping[str, int],
        group_status: StatusLike = Status.COMPLETED,
        *,
        where: Query | None = None,
        timeout: float | None,
    ) -> None:
        """Wait until `sizes[task]` groups with the status, put by any process, could be drawn of every task.

        Raises NotReadyError (a TimeoutError), with what is missing, after `timeout` seconds (None: never).
        """
        request = self._request(sizes, group_status, where, timeout, at_least=sizes)
        await self.waits.until_ready(request.draw, time.monotonic() + request.patience, request.patience)

    async def why(
        self,
        sizes: Mapping[str, int],
        group_status: StatusLike = Status.COMPLETED,
        *,
        where: Query | None = None,
    ) -> Diagnosis:
        """Return why a draw of `sizes[task]` groups of each task would block now; Reason.READY if it wouldn't.

        Nothing is taken. The sentence names what is missing and a remedy; the facts have the numbers: available and
        leased groups, the limit that blocks, workers without a heartbeat. Raises FencedError.
        """
        return await self.waits.why_not(self._request(sizes, group_status, where, at_least=sizes).draw)

    def _request(
        self,
        sizes: Mapping[str, int],
        group_status: StatusLike,
        where: Query | None,
        timeout: float | None = 0,
        at_least: AtLeast | None = None,
        beta: float | None = None,
        train_step: int | None = None,
        deferred: frozenset[str] = frozenset(),
    ) -> DrawRequest:
        self._check_open()
        return DrawRequest.checked(
            sizes,
            group_status,
            where,
            timeout,
            at_least,
            beta,
            statuses=self.rollout_type.statuses,
            worker=self.worker,
            current_train_step=train_step,
            deferred=deferred,
        )

    # Changing

    async def delete(self, query: Query) -> int:
        """Remove the groups that match and return their number. `{}` removes all."""
        self._check_open()
        return await self.storage.delete(self._parsed(query))

    async def update(
        self,
        query: Query,
        *,
        status: StatusLike | Unset = UNSET,
        priority: float | Unset = UNSET,
        tags: Tags | Unset | None = UNSET,
    ) -> int:
        """Set the status, priority or tags of the groups that match. Return their number.

        Order, staleness and rollouts stay. A new status clears the `error` and the deliveries of a FAILED group.
        """
        self._check_open()
        if isinstance(status, Unset) and isinstance(priority, Unset) and isinstance(tags, Unset):
            raise InputError("there is nothing to set: give status=, priority= or tags=")
        changes = Changes(
            status=status if isinstance(status, Unset) else self.rollout_type.statuses.check(status),
            priority=priority if isinstance(priority, Unset) else check_priority(priority),
            tags=tags if isinstance(tags, Unset) else check_tags(tags),
        )
        return await self.storage.update(self._parsed(query), changes)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of groups by uid, leased ones included. Return the number of groups found."""
        self._check_open()
        return await self.storage.update_priorities(check_priorities(priorities))

    @traced("replaybuf.refresh_staleness", spans.of_refresh, spans.of_expired)
    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int | None],
        current_train_step: int,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        statuses: Iterable[StatusLike] | None = None,
        dropped: list[StorageItem[R]] | None = None,
    ) -> dict[str, int]:
        """Move the tasks to a new train step and expire groups that are now too old. Return their number by task.

        Afterwards every group of those tasks and `statuses` (default: completed, aborted and expired) has its staleness
        at `current_train_step`. Groups at or over the thresholds are EXPIRED, or dropped if the task's groups aren't
        retryable, as in `put`; then those that were EXPIRED before are dropped and counted, too. Tokens at or over the
        token threshold are masked out.

        Dropped groups are appended to the list `dropped`, as by `put`: all of them are in memory then. A warning is
        logged once for a task that never had a group while others had: its name may be misspelt, and none of its groups
        would ever expire.
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
        if any(rule.token_stale_threshold is not None for rule in rules.values()):
            self.rollout_type.require_of_class("response_mask", "task_token_stale_thresholds")
        check = self.rollout_type.statuses.check
        chosen = EXPIRING_STATUSES if statuses is None else tuple(map(check, check_list(statuses, "statuses")))
        check_dropped(dropped)
        refresh = Refresh(step, rules, chosen, dropped)
        refreshing = self.storage.refresh(refresh)
        expired = await (refreshing if dropped is None else to_its_end(refreshing))
        self.putting.warn_of_going_back(refresh)
        with suppress(ReplayBufError):  # the refresh is committed, whatever becomes of the warning
            await self.task_names.check(rules, "refresh_staleness")
        return expired
