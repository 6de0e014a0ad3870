"""How a loading process hands a leased batch over to the training process.

Each batch is leased by the process that loads it, a worker of the DataLoader or the trainer's own, and adopted by the
trainer's as it is received. In between, its heartbeats are the loader's. What the two know of each other is in a few
numbers of shared memory: how many batches of each worker were received, since when the trainer has been waiting, and
whether a pass over the DataLoader is on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from replaybuf.errors import InputError, NotReadyError
from replaybuf.rules.diagnosis import Diagnosis
from replaybuf.storage.values import Leased

#: The highest number of workers.
MOST_WORKERS = 1024

_STATE, _WAITING_SINCE = 0, 1  # places in the shared numbers
_NONE, _RUNNING, _STOPPED = 0, 1, 2  # states


@dataclass(frozen=True)
class Delivery:
    """A batch on its way: the `number`-th of its worker in this pass, what was leased for it, and when.

    `leased_at` is the host's monotonic time. (A class that torch's own collate functions don't look into.)
    """

    worker: int
    number: int
    leased: Leased
    leased_at: float
    batch: Any

    def pin_memory(self) -> Delivery:
        """Return it with the batch's tensors in pinned memory; the DataLoader calls this."""
        return replace(self, batch=pin_memory(self.batch))


@dataclass(frozen=True)
class GaveUp:
    """In place of a batch, at the end: the trainer has waited for too long.

    Sent like a batch, because of an error that a worker raises torch keeps nothing but the class and a text.
    """

    message: str
    diagnosis: Diagnosis | None

    def error(self) -> NotReadyError:
        """Return the error for the trainer."""
        error = NotReadyError(self.message)
        error.diagnosis = self.diagnosis
        return error


class Handover:
    """Shared state of the training process and its workers, during one pass at a time over the DataLoader."""

    def __init__(self) -> None:
        self._received = torch.zeros(MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._times = torch.zeros(2, dtype=torch.float64).share_memory_()

    # The training process

    def begin(self) -> None:
        """Begin a pass, in which nothing has been delivered. Raises InputError if another one is on."""
        if self.begun:
            raise InputError("this GroupDataset is being iterated over: end that pass first, or make another dataset")
        self._received.zero_()
        self._times[_WAITING_SINCE] = 0
        self._times[_STATE] = _RUNNING

    def stop(self) -> None:
        """Let the workers end, also those that wait for groups."""
        self._times[_STATE] = _STOPPED

    def end(self) -> None:
        """Note that the pass is over: no worker is loading."""
        self._times[_STATE] = _NONE

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the workers know that the trainer waits for a batch, and since when."""
        self._times[_WAITING_SINCE] = time.monotonic()
        try:
            yield
        finally:
            self._times[_WAITING_SINCE] = 0

    def receive(self, delivery: Delivery) -> None:
        """Let the worker know that its batch is here: the lease is extended by this process from now on."""
        self._received[delivery.worker] = delivery.number

    # A worker

    @property
    def begun(self) -> bool:
        return int(self._times[_STATE]) != _NONE

    @property
    def stopped(self) -> bool:
        return int(self._times[_STATE]) != _RUNNING

    @property
    def waited(self) -> float:
        """The seconds for which the trainer has been waiting by now; 0 while it trains."""
        since = float(self._times[_WAITING_SINCE])
        return time.monotonic() - since if since else 0.0

    def received(self, worker: int) -> int:
        """Return the number of batches that the trainer has received from this worker."""
        return int(self._received[worker])
