"""Production by rollout workers, processes of their own, while the trainer trains: the mode disaggregated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.demo.processes import WorkerProcesses
from replaybuf.demo.settings import BATCH_GROUPS, TASK, worker_strategy
from replaybuf.demo.weights import Saved
from replaybuf.errors import NotReadyError
from replaybuf.produce import ProduceSummary, TrainState, publish

_LOOK_SECONDS = 0.2  # between two looks at the workers while waiting for a batch
_STARVED_SECONDS = 60.0


class Disaggregated:
    """Waits for the groups of the workers, and tells them of new weights; leaving the `with` block ends them."""

    def __init__(
        self, buffer: ReplayBuffer, saved: Saved, workers: WorkerProcesses, weights: str, look: Callable[[], None]
    ) -> None:
        self._buffer, self._saved, self._workers, self._weights, self._look = buffer, saved, workers, weights, look
        self._strategy = worker_strategy(0)

    def __enter__(self) -> Disaggregated:
        self._workers.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._workers.__exit__(*details)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return self._workers.pids

    async def produce(self) -> ProduceSummary:
        """Expire the groups that are too old for the next step, and wait until a batch is in the buffer.

        Restarts dead workers meanwhile. Raises NotReadyError if they don't deliver a batch.
        """
        summary = ProduceSummary()
        with summary.producing():
            summary.expired = await self._strategy.refresh(self._buffer, TASK, self._saved.step + 1)
            deadline = time.monotonic() + _STARVED_SECONDS
            while True:
                self._look()
                try:
                    await self._buffer.wait_ready({TASK: BATCH_GROUPS}, timeout=_LOOK_SECONDS)
                    return summary
                except NotReadyError as error:
                    if time.monotonic() > deadline:
                        raise NotReadyError(
                            f"the workers gave no batch of {BATCH_GROUPS} groups within {_STARVED_SECONDS:g} s "
                            f"({error}); what they wrote is in {self._workers.log}"
                        ) from error

    async def tell(self, *, finished: bool) -> None:
        """Publish the saved weights, and the trainer's next step."""
        step = self._saved.step
        await publish(self._buffer, TrainState(step + 1, step, self._weights, finished))

    async def stop(self) -> None:
        """End the workers; their groups in flight are put back."""
        await asyncio.to_thread(self._workers.stop)
