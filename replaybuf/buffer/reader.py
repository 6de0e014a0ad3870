"""The part of a buffer that moves no groups: opening and closing, counting, reading, metrics, and copies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

from replaybuf.buffer import spans
from replaybuf.buffer.metrics import Meter
from replaybuf.buffer.waits import Waits, sizes_of
from replaybuf.checks import (
    check_folder,
    check_keep,
    check_limit,
    check_list,
    check_no_url,
    check_step,
    check_task_name,
)
from replaybuf.errors import (
    ClosedError,
    InputError,
    MissingSnapshotError,
    NotPicklableError,
    SnapshotError,
    SnapshotMismatchError,
)
from replaybuf.files.exporting import Chosen, Exported, export_files
from replaybuf.files.frames import to_dataset, to_pandas
from replaybuf.files.rows import RowsOf
from replaybuf.progress import OnProgress
from replaybuf.query import Node, Query, parse
from replaybuf.redact import redact_path
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.statuses import StatusLike
from replaybuf.rules.level import Level
from replaybuf.rules.limits import Limits
from replaybuf.rules.policies import OrderTerm, ReplayPolicy, parse_order
from replaybuf.rules.tallies import Tally, levels
from replaybuf.storage.contract import CheckpointStorage, CopyStorage, GroupStorage, require
from replaybuf.storage.values import Checkpoint, R, StorageItem
from replaybuf.tracing import traced
from replaybuf.worker_name import check_worker, worker_name

SNAPSHOT_FILE = "replaybuf.sqlite"

#: The number of step checkpoints kept by default.
KEEP_CHECKPOINTS = 3


class BufferReader(Generic[R]):
    """The methods of a buffer that move no groups. `ReplayBuffer` adds the others."""

    def __init__(
        self,
        storage: GroupStorage,
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

    @property
    def policy(self) -> ReplayPolicy:
        """The policy by which groups are drawn."""
        return self.storage.rules.sampler

    @property
    def limits(self) -> Limits:
        """How many groups of a task the buffer holds, how often they are drawn, and at what rate."""
        return self.storage.rules.limits

    @property
    def durable(self) -> bool:
        """Whether groups outlive this process, and others can open the same buffer."""
        return self.storage.durable

    @property
    def worker(self) -> str:
        """The name under which groups are put and drawn: that of `working_as`, else the config's, else "host:pid"."""
        return worker_name(self._worker)

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
        """Commit the pending puts, end all waits with ClosedError, and release the database. Idempotent."""
        self._closed = True
        await self.storage.close()

    def __reduce__(self) -> str:
        raise NotPicklableError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage!r}, policy={self.policy.name!r})"

    def __bool__(self) -> bool:
        """Return True, also for an empty buffer: `if buffer:` tests whether there is one."""
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

    async def count_statuses(
        self, tasks: Iterable[str], statuses: Iterable[StatusLike]
    ) -> dict[str, dict[Status, int]]:
        """Return the number of groups of each task and status."""
        self._check_open()
        tasks = [check_task_name(task) for task in check_list(tasks, "tasks")]
        wanted = [self.rollout_type.statuses.check(status) for status in check_list(statuses, "statuses")]
        counts = sizes_of(await self.storage.tallies())
        return {task: {status: counts.get((task, status), 0) for status in wanted} for task in tasks}

    async def count_where(self, query: Query) -> int:
        """Return the number of groups that match a query."""
        self._check_open()
        return await self.storage.count(self._parsed(query))

    async def tallies(self) -> Mapping[tuple[str, Status, Tally], int]:
        """Return all counts by task and status, at one moment; those that never changed are missing, or 0."""
        self._check_open()
        return await self.storage.tallies()

    async def levels(self, tasks: Iterable[str]) -> dict[str, Level]:
        """Return the numbers of each task that `limits` look at, at one moment."""
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
    ) -> AsyncIterator[StorageItem[R]]:
        """Yield the groups that match as `StorageItem`s, without consuming them.

        `order_by` is one field or several, with a leading "-" for descending; insertion order breaks ties. Groups that
        leave the buffer meanwhile are left out. A group that can't be decoded has an empty `item` and the reason in
        `error`. Raises QueryError.
        """
        self._check_open()
        return self.storage.find(self._parsed(query), order=parse_order(order_by), limit=check_limit(limit))

    # Files

    async def export(
        self,
        path: str | os.PathLike[str],
        *,
        where: Query | None = None,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
        rows: RowsOf = "rollouts",
        max_bytes: int | None = None,
        force: bool = False,
        progress: OnProgress | None = None,
    ) -> Exported:
        """Write groups to a file, without consuming them: JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet or Arrow.

        A row is a rollout or a group (`rows="groups"`), with the group's metadata and all fields of the rollouts, of
        any class; `replaybuf import` makes the same groups of it. The groups are those that match `where` when the
        export begins; those that leave before they are read are left out and counted. Memory doesn't grow with them.

        The file has its name when it is complete. From `max_bytes` on another one is begun: NAME-00000-of-00003.jsonl.
        A file that is there is replaced only with `force`. Raises FileThereError, DiskFullError, AccessError,
        QueryError and, for Parquet and Arrow, MissingDriverError without pyarrow. `progress` is called as in `save`.
        """
        chosen = self._chosen(where, order_by, limit, rows)
        most = None if max_bytes is None else check_limit(max_bytes)
        return await export_files(
            self.storage, chosen, check_folder(path), max_bytes=most, force=force, progress=progress
        )

    async def to_pandas(
        self,
        *,
        where: Query | None = None,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
        rows: RowsOf = "rollouts",
    ) -> Any:
        """Return groups as a pandas DataFrame with the rows of `export`; all of them are in memory. Needs pandas."""
        return await to_pandas(self.storage, self._chosen(where, order_by, limit, rows))

    async def to_dataset(
        self,
        folder: str | os.PathLike[str],
        *,
        where: Query | None = None,
        order_by: str | OrderTerm | Iterable[str | OrderTerm] | None = None,
        limit: int | None = None,
        rows: RowsOf = "rollouts",
        progress: OnProgress | None = None,
    ) -> Any:
        """Return groups as a Hugging Face `datasets.Dataset`, which reads its rows from `folder` when they are used.

        The folder gets Arrow files, written as by `export`, and may be deleted after the dataset. Needs the packages
        datasets and pyarrow. Raises what `export` raises.
        """
        return await to_dataset(
            self.storage, self._chosen(where, order_by, limit, rows), check_folder(folder), progress
        )

    def _chosen(self, where: Query | None, order_by: Any, limit: int | None, rows: RowsOf) -> Chosen:
        self._check_open()
        if rows not in ("rollouts", "groups"):
            raise InputError(f"rows must be 'rollouts' or 'groups', not {rows!r:.100}")
        return Chosen(self._parsed({} if where is None else where), parse_order(order_by), check_limit(limit), rows)

    def _parsed(self, query: Query) -> Node:
        return parse(query, self.rollout_type.statuses)

    # Checkpoints

    async def check_fence(self) -> None:
        """Raise FencedError if another process has restored the buffer since it was opened here."""
        self._check_open()
        await self.waits.check_fence()

    @traced("replaybuf.checkpoint", spans.of_step, spans.of_checkpoint)
    async def checkpoint(self, step: int) -> Checkpoint:
        """Keep the buffer as it is now, for a `restore` to this train step; call this when the weights are saved.

        Only metadata is copied, not payloads: some milliseconds for 10,000 groups of any size. Groups that are leased
        at this moment are kept as if they were given back: acknowledge a batch before the checkpoint of its step.
        Cursors of prompt ledgers are included. A checkpoint of the same step is replaced. The `keep_checkpoints` made
        last are kept (a setting of the config; default 3). Their payloads take space until they are dropped.
        """
        self._check_open()
        return await self._checkpoints("checkpoint()").checkpoint(check_step(step, "step"), self._keep_checkpoints)

    @traced("replaybuf.restore", spans.of_restore, spans.of_checkpoint)
    async def restore(self, step: int, *, keep_new: bool = False) -> Checkpoint:
        """Make the buffer exactly what it was at the checkpoint of this train step, in one transaction.

        Groups taken since are back, with their order, staleness, priority, number of draws, status and tags. Groups put
        since are gone. Draws with a seed continue as they did from there. Raises CheckpointError if there is no
        checkpoint of this step.

        With `keep_new`, groups put since stay, as if they had not been drawn since, and the cursors of prompt ledgers
        stay where they are. Groups that were put and taken since are back only if an archive has kept them.

        All others that have the buffer open belong to the earlier run and are fenced off: their puts, draws, waits and
        acknowledgements raise FencedError until they build the buffer anew.
        """
        self._check_open()
        return await self._checkpoints("restore()").restore(check_step(step, "step"), keep_new=keep_new)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the step checkpoints, in the order in which they were made."""
        self._check_open()
        return await self._checkpoints("checkpoints()").checkpoints()

    async def drop_checkpoint(self, step: int) -> None:
        """Remove the checkpoint of this train step, and the payloads that only it needs. Raises CheckpointError."""
        self._check_open()
        await self._checkpoints("drop_checkpoint()").drop_checkpoint(check_step(step, "step"))

    # Snapshots

    async def save(self, path: str | os.PathLike[str], *, progress: OnProgress | None = None) -> Path:
        """Write a self-contained snapshot into the folder `path`, without stopping writers. Return its file.

        The file gets its name only when it is complete. `progress(Progress(groups, total, bytes))` is called at the
        beginning, at the end, and at most five times a second in between. It is called in the database's thread, not
        the caller's, and must not block. An exception from it ends the save, and nothing is written.
        """
        self._check_open()
        folder, copies = check_folder(path), self._copies("save()")
        file = await asyncio.to_thread(snapshot_file, folder, make=True)
        await copies.save(str(file), {"policy": self.policy.name}, progress)
        return file

    async def resume(self, path: str | os.PathLike[str], *, progress: OnProgress | None = None) -> None:
        """Load the snapshot in the folder `path` into this buffer, all of it or nothing.

        Raises NotEmptyError if the buffer isn't empty, MissingSnapshotError, SnapshotMismatchError or SchemaError if
        the snapshot is of another policy or schema, and SnapshotError if it is damaged or was cut short.
        `progress` is called as in `save`.
        """
        self._check_open()
        folder, copies = check_folder(path), self._copies("resume()")
        file = await asyncio.to_thread(snapshot_file, folder)
        await copies.resume(str(file), {"policy": self.policy.name}, progress)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole buffer as a dict of plain values, for frameworks that want one. Blocks; `save` doesn't."""
        self._check_open()
        return {"policy": self.policy.name, "storage": self._copies("state_dict()").state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a dict from `state_dict` into this buffer, which must be empty. Blocks."""
        self._check_open()
        copies = self._copies("load_state_dict()")
        if not isinstance(state, Mapping) or "storage" not in state:
            raise SnapshotMismatchError("expected a dict from ReplayBuffer.state_dict()")
        if state.get("policy") != self.policy.name:
            raise SnapshotMismatchError(
                f"the state was saved with policy {state.get('policy')!r}, and this buffer has {self.policy.name!r}"
            )
        copies.load_state_dict(state["storage"])

    def _checkpoints(self, call: str) -> CheckpointStorage:
        return require(self.storage, CheckpointStorage, call)

    def _copies(self, call: str) -> CopyStorage:
        return require(self.storage, CopyStorage, call)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError


def snapshot_file(folder: Path, *, make: bool = False) -> Path:
    """Return the file of the snapshot in a folder; `make` the folder for a new one. Raises SnapshotError.

    MissingSnapshotError where there should be a snapshot, and is none.
    """
    check_no_url(folder)
    file, shown = folder / SNAPSHOT_FILE, f"{redact_path(str(folder)):.200}"
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        elif folder.is_file():
            inside = redact_path(str(folder.parent))
            raise MissingSnapshotError(f"{shown} is a file: give the folder that it is in, {inside}")
        elif not file.is_file():
            raise MissingSnapshotError(f"there is no snapshot in {shown}: expected the file {SNAPSHOT_FILE}")
    except MissingSnapshotError:
        raise
    except OSError as error:
        what = "make" if make else "look into"
        raise SnapshotError(f"can't {what} the folder {shown} for the snapshot: {error.strerror}") from error
    return file
