"""The replay buffer: puts, draws, waits and refreshes, on top of the store, which applies the rules."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from replaybuf.buffer.buffer_metrics import read_metrics
from replaybuf.buffer.drawing import DrawOptions, DrawRequest
from replaybuf.buffer.lease import Cursors, Lease, Leasing
from replaybuf.buffer.put_options import FillOptions, check_dropped
from replaybuf.buffer.putting import PUT_TIMEOUT, Putting
from replaybuf.buffer.tracing import of_uid, traced
from replaybuf.buffer.waits import Waits
from replaybuf.common import units
from replaybuf.common.cancellation import shielded
from replaybuf.common.checks import (
    Tags,
    check_by_task,
    check_folder,
    check_limit,
    check_list,
    check_most,
    check_path,
    check_priorities,
    check_priority,
    check_seconds,
    check_step,
    check_tags,
    check_task_name,
    check_whole,
    shown,
)
from replaybuf.common.progress import OnProgress
from replaybuf.common.worker_name import working_as
from replaybuf.errors import InputError
from replaybuf.files.exporting import Exported, ExportQuery, OrderBy, export_file
from replaybuf.files.foreign_rows import FIELDS, ColumnMapping
from replaybuf.files.importing import Imported, import_from
from replaybuf.files.sources import RolloutFile
from replaybuf.rules.diagnosis import Diagnosis
from replaybuf.rules.limits import Limits
from replaybuf.rules.policies import ReplayPolicy, parse_order
from replaybuf.rules.query import LogicNode, Node, Query, ScalarNode, parse
from replaybuf.rules.transitions import Tally, sizes_of
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import (
    KEEP_CHECKPOINTS,
    LEASE_SECONDS,
    UNSET,
    ByGroup,
    Changes,
    Checkpoint,
    FillingGroup,
    Leased,
    R,
    Refresh,
    StorageItem,
    Unset,
    check_database,
)
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.staleness import EXPIRING_STATUSES, ExpiryRule
from replaybuf.values.rollouts.statuses import StatusLike

#: A status as it was given.
S = TypeVar("S", bound=StatusLike)


class ReplayBuffer(Generic[R]):
    """Holds groups of rollouts between generation and training. `R` is the class of the rollouts, for type checkers.

    Opens its storage at first use. Every coroutine may be called from any event loop and is safe to cancel: either the
    caller has the groups or the store has them. Usually built by `ReplayBufferConfig(...).build()`.
    """

    def __init__(
        self,
        storage: SQLStorage,
        *,
        put_timeout: float | None = PUT_TIMEOUT,
        keep_checkpoints: int | None = KEEP_CHECKPOINTS,
    ) -> None:
        self.storage = storage
        self.rollout_type: RolloutType = storage.codec.rollout_type
        self._keep_checkpoints = check_most(keep_checkpoints, "keep_checkpoints", 1)
        self.waits = Waits(storage)
        self.putting = Putting(storage, self.waits, put_timeout)
        self.cursors = Cursors(self.putting)

    @property
    def policy(self) -> ReplayPolicy:
        """The policy by which groups are drawn."""
        return self.storage.rules.sampler

    @property
    def limits(self) -> Limits:
        """The limits of a task: its number of groups, the draws of each group, and their rate."""
        return self.storage.rules.limits

    @property
    def durable(self) -> bool:
        """Whether groups outlive this process, and other processes can open the same buffer."""
        return self.storage.durable

    @property
    def worker(self) -> str:
        """The worker name recorded with puts and draws: that of `working_as`, else the config's, else "host:pid"."""
        return self.storage.worker

    async def __aenter__(self) -> Self:
        storage = self._open_store
        try:
            await storage.open()
        except BaseException:
            await self.close()  # `__aexit__` isn't called
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Commit the pending puts, end all waits with ClosedError, and release the database. Idempotent."""
        await self.storage.close()

    def __reduce__(self) -> str:
        raise InputError(reason="not picklable")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage!r}, policy={self.policy.name!r})"

    def _repr_html_(self) -> str:
        """Return a table of the groups by task and status for notebooks. Blocks for the time of one query."""
        if self.storage.closed:
            return units.html_table(f"{self!r}, closed", (), ())
        groups: dict[tuple[str, Status], list[int]] = {}
        for (task, status, tally), n in sorted(self.storage.group_counts().items()):
            groups.setdefault((task, status), [0, 0])[tally == Tally.LEASED] = n
        rows = [(task, str(status), *numbers) for (task, status), numbers in groups.items()]
        return units.html_table(repr(self), ("task", "status", "groups", "leased"), rows)

    def __bool__(self) -> bool:
        """Return True, also for an empty buffer: `if buffer:` tests for None."""
        return True

    def __len__(self) -> int:
        """Return the number of groups in the buffer, of all tasks and statuses. Blocks for the time of one query."""
        return len(self._open_store)

    # Putting

    @traced("replaybuf.put", of_uid)
    async def put(
        self,
        items: Sequence[R],
        task_name: str,
        *,
        replaces: Iterable[int] = (),
        timeout: float | Unset | None = UNSET,
        **options: Unpack[FillOptions],
    ) -> int | None:
        """Store a group of rollouts and return its uid; when it returns, the group is committed.

        The options are those of `FillOptions`. An entry of `items` may be a list, of the segments of one rollout;
        `parents` has for each segment the number of an earlier one that it continues, or None (`docs/segments.md`).

        `model_step` fills `response_model_steps` up to the length of `response_ids`, or, for the text of a `response`
        without token ids, with one step; `current_train_step` recomputes `seq_staleness`. Rollouts of completed,
        aborted or expired groups expire when their staleness is at least `stale_threshold`, or when none of their
        trainable tokens has a staleness below `token_stale_threshold`: they lose their response and wait as EXPIRED to
        be generated again; with a train step, so do those that were EXPIRED before (put without one, at the next
        refresh). With `expired_groups_retryable=False` the group is dropped instead, and counted (`dropped`), also when
        it was EXPIRED before. In kept responses, tokens at or over `token_stale_threshold` are masked out
        (`response_mask` 0). The rollouts given are changed in place accordingly. Other threads must not change them
        before the call returns: lists that become longer or shorter are refused (RolloutError), the rest is torn.

        A group with the same `key` in the same task is replaced. `replaces` are the uids of groups that are removed in
        the same transaction, also if the new one is dropped; results of leased groups are stored by the lease
        (`Lease.finish`, `Lease.save`). `tags` can be queried (`tags.NAME`). `status` overrides the status derived from
        the rollouts: COMPLETED, if all are, or if their class has no status, or if they have responses and rewards and
        their status was never set. Returns None for an empty list and for a dropped group. With `keep_unfit=False` a
        FILTERED or FAILED group isn't stored, either, but counted (`pruned`).

        With `min_size` a group is COMPLETED if so many of its rollouts are, and the others FAILED or FILTERED: these
        are stored as a FAILED group, for SQL, and never drawn with it.

        With `group` (a name that no other group of the buffer has) and `size` the put is of one finished rollout of a
        group that fills: rollouts come one by one, from any process, each committed by itself, with its `index` or a
        free one. They wait as FILLING (`filling`). The last one makes them a group, in their order, by the options of
        that put; its `key` is the name. Without `min_size` one FAILED rollout fails the group; `fill_seconds` of the
        config ends the wait for rollouts that are missing. Raises ConflictError for an index that is there, a group
        that is full or has left, and another size, min_size or task than its first rollout had.

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
        each: Sequence[FillOptions] | None = None,
        timeout: float | Unset | None = UNSET,
        **options: Unpack[FillOptions],
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
        overrides: Sequence[FillOptions] = [FillOptions()] * len(groups) if each is None else check_list(each, "each")
        for name, entries in (("task_name", names), ("each", overrides)):
            if len(entries) != len(groups):
                raise InputError(f"{name} has {len(entries)} entries for {len(groups)} groups: give one for each")
        if not all(isinstance(entry, Mapping) for entry in overrides):
            raise InputError(f"each must be a list of dicts with options of puts, got {shown(each)}")
        merged = [FillOptions(**{**options, **entry}) for entry in overrides]
        return await self.putting.put_many(groups, names, merged, timeout)

    # Taking

    async def get(
        self,
        batch_size: int,
        task_name: str,
        group_status: StatusLike = Status.COMPLETED,
        **options: Unpack[DrawOptions],
    ) -> list[list[R]]:
        """Take up to `batch_size` groups of a task in the policy's order, and remove them from the buffer.

        The same as `take_batch` for one task: with a timeout it waits for `batch_size` groups, or for `at_least`. A
        size of 0 gives an empty list.
        """
        batch, _ = await self.take_batch({check_task_name(task_name): batch_size}, group_status=group_status, **options)
        return batch.get(task_name, [])

    async def take_batch(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: StatusLike = Status.COMPLETED,
        **options: Unpack[DrawOptions],
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

        `mix={"replay": 0.25}` draws this share of the groups, rounded, from those that were drawn before and are kept
        or, after these, archived, the others from those that weren't (`{"replay": {"math": 0.25}}`: by task; others
        have no old ones). Archived ones stay archived. Fresh ones take the place of missing old ones, and `at_least`
        and the wait are for fresh ones alone.

        `current_train_step` is the train step of this batch, recorded with the draw (the view `batches`) and with kept
        groups (`trained_step`); default: the step of the last refresh.
        """
        drawn = await self._request(sizes, group_status, **options).take(self.storage, self.waits)
        batch = {task_name: [item.item for item in items] for task_name, items in drawn.items()}
        return batch, {task_name: len(groups) for task_name, groups in batch.items()}

    async def sample(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: StatusLike = Status.COMPLETED,
        beta: float | None = None,
        **options: Unpack[DrawOptions],
    ) -> dict[str, list[StorageItem[R]]]:
        """Take groups as `take_batch` does, with their metadata: `uid`, `priority`, `times_sampled`, and so on.

        With `beta` each group also has the probability p with which it was drawn (`probability`) and its importance
        `weight` (N p)^-beta, N being the number of groups drawn from (Schaul et al., "Prioritized experience replay",
        2016). p is priority / sum of priorities for prioritized draws and 1/N otherwise. Groups of priority 0 are drawn
        after all others, with p = 1/N0, N0 being their number. Prioritized draws then read the priorities of all groups
        of the task, and draws with `where` count those that match.

        With `mix`, p is multiplied by the share of the batch that its stratum got (fresh, kept, archived), N is the
        number of groups in all strata drawn from, and p and the priorities are those within the stratum: so that
        with beta=1 weighted means are those of a stratified sample, (N_s / N) / (n_s / n) (Owen, "Monte Carlo theory,
        methods and examples", 2013, section 8.4).
        """
        return await self._request(sizes, group_status, beta=beta, **options).take(self.storage, self.waits)

    def lease_batch(
        self,
        sizes: Mapping[str, int],
        *,
        group_status: StatusLike = Status.COMPLETED,
        beta: float | None = None,
        seconds: float = LEASE_SECONDS,
        heartbeat: bool = True,
        deferred: Iterable[str] = (),
        **options: Unpack[DrawOptions],
    ) -> Leasing[R]:
        """Draw groups as `sample` does, but only hide them until the lease is acknowledged.

            async with buffer.lease_batch({"math": 64}, timeout=600) as lease:
                await train(lease.batch["math"])

        Leaving the block acknowledges all open groups. An exception gives them back as a failed delivery, cancellation
        without counting one. If this process dies, the groups become drawable `seconds` later; while it lives, a
        heartbeat in the database's thread renews the lease, however long the block takes. `heartbeat=False` leaves that
        to `lease.extend()`. A group is set aside as FAILED after `max_deliveries` failed deliveries. Leaving the block
        raises LeaseLostError if the lease had ended and no longer holds the groups.

        The arrays and tensors in the fields `deferred` of the rollouts, at any depth, aren't read: an `ArrayHandle`
        takes the place of each. It can be sent to the process that needs the array, and is valid as long as the lease.
        Only payloads in a place are read in part: handles of those in the database carry their bytes.

        `await` instead of `async with` gives a Lease to be settled by hand.
        """
        later = self.rollout_type.deferrable(check_list(deferred, "deferred"))
        request = self._request(sizes, group_status, beta=beta, deferred=later, **options)
        duration = check_seconds(seconds, "seconds")
        storage = self.storage

        async def begin() -> Lease[R]:
            leased = await request.lease(storage, self.waits, duration)
            return Lease(self.putting, leased, duration, heartbeat=heartbeat)

        return Leasing(begin)

    def adopt(self, handle: Leased, *, seconds: float = LEASE_SECONDS, heartbeat: bool = True) -> Lease[R]:
        """Continue a lease of another process in this one, given its `Lease.handle`.

        Its items have no rollouts. `seconds` and `heartbeat` are as in `lease_batch`. The store isn't accessed:
        `await lease.extend()` checks that the lease hasn't ended, `acknowledge` that it still holds its groups. A lease
        of another database raises LeaseLostError, here or, if this buffer isn't open yet, in its first call.
        """
        if not isinstance(handle, Leased):
            raise InputError(f"handle must be the handle of a Lease, got {type(handle).__name__}")
        check_database(handle, self._open_store.identity)
        return Lease(self.putting, handle, check_seconds(seconds, "seconds"), heartbeat=heartbeat)

    async def is_ready(
        self,
        sizes: Mapping[str, int],
        group_status: StatusLike = Status.COMPLETED,
        *,
        where: Query | None = None,
    ) -> bool:
        """Return whether `sizes[task]` groups with the status could be drawn of every task."""
        return await self.waits.ready(self._request(sizes, group_status, where=where, at_least=sizes).draw)

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
        request = self._request(sizes, group_status, where=where, timeout=timeout, at_least=sizes)
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
        return await self.waits.why_not(self._request(sizes, group_status, where=where, at_least=sizes).draw)

    def _request(
        self,
        sizes: Mapping[str, int],
        group_status: StatusLike,
        *,
        beta: float | None = None,
        deferred: frozenset[str] = frozenset(),
        **options: Unpack[DrawOptions],
    ) -> DrawRequest:
        self.storage.check_open()
        statuses = self.rollout_type.statuses
        return DrawRequest.checked(
            sizes, group_status, statuses=statuses, worker=self.worker, beta=beta, deferred=deferred, **options
        )

    # Changing

    async def delete(self, query: Query) -> int:
        """Remove the groups that match and return their number. `{}` removes all."""
        return await self._open_store.delete(self._parse(query))

    async def update(
        self,
        query: Query,
        *,
        status: StatusLike | Unset = UNSET,
        priority: float | Unset = UNSET,
        tags: Tags | Unset | None = UNSET,
    ) -> int:
        """Set the status, priority or tags of the groups that match. Return their number.

        Order, staleness and rollouts stay. A new status clears the `error` and the deliveries of a FAILED group. The
        rollouts of groups that fill keep their status.
        """
        if isinstance(status, Unset) and isinstance(priority, Unset) and isinstance(tags, Unset):
            raise InputError("there is nothing to set: give status=, priority= or tags=")
        node = self._parse(query)
        if not isinstance(status, Unset):
            status = self.rollout_type.statuses.check(status)
            if status == Status.FILLING:
                raise InputError("no group can be made filling: its rollouts are put one by one (put(group=, size=))")
            node = LogicNode("$and", (node, ScalarNode("status", "$ne", Status.FILLING)))
        changes = Changes(
            status=status,
            priority=priority if isinstance(priority, Unset) else check_priority(priority),
            tags=tags if isinstance(tags, Unset) else check_tags(tags),
        )
        return await self._open_store.update(node, changes)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of groups by uid, leased ones included. Return the number of groups found."""
        return await self._open_store.update_priorities(check_priorities(priorities))

    async def annotate(self, annotations: ByGroup, *, train_step: int | None = None) -> int:
        """Write what a trainer has found out about groups that were drawn, by uid. Return the number of groups.

            await buffer.annotate({17: {"kl": 0.01}, 18: [{"advantage": 0.7}, {"advantage": -0.7}]})

        A dict is about the group, a list has one for each rollout (or segment), in order. Names are identifiers. Values
        are finite numbers, booleans, texts of up to 200 characters, None for nothing, and, of a rollout, arrays, lists
        or tensors with a number for each response token, kept as float32. A name replaces what the group has under it.

        Annotations belong to the group's last draw (for `train_step`), also after the group has left: restores leave
        them, and they are deleted when the config's `history` no longer keeps the draw. Snapshots and exports don't
        have them. Raises InputError, and annotates nothing, if no such draw of a group is recorded, if it has another
        number of rollouts, and for unfit values.
        """
        step = None if train_step is None else check_step(train_step, "train_step")
        try:
            return await self._open_store.annotate(annotations, step)
        except InputError as error:
            raise InputError(f"{error}; nothing was annotated") from error

    @traced("replaybuf.refresh_staleness", lambda expired: {"expired": sum(expired.values())})
    async def refresh_staleness(
        self,
        task_stale_thresholds: Mapping[str, int | None],
        current_train_step: int,
        *,
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

        Dropped groups are appended to the list `dropped`, as by `put`: all of them are in memory then.
        """
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
        if Status.FILLING in chosen:
            raise InputError("groups that fill have no staleness until they are whole: leave the status filling out")
        check_dropped(dropped)
        refreshing = self._open_store.refresh(Refresh(step, rules, chosen, dropped))
        return await (refreshing if dropped is None else shielded(refreshing))

    # Counting and reading

    async def count(self, task_name: str, group_status: StatusLike) -> int:
        """Return the number of groups of a task with this status."""
        lane = (check_task_name(task_name), self.rollout_type.statuses.check(group_status))
        return sizes_of(await self._open_store.tallies()).get(lane, 0)

    async def count_statuses(self, tasks: Iterable[str], statuses: Iterable[S]) -> dict[str, dict[S, int]]:
        """Return the number of groups of each task and status, by the statuses as they were given."""
        tasks = [check_task_name(task) for task in check_list(tasks, "tasks")]
        checked = {status: self.rollout_type.statuses.check(status) for status in check_list(statuses, "statuses")}
        counts = sizes_of(await self._open_store.tallies())
        return {task: {name: counts.get((task, status), 0) for name, status in checked.items()} for task in tasks}

    async def filling(self, task_name: str) -> dict[str, FillingGroup]:
        """Return the groups of a task that fill rollout by rollout (`put(group=, size=)`), by name.

        `missing` has the indices of the rollouts that didn't come yet: after a crash, a worker goes on with these. No
        payload is read.
        """
        groups = await self._open_store.filling_groups(check_task_name(task_name))
        return {name: group for name, group in groups.items() if isinstance(name, str)}

    async def count_where(self, query: Query) -> int:
        """Return the number of groups that match a query."""
        return await self._open_store.count(self._parse(query))

    async def tallies(self) -> Mapping[tuple[str, Status, Tally], int]:
        """Return all counts by task and status, as of one moment; counts that never changed are missing, or 0."""
        return await self._open_store.tallies()

    async def dropped(self, task_name: str) -> int:
        """Return how many groups of a task have been dropped so far because they expired and weren't retryable."""
        task = check_task_name(task_name)
        tallies = await self._open_store.tallies()
        return sum(n for (name, _, tally), n in tallies.items() if name == task and tally == Tally.DROPPED)

    async def metrics(self, *, distributions: bool = True) -> dict[str, Any]:
        """Return counts of groups, as a plain dict with stable names (`buffer_metrics.flatten` makes it flat).

        `tasks[task]` has `buffered` by status, `leased` and `archived` (groups now); totals since the beginning, over
        all processes: `put`, `sampled_new`, `sampled_again`, `taken`, `evicted`, `expired`, `dropped`,
        `deleted`, `replaced`, `set_aside`, `refused`, `returned`, `lease_expired`, `pruned`, `taken_unfinished` (draws
        of groups that aren't completed, which `sampled_new`, `sampled_again` and `taken` leave out). `distributions`
        adds those of `staleness` and `times_sampled` among the completed groups, which reads the metadata of all of
        them. `waits` are those of this buffer object, for `groups` and for `room`: `count`, `seconds`, `timeouts`.
        """
        return await read_metrics(self._open_store, self.waits, distributions=distributions)

    def find(
        self,
        query: Query,
        *,
        order_by: OrderBy = None,
        limit: int | None = None,
        deferred: Iterable[str] = (),
        payloads: bool = True,
    ) -> AsyncIterator[StorageItem[R]]:
        """Yield the groups that match as `StorageItem`s, without consuming them.

        `order_by` is one field or several, with a leading "-" for descending; insertion order breaks ties. Groups
        removed meanwhile are left out. A group that can't be decoded has an empty `item` and the reason in `error`.
        Raises QueryError.

        `ArrayHandle`s take the place of the arrays and tensors in the fields `deferred` of the rollouts. They are valid
        as long as the group is in the buffer.

        With `payloads=False` only the metadata is read, and each `item` is empty.
        """
        fields = self.rollout_type.deferrable(check_list(deferred, "deferred"))
        order, number = parse_order(order_by), check_limit(limit)
        return self._open_store.find(self._parse(query), order=order, limit=number, deferred=fields, payloads=payloads)

    async def check_fence(self) -> None:
        """Raise FencedError if another process has restored the buffer since it was opened here."""
        await self._open_store.check_fence()

    def _parse(self, query: Query) -> Node:
        return parse(query, self.rollout_type.statuses)

    @property
    def _open_store(self) -> SQLStorage:
        """The storage. Raises the errors of its `check_open`."""
        self.storage.check_open()
        return self.storage

    # Files

    async def export(
        self,
        path: str | os.PathLike[str],
        *,
        where: Query | None = None,
        order_by: OrderBy = None,
        limit: int | None = None,
        exact: bool = False,
        force: bool = False,
        progress: OnProgress | None = None,
    ) -> Exported:
        """Write groups to a file, without consuming them: JSONL (.jsonl) or Parquet (.parquet).

        A row is a rollout, with its group's metadata and all its fields, of any class. Their values are JSON's or
        Parquet's, and text where these have no such values. With `exact` the groups' payloads are there, too, and an
        import gives the same rollouts. The groups are those that match `where` when the export begins; left out are
        groups removed before they are read, leased ones, and rollouts of groups that fill. `order_by` is that of
        `find`. Memory use is bounded.

        The file gets its name when it is complete. An existing one is replaced only with `force`. Raises FileError,
        StorageError, AccessError, QueryError and, for Parquet, MissingDriverError without pyarrow. `progress` is called
        as in `save`.
        """
        self.storage.check_open()
        query = self._parse({} if where is None else where)
        chosen = ExportQuery(query, parse_order(order_by), check_limit(limit), bool(exact))
        return await export_file(self.storage, chosen, check_folder(path), force=force, progress=progress)

    async def import_from(
        self,
        source: str | os.PathLike[str],
        *,
        dry_run: bool = False,
        fields: Mapping[str, str] | None = None,
        as_task: str | None = None,
        as_status: StatusLike | None = None,
        again: bool = False,
        progress: OnProgress | None = None,
    ) -> Imported:
        """Put the groups of a file, each exactly once: an export of ours, or others' rows.

        The file is read to its end first, and nothing of an invalid one is put. Then groups are put in batches; an
        import that failed, was cancelled or killed continues there when it is repeated, and groups that were imported
        before are skipped, unless `again`. With `dry_run` the result only says what would be put.

        In others' rows, `fields` are the columns of our fields ({"response": "completion"}), `as_task` is the task of
        rows that don't name one, and `as_status` the status of all.

        The limits hold, without waiting for room: FullError is raised, and groups already put are kept. `progress` is
        called as in `save`, for each of the two passes; in the first the total is 0 until the file's end. Raises
        FileError with the position of a fault in the file, AccessError, InputError, ConflictError while another process
        imports the same file, MissingDriverError, and the errors of `put`.
        """
        self.storage.check_open()
        status = None if as_status is None else self.rollout_type.statuses.check(as_status)
        names = None if issubclass(self.rollout_type.cls, dict) else FIELDS | self.rollout_type.names
        mapping = ColumnMapping({} if fields is None else fields, as_task, status, names)
        file = RolloutFile(check_path(source, "file"), mapping)
        with working_as(self.worker):
            return await import_from(self.storage, file, again=again, dry_run=dry_run, progress=progress)

    # Checkpoints

    @traced("replaybuf.checkpoint", lambda result: {"groups": result.groups})
    async def checkpoint(self, step: int) -> Checkpoint:
        """Make a checkpoint of the buffer, for a `restore` to this train step; call this when the weights are saved.

        Only metadata is copied, not payloads: some milliseconds for 10,000 groups of any size. Leased groups are
        included as if they were given back: acknowledge a batch before the checkpoint of its step. Cursors of prompt
        ledgers are included. A checkpoint of the same step is replaced. The last `keep_checkpoints` are kept (a setting
        of the config; default 3). Their payloads take space until they are dropped.
        """
        return await self._open_store.checkpoint(check_whole(step, "step"), self._keep_checkpoints)

    @traced("replaybuf.restore", lambda result: {"groups": result.groups})
    async def restore(self, step: int) -> Checkpoint:
        """Restore the buffer exactly as it was at the checkpoint of this train step, in one transaction.

        Groups taken since are back, with their order, staleness, priority, number of draws, status and tags. Groups put
        since are removed. Draws with a seed continue as they did from there. Raises CheckpointError if there is no
        checkpoint of this step.

        All other processes that have the buffer open belong to the earlier run and are fenced off: their puts, draws,
        waits and acknowledgements raise FencedError until they build the buffer again.
        """
        return await self._open_store.restore(check_step(step, "step"))

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the step checkpoints, in the order in which they were made."""
        return await self._open_store.checkpoints()

    async def drop_checkpoint(self, step: int) -> None:
        """Drop the checkpoint of this train step, and the payloads that only it needs. Raises CheckpointError."""
        await self._open_store.drop_checkpoint(check_step(step, "step"))

    # Snapshots

    async def save(
        self,
        path: str | os.PathLike[str],
        *,
        progress: OnProgress | None = None,
    ) -> Path:
        """Write a self-contained snapshot into the folder `path`, without stopping writers. Return its file.

        Payloads outside the database (`payloads` in the config) are in the snapshot, too.

        The file gets its name only when it is complete, and replaces an older snapshot; anything else of that name
        stays as it is (SnapshotError). `progress(Progress(groups, total, bytes))` is called at the beginning, at the
        end, and at most five times a second in between. It is called in the database's thread, not the caller's, and
        must not block. An exception from it ends the save (ReplayBufError), and nothing is written.
        """
        return await self._open_store.save(check_folder(path), {"policy": self.policy.name}, progress)

    async def resume(self, path: str | os.PathLike[str], *, progress: OnProgress | None = None) -> None:
        """Load the snapshot in the folder `path` into this buffer, all of it or nothing.

        Large payloads are copied to the place of this buffer's payloads.

        Raises SnapshotError if the buffer isn't empty, SnapshotError or StorageError if the snapshot is of another
        policy or schema, and SnapshotError if it is damaged or truncated. `progress` is called as in `save`.
        """
        await self._open_store.resume(check_folder(path), {"policy": self.policy.name}, progress)
