"""The message queue between verl's rollouter and its trainer, over a buffer."""

from __future__ import annotations

import asyncio
from typing import Any

from replaybuf.buffer.lease import Lease
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import check_whole
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, MissingDriverError
from replaybuf.rollouts.rollout import RolloutState, Status
from replaybuf.storage.values import LEASE_SECONDS
from replaybuf.sync import run
from replaybuf.verl.data_proto import from_groups, to_groups

_PAUSE = 0.25  # seconds between two polls for the end


class BufferQueueClient:
    """Stands in for the MessageQueueClient of verl's `fully_async_policy`; there is no actor.

    Each process that uses it opens the buffer of `config` for itself, so it may be pickled and sent to actors. A sample
    is the group of a prompt's rollouts, in the task `task_name`. `required_samples` is how many samples verl's trainer
    takes for a step: `ppo_mini_batch_size * require_batches`.

    A sample is leased, and acknowledged when the trainer asks for the first one of its next step. If the trainer dies
    before, the samples of its step come back `seconds` later, in their old place.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        required_samples: int,
        *,
        task_name: str = "train",
        seconds: float = LEASE_SECONDS,
    ) -> None:
        """Raise ConfigError for options with which this is no queue of samples."""
        check_whole(required_samples, "required_samples", 1, ConfigError)
        for option, wanted in (("max_times_sampled", 1), ("rollout_type", RolloutState), ("tensors", "torch")):
            if getattr(config, option) != wanted:
                raise ConfigError(
                    f"{option}={getattr(config, option)!r:.100}: verl's queue hands out each sample once, as it was "
                    "put; leave this option out"
                )
        self.config = config
        self.required_samples = required_samples
        self.task_name = task_name
        self.seconds = seconds
        self._buffer: ReplayBuffer[RolloutState] | None = None
        self._leases: list[Lease[RolloutState]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffer": None, "_leases": []}

    @property
    def buffer(self) -> ReplayBuffer[RolloutState]:
        """The buffer, as this process has it open."""
        if self._buffer is None:
            self._buffer = self.config.build()
        return self._buffer

    @property
    def _end(self) -> str:
        return f"{self.task_name}/end"

    async def put_sample(self, sample: bytes | None) -> bool:
        """Store a pickled RolloutSample, or None for the end. Return False if it was dropped.

        Waits while the buffer is full, if its `on_full` is "block"; verl's own queue drops the oldest sample.
        """
        if sample is None:
            return await self.buffer.put([RolloutState(message=[], status=Status.COMPLETED)], self._end) is not None
        pickle, _ = _verl()
        unpickled = pickle.loads(sample)
        group = [rollout for part in to_groups(unpickled.full_batch) for rollout in part]
        kept = {"sample_id": unpickled.sample_id, "epoch": unpickled.epoch, "rollout_status": unpickled.rollout_status}
        group[0].extra_fields["verl"]["sample"] = kept
        return await self.buffer.put(group, self.task_name) is not None

    async def get_sample(self) -> tuple[bytes | None, int]:
        """Return the next sample, pickled, and the number that are left; None when the rollouter has come to its end.

        The end is when nothing is left, also none that a dead trainer holds. Waits as long as that takes.
        """
        pickle, rollout_sample = _verl()  # before there is a lease: the first import may take longer than that
        if len(self._leases) == self.required_samples:
            for lease in self._leases:
                await lease.acknowledge()
            self._leases = []
        while not (lease := await self.buffer.lease_batch({self.task_name: 1}, seconds=self.seconds)).open:
            if await self._is_over():
                return None, 0
            await asyncio.sleep(_PAUSE)
        self._leases.append(lease)
        [group] = lease.batch[self.task_name]
        sample = rollout_sample(full_batch=from_groups([group]), **group[0].extra_fields["verl"]["sample"])
        return pickle.dumps(sample), await self.get_queue_size()

    async def _is_over(self) -> bool:
        metrics = await self.buffer.metrics(distributions=False)
        leased = metrics["tasks"].get(self.task_name, {}).get("leased", 0)
        return leased == len(self._leases) and bool(await self.buffer.get(1, self._end))

    async def get_queue_size(self) -> int:
        """Return the number of samples that wait."""
        return await self.buffer.count(self.task_name, Status.COMPLETED)

    def get_queue_size_sync(self) -> int:
        """Return the number of samples that wait; for callers outside an event loop."""
        return run(self.get_queue_size())

    async def get_statistics(self) -> dict[str, Any]:
        """Return `queue_size`, `total_produced`, `total_consumed` and `dropped_samples`, over all processes."""
        metrics = await self.buffer.metrics(distributions=False)
        counts = metrics["tasks"].get(self.task_name, {})
        return {
            "queue_size": await self.get_queue_size(),
            "total_produced": counts.get("put", 0),
            "total_consumed": counts.get("taken", 0),
            "dropped_samples": counts.get("evicted", 0) + counts.get("dropped", 0),
        }

    async def clear_queue(self) -> None:
        """Remove the samples that wait."""
        await self.buffer.delete({"task_name": {"$in": [self.task_name, self._end]}})

    async def shutdown(self) -> None:
        """Close the buffer in this process. What is in it stays."""
        if self._buffer is not None:
            await self._buffer.close()


def _verl() -> tuple[Any, Any]:
    """Return Ray's pickle and verl's RolloutSample."""
    try:
        from ray import cloudpickle  # type: ignore[import-not-found, unused-ignore]
        from verl.experimental.fully_async_policy.detach_utils import (  # type: ignore[import-not-found, unused-ignore]
            RolloutSample,
        )
    except ImportError as error:
        raise MissingDriverError(f"BufferQueueClient needs verl and what its trainer imports: {error}") from error
    return cloudpickle, RolloutSample
