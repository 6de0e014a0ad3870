"""DeepMind Reverb: a server process in memory, written and read over gRPC."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.adapter import Adapter, Group, Place, stacked, unstacked


class Reverb(Adapter):
    """A trajectory writer puts each group as an item of one step, and is flushed at the end. FIFO, sampled once."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.address = place.address
        self._server: Any = None
        self._as_lists = False

    async def open(self) -> None:
        import reverb

        if not self.address:
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe()
            self._server = context.Process(target=_serve, args=(sender,), daemon=True)
            self._server.start()
            self.address = f"localhost:{receiver.recv()}"
        self._client = reverb.Client(self.address)
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=1)

    async def close(self) -> None:
        self._writer.close()
        if self._server:
            self._server.kill()
            self._server.join()

    def prepare(self, group: Group) -> Any:
        self._as_lists = isinstance(group[0]["tokens"], list)
        return group if self._as_lists else stacked(group)

    async def put(self, prepared: Sequence[Any]) -> None:
        for group in prepared:
            self._writer.append(stacked(group) if isinstance(group, list) else group)
            trajectory = {name: column[-1:] for name, column in self._writer.history.items()}
            self._writer.create_item("groups", 1.0, trajectory)
        self._writer.flush()

    async def take(self, count: int) -> Sequence[Any]:
        samples = self._client.sample(
            "groups", num_samples=count, emit_timesteps=False, unpack_as_table_signature=False
        )
        return [self._group(sample.data) for sample in samples]

    async def ready(self, count: int) -> bool:
        return int(self._client.server_info()["groups"].current_size) >= count

    def _group(self, data: Sequence[Any]) -> Group:
        names = ("logprobs", "prompt_ids", "response_ids", "response_mask", "rest", "tokens")  # flattened: by name
        columns = {name: column[0] for name, column in zip(names, data, strict=True)}
        return unstacked(columns, as_lists=self._as_lists)


def _serve(started: Any) -> None:
    import reverb

    table = reverb.Table(
        name="groups",
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=1_000_000,
        max_times_sampled=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server(tables=[table])
    started.send(server.port)
    server.wait()
