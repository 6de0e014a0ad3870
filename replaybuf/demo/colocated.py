"""Production by the trainer's own process, in turns with training: the modes sync and async."""

from __future__ import annotations

from collections.abc import Callable

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.demo.engine import Engine
from replaybuf.demo.mode import Mode
from replaybuf.demo.settings import BATCH_GROUPS, async_strategy, sampler_of, sync_strategy
from replaybuf.demo.weights import Saved
from replaybuf.produce import ProduceSummary


class Colocated:
    """Generates with the trainer's own weights; leaving the `with` block ends the engine."""

    def __init__(
        self, mode: Mode, buffer: ReplayBuffer, saved: Saved, session: str, prompts: int, look: Callable[[], None]
    ) -> None:
        self._saved = saved
        self._engine = Engine(saved.seed, session)
        self._sampler = sampler_of(buffer, saved.seed, prompts)
        strategy = sync_strategy if mode == Mode.SYNC else async_strategy
        self._strategy = strategy(lambda generated: look())

    def __enter__(self) -> Colocated:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    @property
    def pids(self) -> list[int]:
        """Return an empty list: there are no other processes."""
        return []

    async def produce(self) -> ProduceSummary:
        """Generate until a batch for the next step is in the buffer. Return a summary."""
        step = self._saved.step
        self._engine.load(self._saved.trainer.policy, step)
        return await self._strategy.produce_batch(
            self._engine, self._sampler, BATCH_GROUPS, train_step=step + 1, model_step=step, progress=False
        )

    async def tell(self, *, finished: bool) -> None:
        """Do nothing: there are no other processes."""

    async def stop(self) -> None:
        """Do nothing: between two batches nothing is being generated."""
