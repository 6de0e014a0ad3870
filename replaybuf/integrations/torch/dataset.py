"""The dataset: batches of leased groups, for a DataLoader with any number of workers."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from replaybuf.buffer.drawing import AtLeast, DrawRequest
from replaybuf.buffer.lease import Lease, Leasing
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncReplayBuffer, end, run
from replaybuf.common.checks import check_at_least, check_list, check_sizes, check_timeout
from replaybuf.common.redact import redact
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, InputError, NotReadyError
from replaybuf.rules.query import Query
from replaybuf.storage.values import LEASE_SECONDS, Leased, StorageItem
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.statuses import StatusLike

#: The states of a pass over the DataLoader. STOPPED tells workers to end, also while they wait for groups.
NONE, RUNNING, STOPPED = range(3)


@dataclass(frozen=True)
class LoadedBatch:
    """A batch sent to the trainer, with its lease.

    `leased_at` is in the host's monotonic time. (torch's own collate functions leave our classes as they are.)
    """

    leased: Leased
    leased_at: float
    batch: Any

    def pin_memory(self) -> LoadedBatch:
        """Return a copy with the batch's tensors in pinned memory; called by the DataLoader."""
        return replace(self, batch=pin_memory(self.batch))


#: Messages of workers: batches, and at the end the error for the trainer's timeout. This is sent like a batch, because
#: torch keeps only the class and the text of an error that a worker raises.
Loaded = LoadedBatch | NotReadyError


class Handover:
    """State shared by the training process and its workers, during one pass at a time over the DataLoader."""

    def __init__(self) -> None:
        self._state = torch.zeros((), dtype=torch.int64).share_memory_()
        self._waiting_since = torch.zeros((), dtype=torch.float64).share_memory_()

    @property
    def state(self) -> int:
        return int(self._state)

    @state.setter
    def state(self, state: int) -> None:
        self._state.fill_(state)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Publish to the workers the time since which the trainer waits for a batch, within the block."""
        self._waiting_since.fill_(time.monotonic())
        try:
            yield
        finally:
            self._waiting_since.zero_()

    @property
    def waited(self) -> float:
        """The seconds of the trainer's current wait; 0 while it trains."""
        since = float(self._waiting_since)
        return time.monotonic() - since if since else 0.0


#: Makes a batch of the groups of a draw: task by task in the order of `sizes`, each with its metadata.
Collate = Callable[[list[StorageItem[Any]]], Any]

# Seconds between checks of `stop` while a worker waits for groups.
_POLL_SECONDS = 0.5
_SHORT_TIMEOUT = 0.01

_WATCH_THREAD = "replaybuf-trainer"  # the thread of a worker that waits for the trainer's end


class GroupDataset(IterableDataset[Loaded]):
    """Batches of `sizes[task]` groups of each task, leased from the buffer of a config.

        dataset = GroupDataset(config, {"math": 64}, collate=Pad(pad_token_id=0))
        loader = DataLoader(dataset, batch_size=None, num_workers=2, in_order=False)
        with leased_steps(loader) as steps:
            for step in steps: ...

    `leased_steps` iterates over the DataLoader, which by itself yields `LoadedBatch`es. Each worker opens a buffer of
    its own from the config; with `num_workers=0` a buffer may stand in place of the config.

    `collate` makes the batch, in the worker, from a list of `StorageItem`s; without it the batch is that list. If it
    raises, the groups are given back as a failed delivery. `group_status`, `where`, `at_least`, `beta`, `seconds` and
    `deferred` are those of `ReplayBuffer.lease_batch`: the groups leased by a killed process come back `seconds` after
    its last lease renewal, and `collate` gets handles in place of arrays in deferred fields, which
    `replaybuf.load_into` replaces by the arrays: in `collate`, or on the rank of a part.

    `timeout` limits the trainer's wait for a batch, in seconds (None: for ever); then NotReadyError says what was
    missing. Waits of workers while the trainer trains don't count. With `timeout=0` a batch has the available groups,
    up to the sizes, and the iteration ends when there are none.
    """

    def __init__(
        self,
        source: ReplayBufferConfig[Any] | ReplayBuffer[Any] | SyncReplayBuffer[Any],
        sizes: Mapping[str, int],
        *,
        collate: Collate | None = None,
        group_status: StatusLike = Status.COMPLETED,
        where: Query | None = None,
        at_least: AtLeast | None = None,
        beta: float | None = None,
        timeout: float | None = 600.0,
        seconds: float = LEASE_SECONDS,
        deferred: Iterable[str] = (),
    ) -> None:
        super().__init__()
        if not isinstance(source, ReplayBufferConfig | ReplayBuffer | SyncReplayBuffer):
            raise InputError(f"source must be a ReplayBufferConfig or a ReplayBuffer, got {type(source).__name__}")
        self.source = source.asynchronous if isinstance(source, SyncReplayBuffer) else source
        self.sizes = check_sizes(sizes)
        if not any(self.sizes.values()):
            raise InputError("sizes asks for no groups: give each task the number of its groups in a batch")
        if at_least is not None and not any(check_at_least(at_least, self.sizes).values()):
            raise InputError("with this at_least a batch could be empty: ask for at least one group")
        self.timeout = timeout
        self.patience = check_timeout(timeout)
        self.seconds = seconds
        self._collate = collate
        self._draw: dict[str, Any] = {"group_status": group_status, "where": where, "at_least": at_least, "beta": beta}
        self._draw["deferred"] = frozenset(check_list(deferred, "deferred"))
        self.handover = Handover()
        self._open_buffer: tuple[int, ReplayBuffer[Any]] | None = None  # with the id of the process
        self._leases: list[Lease[Any]] = []  # of a worker: renewed until its process ends, or the trainer settles them
        buffer = self._build()
        self._begin_lease(buffer, timeout)  # validates the arguments, and leases nothing
        if isinstance(source, ReplayBufferConfig) and not buffer.durable:
            raise ConfigError(
                f"{redact(source.url)} is a private buffer in memory, in which nobody else puts: give the ReplayBuffer "
                "itself, for num_workers=0, or the URL of a SQLite file or of PostgreSQL"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_buffer": None, "_leases": []}

    @contextlib.contextmanager
    def opened(self) -> Iterator[ReplayBuffer[Any]]:
        """Open the buffer in this process, and close it at the end; an already open one is shared.

        A worker leaves it open, for the leases of batches that the trainer has not taken over.
        """
        if self._open_buffer is not None and self._open_buffer[0] == os.getpid():
            yield self._open_buffer[1]
            return
        buffer = self._build()
        self._open_buffer = os.getpid(), buffer
        try:
            yield buffer
        finally:
            if get_worker_info() is None:
                self._open_buffer = None
                if buffer is not self.source:
                    end(buffer.close())

    def __iter__(self) -> Iterator[Loaded]:
        if self.handover.state == NONE:
            raise InputError("iterate over leased_steps(loader), which knows when a batch has been trained on")
        _end_with_the_trainer()
        with self.opened() as buffer:
            yield from self._load(buffer)

    def _load(self, buffer: ReplayBuffer[Any]) -> Iterator[Loaded]:
        while True:
            start = time.monotonic()
            lease = run(self._next_lease(buffer))
            if lease is None:
                return
            if isinstance(lease, NotReadyError):
                yield lease
                return
            batch, leased = self._collate_groups(lease), lease.handle
            if get_worker_info() is not None:
                adopted = buffer.adopt(leased, seconds=self.seconds)  # without the rollouts
                self._leases = [*(lease for lease in self._leases if not lease.lost), adopted]
            yield LoadedBatch(leased, start, batch)
            del lease  # in this process the trainer has taken it over

    def _collate_groups(self, lease: Lease[Any]) -> Any:
        items = [item for task in self.sizes for item in lease.items.get(task, [])]
        if self._collate is None:
            return items
        try:
            return self._collate(items)
        except Exception as error:
            run(lease.give_back_after(error))
            raise

    async def _next_lease(self, buffer: ReplayBuffer[Any]) -> Lease[Any] | NotReadyError | None:
        """Lease the next batch. Return None at the end of the iteration, or the error for the trainer's timeout."""
        handover = self.handover
        if handover.state != RUNNING:
            return None
        if self.patience == 0:
            try:
                lease = await self._begin_lease(buffer, 0)
            except NotReadyError:  # with `at_least`
                return None
            return lease if lease.open else None
        leasing = asyncio.ensure_future(self._begin_lease(buffer, None))
        try:
            while not (await asyncio.wait([leasing], timeout=_POLL_SECONDS))[0]:
                is_over = handover.waited >= self.patience
                if is_over or handover.state != RUNNING:
                    leasing.cancel()
                    await asyncio.wait([leasing])
                    if leasing.cancelled():
                        return await self._last_try(buffer, handover.waited) if is_over else None
            return leasing.result()
        finally:
            leasing.cancel()

    async def _last_try(self, buffer: ReplayBuffer[Any], waited: float) -> Lease[Any] | NotReadyError:
        """Lease the batch if it is available now. Otherwise record and return the timeout of the trainer's wait."""
        try:
            return await self._begin_lease(buffer, _SHORT_TIMEOUT)
        except NotReadyError as error:
            statuses = buffer.rollout_type.statuses
            options = {**self._draw, "statuses": statuses, "worker": buffer.worker}
            request = DrawRequest.checked(self.sizes, timeout=None, **options)
            await buffer.waits.report_timeout(request.draw, time.time() - waited, self.patience, error.diagnosis)
            failure = NotReadyError(f"the trainer waited for {self.patience:g} s: {str(error).partition(': ')[2]}")
            failure.diagnosis = error.diagnosis
            return failure

    def _begin_lease(self, buffer: ReplayBuffer[Any], timeout: float | None) -> Leasing[Any]:
        return buffer.lease_batch(self.sizes, timeout=timeout, seconds=self.seconds, **self._draw)

    def _build(self) -> ReplayBuffer[Any]:
        return self.source if isinstance(self.source, ReplayBuffer) else self.source.build()


def _end_with_the_trainer() -> None:
    """In a worker, exit when the trainer's process ends, so that leases are no longer renewed.

    torch only checks the process that started the worker, which may be a fork server that lives on.
    """
    trainer = None if get_worker_info() is None else multiprocessing.parent_process()
    if trainer is None or any(thread.name == _WATCH_THREAD for thread in threading.enumerate()):
        return

    def watch() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=watch, name=_WATCH_THREAD, daemon=True).start()
