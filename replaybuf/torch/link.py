"""Messages between the ranks of a process group, each with a time after which the wait for it ends."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replaybuf.checks import check_seconds
from replaybuf.errors import InputError, RankError


class Link:
    """The ranks of a process group that has gloo for CPU tensors; None is the group of all ranks.

    Every message is sent by all ranks together. `timeout` is how long any of them waits for the others, in seconds.
    Then, and when one of them has died, RankError says what was waited for; the group can't be used again.
    """

    def __init__(self, group: Any = None, timeout: float = 1800.0) -> None:
        if not dist.is_initialized():
            raise InputError("there are no ranks: call torch.distributed.init_process_group first")
        self._group = group  # no reference to the group of all ranks, which must be gone when the process ends
        self.rank: int = dist.get_rank(self._group)
        if self.rank < 0:
            raise InputError("this process is not in the process group that it was given")
        if "cpu:gloo" not in dist.get_backend_config(self._group):
            raise InputError(
                "batches and errors pass between ranks by gloo: give group=torch.distributed.new_group(backend='gloo')"
            )
        self.size: int = dist.get_world_size(self._group)
        self.timeout = check_seconds(timeout, "timeout")

    def gather(self, message: Any, what: str) -> list[Any]:
        """Return the messages of all ranks, in their order; `what` says in an error what was waited for."""
        data = pack(message)
        sizes = self._gather(torch.tensor([len(data)]), what)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        return [unpack(found[: int(size)]) for found, size in zip(self._gather(padded, what), sizes, strict=True)]

    def broadcast(self, data: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """Return the bytes of the rank `source` of the group; those that others give are ignored."""
        size = torch.tensor([len(data)])
        self._broadcast(size, source, what)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data, source, what)
        return data

    def largest(self, value: int, what: str) -> int:
        """Return the largest of the ranks' numbers."""
        number = torch.tensor([value])
        self._wait(lambda: dist.all_reduce(number, dist.ReduceOp.MAX, self._group, async_op=True), what)
        return int(number)

    def _gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(found, tensor, self._group, async_op=True), what)
        return found

    def _broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        rank = source if self._group is None else dist.get_global_rank(self._group, source)
        self._wait(lambda: dist.broadcast(tensor, rank, self._group, async_op=True), what)

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        begun = time.monotonic()
        try:
            begin().wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:  # of torch, when a rank is late, has closed its connection, or is gone
            waited = time.monotonic() - begun
            raise RankError(
                f"rank {self.rank} of {self.size} waited {waited:.1f} s for {what}, and the ranks are no longer "
                f"connected, or one of them is late: {error}"
            ) from error


def pack(message: Any) -> torch.Tensor:
    """Return a message as bytes, uint8. Ranks of one job trust each other as torch's own object collectives do."""
    return torch.frombuffer(bytearray(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Any:
    """Return the message of some bytes."""
    return pickle.loads(data.numpy().data)
