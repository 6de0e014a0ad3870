"""Train steps on leased batches, acknowledged after the optimizer's step."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Self

from torch.utils.data import DataLoader

from replaybuf.buffer.lease import Lease
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncLease, end, run
from replaybuf.common.checks import check_whole
from replaybuf.errors import InputError, LeaseLostError, NotReadyError, ReplayBufError
from replaybuf.integrations.torch.dataset import NONE, RUNNING, STOPPED, GroupDataset, Loaded, LoadedBatch

_logger = logging.getLogger("replaybuf.integrations.torch")


class Step(SyncLease[Any]):
    """A batch to train on, and its lease: `batch` is the result of `collate`, `items` has the groups by task.

    The items are without rollouts.

        loss(step.batch).backward()
        optimizer.step()
        step.acknowledge()

    Or a `with step:` block, which acknowledges at its end, and gives the groups back as a failed delivery when it
    raises. Until then this process renews the lease; if it dies, the groups come back.

    `train_step` is the train step of the batch, as counted by `leased_steps`, for which the groups are acknowledged; it
    may be set. If None, the step of the last `refresh_staleness` counts.
    """

    batch: Any = None

    def __init__(self, batch: Any, lease: Lease[Any], *, train_step: int | None) -> None:
        super().__init__(lease)
        self.batch, self.train_step = batch, train_step

    def __repr__(self) -> str:
        return f"<Step of {self.asynchronous!r}>"

    def acknowledge(self, uids: Iterable[int] | None = None, *, train_step: int | None = None) -> None:
        """Report these groups, or all open ones, as trained on: they are removed, or can be drawn again if reused.

        `train_step` is the step that was trained on them (default: that of this Step). Raises LeaseLostError if the
        lease had ended and the groups were passed on; then nothing is changed.
        """
        super().acknowledge(uids, train_step=self.train_step if train_step is None else train_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.acknowledge(self.open)
        else:
            with contextlib.suppress(ReplayBufError):  # on failure, the groups come back when the lease ends
                self.give_back_after(error)


@contextlib.contextmanager
def leased_steps(loader: DataLoader[Any], *, train_step: int | None = None) -> Iterator[Generator[Step]]:
    """Iterate over a DataLoader of a GroupDataset: yields an iterator of Steps.

        with leased_steps(loader, train_step=101) as steps:
            for step in steps: ...

    `train_step` is the train step of the first batch, and each further batch is of the next one: groups are
    acknowledged for it (`Step.train_step`), however long before a worker has leased them.

    This process takes over the leases of the batches it receives; a batch whose lease had ended by then isn't yielded.
    At the end of the block, however it ends, workers stop, and all open groups are given back: those of steps, and
    those that workers have leased in advance. Errors of workers are raised here. Raises InputError for a DataLoader
    that would hold groups back or split batches.
    """
    dataset = _check_loader(loader)
    first_step = None if train_step is None else check_whole(train_step, "train_step")
    if dataset.handover.state != NONE:
        raise InputError("this GroupDataset is being iterated over: end that pass first, or make another dataset")
    dataset.handover.state = RUNNING
    try:
        with dataset.opened() as buffer:
            steps: list[Step] = []
            iterator = _steps(loader, dataset, buffer, steps, first_step)
            try:
                yield iterator
            finally:
                iterator.close()
                for step in steps:
                    _give_back(step.asynchronous)
    finally:
        dataset.handover.state = NONE


def _steps(
    loader: DataLoader[Any], dataset: GroupDataset, buffer: ReplayBuffer[Any], steps: list[Step], first_step: int | None
) -> Generator[Step]:
    """Yield a Step for each batch, and keep the open ones in `steps`; the first one is of train step `first_step`."""
    batches, numbers = iter(loader), itertools.repeat(None) if first_step is None else itertools.count(first_step)
    try:
        while (loaded := _next_batch(batches, dataset)) is not None:
            steps[:] = [step for step in steps if step.open]
            lease = buffer.adopt(loaded.leased, seconds=dataset.seconds)
            if _holds_groups(lease, time.monotonic() - loaded.leased_at):
                steps.append(Step(loaded.batch, lease, train_step=next(numbers)))
                yield steps[-1]
    finally:
        dataset.handover.state = STOPPED
        errors = 0
        while errors <= 2 * loader.num_workers:  # a worker may raise once, and then be reported dead once
            try:
                loaded = _next_batch(batches, dataset)
            except Exception as error:  # batches leased and not sent come back when the leases end
                errors += 1
                _logger.debug("a worker ended with %s", error)
                continue
            if loaded is None:
                break
            _give_back(buffer.adopt(loaded.leased, heartbeat=False))


def _next_batch(batches: Iterator[Loaded], dataset: GroupDataset) -> LoadedBatch | None:
    """Return the next batch, or None at the end. Raises NotReadyError, and errors of workers."""
    with dataset.handover.waiting():
        loaded = next(batches, None)
    if isinstance(loaded, NotReadyError):
        raise loaded
    return loaded


def _holds_groups(lease: Lease[Any], age: float) -> bool:
    """Return whether a lease that began at most `age` seconds ago still holds its groups."""
    if age < lease.seconds / 2:
        return True
    try:
        run(lease.extend())
    except LeaseLostError as error:
        _logger.warning("a batch isn't trained on: %s", error)
        lease.stop()
        return False
    return True


def _give_back(lease: Lease[Any]) -> None:
    if not lease.open:
        return
    try:
        end(lease.give_back())
    except ReplayBufError as error:  # the groups come back when the lease ends
        _logger.warning("%r could not be given back: %s", lease, error)
        lease.stop()


def _check_loader(loader: DataLoader[Any]) -> GroupDataset:
    """Return the dataset of a DataLoader; raise InputError for one with unsuitable options."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, GroupDataset):
        raise InputError(
            "leased_steps needs the DataLoader of a GroupDataset, got "
            + (f"one of {type(dataset).__name__}" if dataset is not None else type(loader).__name__)
        )
    workers: int = loader.num_workers
    if loader.batch_size is not None or loader.batch_sampler is not None:
        raise InputError("the GroupDataset makes the batches: build its DataLoader with batch_size=None")
    if workers > 0 and isinstance(dataset.source, ReplayBuffer):
        raise InputError("workers open a buffer of their own: give the GroupDataset a config, or num_workers=0")
    if workers > 1 and getattr(loader, "in_order", True):
        raise InputError(
            "with several workers build the DataLoader with in_order=False (torch 2.6 or later): in order, the trainer "
            "waits for one worker while another holds the groups"
        )
    return dataset
