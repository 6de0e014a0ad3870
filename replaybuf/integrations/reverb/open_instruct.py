"""open-instruct's replay buffer over the store: a table of prompts' results, for the threads of its data loader.

    from open_instruct import replay_buffer as replay_buffer_lib
    from replaybuf.integrations.reverb import open_instruct as durable

    table = durable.Table(
        max_size=rb.capacity or global_batch_size,
        sampler=durable.make_selector(rb.sampler),
        remover=durable.make_selector(rb.remover),
        max_times_sampled=rb.max_times_sampled,
        rate_limiter=durable.MinSize(rb.min_size or global_batch_size),
        url="sqlite:///run.db",
        rollout_type=replay_buffer_lib.ProcessedResult,
    )

The names are those of its module `replay_buffer` (pull request 1583, commit 354e747). `docs/reverb.md` says what
differs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import run
from replaybuf.common.checks import check_whole
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError
from replaybuf.rules.policies import ReplayPolicy, resolve_policy
from replaybuf.values.rollouts.rollout import Status

#: The class of the results, for type checkers.
R = TypeVar("R")


@dataclass(frozen=True)
class MinSize:
    """Blocks samples while there are fewer items."""

    min_size: int


def make_selector(name: str) -> ReplayPolicy:
    """Return the policy of a sampler or remover: "uniform", "prioritized", "fifo", "lifo". Raises ConfigError.

    Any other policy is accepted, too: "staleness", or a user's class as "module:Class".
    """
    return resolve_policy(name)


class Table(Generic[R]):
    """A table in a database: results are inserted under a key and sampled in batches.

    `max_size`: beyond it the `remover` selects the evicted results. `max_times_sampled`: a result is removed with its
    n-th sample. `rate_limiter`: the minimum size for samples (default: 1). `url` is the database, `name` distinguishes
    several tables in it; `rollout_type` is the class of the results, and `options` are further ones of
    ReplayBufferConfig. Calls may be made by any thread, and block. `buffer` is the underlying buffer.

    Raises ConfigError, with the names of the arguments, for limits that block every sample.
    """

    def __init__(
        self,
        max_size: int,
        sampler: ReplayPolicy,
        remover: ReplayPolicy,
        max_times_sampled: int = 1,
        rate_limiter: MinSize | None = None,
        *,
        url: str,
        rollout_type: type[R],
        name: str = "replay_buffer",
        **options: Any,
    ) -> None:
        if rate_limiter is not None and not isinstance(rate_limiter, MinSize):
            raise ConfigError(f"rate_limiter must be a MinSize, got {type(rate_limiter).__name__}")
        least = 1 if rate_limiter is None else rate_limiter.min_size
        for argument, number in (("max_size", max_size), ("min_size", least), ("max_times_sampled", max_times_sampled)):
            check_whole(number, argument, 1, ConfigError)
        if max_size < least:
            raise ConfigError(
                f"max_size (capacity) {max_size} is below min_size {least}: nothing could ever be sampled; raise the "
                "one or lower the other"
            )
        self.name = name
        self.buffer: ReplayBuffer[R] = ReplayBufferConfig(
            url=url,
            name=name,
            policy=sampler,
            remover=remover,
            capacity=max_size,
            max_times_sampled=max_times_sampled,
            min_size=least,
            rollout_type=rollout_type,
            **options,
        ).build()
        self._closed = False
        self._sampling: set[asyncio.Task[Any]] = set()  # used only in the thread of synchronous calls

    def __len__(self) -> int:
        return len(self.buffer)

    def __bool__(self) -> bool:
        """Return True, also for an empty table: `if table:` tests whether there is one."""
        return True

    @property
    def is_shutdown(self) -> bool:
        """Whether `shutdown` was called on this object."""
        return self._closed

    def insert(self, key: str, data: R, priority: float = 1.0) -> int:
        """Store a result, in place of one with this key, and return its uid; it is committed when this returns."""
        uid = run(self.buffer.put([data], self.name, key=key, priority=priority, status=Status.COMPLETED))
        assert uid is not None
        return uid

    def sample(self, n: int, *, timeout: float | None = None) -> list[R] | None:
        """Wait until there are `min_size` results, and sample up to n of them; None after `shutdown`.

        After `timeout` seconds it raises NotReadyError, with the reason; without a timeout, the reason is logged every
        half minute (`replaybuf.waits`).
        """
        return run(self._sample(n, timeout))

    async def _sample(self, n: int, timeout: float | None) -> list[R] | None:
        if self._closed:
            return None
        task = asyncio.current_task()
        assert task is not None
        self._sampling.add(task)
        try:
            least = min(n, self.buffer.limits.min_size)
            groups = await self.buffer.get(n, self.name, timeout=timeout, at_least=least)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            task.uncancel()
            return None
        finally:
            self._sampling.discard(task)
        return [rollouts[0] for rollouts in groups]

    def update_priorities(self, priorities: dict[int, float]) -> int:
        """Set the priorities of results by uid. Return the number of these results that still exist."""
        return run(self.buffer.update_priorities(priorities))

    def shutdown(self) -> None:
        """End all calls of `sample`, in any thread: they return None, and so do later ones. Idempotent.

        Other calls, such as inserts, work as before.
        """
        run(self._end_samples())

    async def _end_samples(self) -> None:
        self._closed = True
        for task in self._sampling:
            task.cancel()

    def close(self) -> None:
        """Close the connections; later calls raise ClosedError. Idempotent.

        Optional: everything is committed, and stays in the database.
        """
        self.shutdown()
        run(self.buffer.close())
