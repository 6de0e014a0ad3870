"""TorchRL's memory-mapped storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.adapter import Adapter, Group, stacked, unstacked


class TorchRL(Adapter):
    """`TensorDictReplayBuffer` over a `LazyMemmapStorage`, extended by 64 groups at a time and sampled in order.

    Sampling removes nothing: the oldest are overwritten when it is full. All groups must be of one shape.
    """

    shared = False

    async def open(self) -> None:
        from torchrl.data import LazyMemmapStorage, SamplerWithoutReplacement, TensorDictReplayBuffer

        self._buffer = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(8192, scratch_dir=self.place.folder),
            sampler=SamplerWithoutReplacement(shuffle=False),
            batch_size=self.batch,
        )
        self._as_lists = False

    def prepare(self, group: Group) -> Any:
        self._as_lists = isinstance(group[0]["tokens"], list)
        return group if self._as_lists else self._tensors(group)

    def _tensors(self, group: Group) -> Any:
        import torch
        from tensordict import TensorDict

        return TensorDict({name: torch.from_numpy(column) for name, column in stacked(group).items()}, batch_size=[])

    async def put(self, prepared: Sequence[Any]) -> None:
        import torch

        for start in range(0, len(prepared), self.batch):
            part = prepared[start : start + self.batch]
            self._buffer.extend(torch.stack([self._tensors(group) if self._as_lists else group for group in part]))

    async def put_one(self, prepared: Any) -> None:
        self._buffer.add(self._tensors(prepared) if self._as_lists else prepared)

    async def ready(self, count: int) -> bool:
        return len(self._buffer) >= count

    async def take(self, count: int) -> Sequence[Any]:
        batch = self._buffer.sample(count)
        columns = {name: batch[name].numpy() for name in batch.keys() if name != "index"}  # noqa: SIM118
        return [
            unstacked({name: column[at] for name, column in columns.items()}, as_lists=self._as_lists)
            for at in range(count)
        ]
