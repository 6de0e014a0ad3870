"""TransferQueue, which verl uses: a controller and storage units as Ray actors, in memory, asked over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.adapter import Adapter, Group, Place, stacked, unstacked

FIELDS = ["prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "rest"]


class TransferQueue(Adapter):
    """A group is a row. 64 are put in one call, as verl does; as many are fetched, first their metadata, and cleared.

    A consumer polls, because a request for more rows than there are keeps all other clients waiting. The actors need
    a Ray of at least 8 CPUs, whatever the machine has: with fewer, `init` waits forever.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.address = place.address

    async def open(self) -> None:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        if self.address:
            ray.init(address=self.address, log_to_driver=False)
        else:
            ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
            self.address = ray.get_runtime_context().gcs_address
        await asyncio.to_thread(transfer_queue.init, OmegaConf.create({"controller": {"polling_mode": True}}))
        self._client = transfer_queue.get_client()
        self._as_lists = False

    async def close(self) -> None:
        import ray

        ray.shutdown()

    def prepare(self, group: Group) -> Any:
        self._as_lists = isinstance(group[0]["tokens"], list)
        return group if self._as_lists else _row(group)

    async def put(self, prepared: Sequence[Any]) -> None:
        import torch

        for start in range(0, len(prepared), self.batch):
            part = prepared[start : start + self.batch]
            rows = torch.cat([_row(group) if self._as_lists else group for group in part])
            await self._client.async_put(rows, partition_id="groups")

    async def ready(self, count: int) -> bool:
        return "groups" in (await self._client.async_get_partition_list() or ())

    async def wait_for_one(self) -> None:
        while not (await self.ready(1) and await self.take(1)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def take(self, count: int) -> Sequence[Any]:
        metadata = await self._client.async_get_meta(FIELDS, count, "groups", task_name="trainer")
        if not metadata.size:
            return []
        rows = await self._client.async_get_data(metadata)
        await self._client.async_clear_samples(metadata)
        columns = {name: [tensor.numpy() for tensor in rows[name].unbind()] for name in FIELDS}
        return [
            unstacked({name: column[at] for name, column in columns.items()}, as_lists=self._as_lists)
            for at in range(count)
        ]


def _row(group: Group) -> Any:
    import torch
    from tensordict import TensorDict

    columns = {name: torch.from_numpy(column)[None] for name, column in stacked(group).items()}
    return TensorDict(columns, batch_size=[1])
