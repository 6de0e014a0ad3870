"""The read-only part of a buffer: opening and closing, counts, queries, metrics."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from replaybuf import notebook
from replaybuf.buffer.metrics import Meter
from replaybuf.buffer.waits import Waits
from replaybuf.checks import ENTERED_ASYNC, check_keep, check_limit, check_list, check_task_name
from replaybuf.errors import ClosedError, InputError, StorageError
from replaybuf.query import Node, Query, parse
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.statuses import StatusLike
from replaybuf.rules.limits import Level, Limits
from replaybuf.rules.policies import OrderTerm, ReplayPolicy, parse_order
from replaybuf.rules.transitions import Tally, levels, sizes_of
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import KEEP_CHECKPOINTS, R, StorageItem
from replaybuf.worker_name import check_worker, worker_name

#: A status as it was given.
S = TypeVar("S", bound=StatusLike)


class BufferReader(Generic[R]):
    """The read-only methods of a buffer. `BufferCopies` and `ReplayBuffer` add the others."""

    def __init__(
        self,
        storage: SQLStorage,
        rollout_type: RolloutType,
        keep_checkpoints: int | None = KEEP_CHECKPOINTS,
        worker: str | None = None,
    ) -> None:
        self.storage = storage
        self.rollout_type = rollout_type
        self._keep_checkpoints = check_keep(keep_checkpoints)
        self._worker = None if worker is None else check_worker(worker)
        self.waits = Waits(storage, self._check_open, lambda: self.worker)
        self._meter = Meter()
        self._closed = False
        self._pid = os.getpid()

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
        return worker_name(self._worker)

    if not TYPE_CHECKING:
        __enter__ = __exit__ = ENTERED_ASYNC

    async def __aenter__(self) -> Self:
        self._check_open()
        try:
            await self.storage.open()
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
        self._closed = True
        await self.storage.close()

    def __reduce__(self) -> str:
        raise InputError(reason="not picklable")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage!r}, policy={self.policy.name!r})"

    def _repr_html_(self) -> str:
        """Return a table of the groups by task and status for notebooks. Blocks for the time of one query."""
        if self._closed:
            return notebook.table(f"{self!r}, closed", (), ())
        groups: dict[tuple[str, Status], list[int]] = {}
        for (task, status, tally), n in sorted(self.storage.places().items()):
            groups.setdefault((task, status), [0, 0])[tally == Tally.LEASED] = n
        rows = [(task, str(status), *numbers) for (task, status), numbers in groups.items()]
        return notebook.table(repr(self), ("task", "status", "groups", "leased"), rows)

    def __bool__(self) -> bool:
        """Return True, also for an empty buffer: `if buffer:` tests for None."""
        return True

    def __len__(self) -> int:
        """Return the number of groups in the buffer, of all tasks and statuses. Blocks for the time of one query."""
        self._check_open()
        return len(self.storage)

    # Counting and reading

    async def count(self, task_name: str, group_status: StatusLike) -> int:
        """Return the number of groups of a task with this status."""
        self._check_open()
        lane = (check_task_name(task_name), self.rollout_type.statuses.check(group_status))
        return sizes_of(await self.storage.tallies()).get(lane, 0)

    async def count_statuses(self, tasks: Iterable[str], statuses: Iterable[S]) -> dict[str, dict[S, int]]:
        """Return the number of groups of each task and status, by the statuses as they were given."""
        self._check_open()
        tasks = [check_task_name(task) for task in check_list(tasks, "tasks")]
        wanted = {status: self.rollout_type.statuses.check(status) for status in check_list(statuses, "statuses")}
        counts = sizes_of(await self.storage.tallies())
        return {task: {given: counts.get((task, status), 0) for given, status in wanted.items()} for task in tasks}

    async def count_where(self, query: Query) -> int:
        """Return the number of groups that match a query."""
        self._check_open()
        return await self.storage.count(self._parsed(query))

    async def tallies(self) -> Mapping[tuple[str, Status, Tally], int]:
        """Return all counts by task and status, as of one moment; counts that never changed are missing, or 0."""
        self._check_open()
        return await self.storage.tallies()

    async def levels(self, tasks: Iterable[str]) -> dict[str, Level]:
        """Return the counts of each task that `limits` depend on, as of one moment."""
        names = [check_task_name(task) for task in check_list(tasks, "tasks")]
        return levels(await self.tallies(), names)

    async def dropped(self, task_name: str) -> int:
        """Return how many groups of a task have been dropped so far because they expired and weren't retryable."""
        self._check_open()
        task = check_task_name(task_name)
        tallies = await self.storage.tallies()
        return sum(n for (name, _, tally), n in tallies.items() if name == task and tally == Tally.DROPPED)

    async def metrics(self, *, distributions: bool = True) -> dict[str, Any]:
        """Return counts of groups, as a plain dict with stable names (`replaybuf.buffer.metrics` can flatten it).

        `tasks[task]` has `buffered` by status, `leased` and `archived` (groups now); totals since the beginning, over
        all processes: `put`, `sampled_new`, `sampled_again`, `taken`, `evicted`, `expired`, `dropped`,
        `deleted`, `replaced`, `set_aside`, `refused`, `returned`, `lease_expired`, `pruned`, `taken_unfinished` (draws
        of groups that aren't completed, which `sampled_new`, `sampled_again` and `taken` leave out); some also as rates
        since the last call (`put_per_second`, ...; 0 at the first). `distributions` adds those of `staleness` and
        `times_sampled` among the completed groups, which reads the metadata of all of them. `waits` are those of this
        buffer object, for `groups` and for `room`: `count`, `seconds`, `timeouts`.
        """
        self._check_open()
        return await self._meter.read(self.storage, self.waits, distributions=distributions)

    def find(
        self,
        query: Query,
        *,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
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
        self._check_open()
        later = self.rollout_type.deferrable(check_list(deferred, "deferred"))
        order, most = parse_order(order_by), check_limit(limit)
        return self.storage.find(self._parsed(query), order=order, limit=most, deferred=later, payloads=payloads)

    async def check_fence(self) -> None:
        """Raise FencedError if another process has restored the buffer since it was opened here."""
        self._check_open()
        await self.waits.check_fence()

    def _parsed(self, query: Query) -> Node:
        return parse(query, self.rollout_type.statuses)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError
        if not self.storage.durable and os.getpid() != self._pid:
            raise StorageError(reason="forked")
