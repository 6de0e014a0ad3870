"""The trainer of the demo: takes batches, trains, and keeps buffer and weights together.

Any process may be killed at any moment. A step takes its batch, trains, makes a checkpoint of the buffer, and then
saves the weights atomically in one file. At the start, a trainer restores the buffer to the checkpoint of the saved
weights; later work is done again. The numbers of the trained prompts are in the file of the weights, so they are
exactly those that these weights have seen.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from replaybuf import ReplayBuffer, RolloutState
from replaybuf.demo.colocated import Colocated
from replaybuf.demo.disaggregated import Disaggregated
from replaybuf.demo.display import Display
from replaybuf.demo.figures import Figures
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.mode import Mode
from replaybuf.demo.processes import WorkerProcesses
from replaybuf.demo.settings import (
    BATCH_GROUPS,
    DEFAULT_SECONDS,
    DEFAULT_STEPS,
    TASK,
    WorkerSettings,
    buffer_config,
)
from replaybuf.demo.start import begin, clear
from replaybuf.demo.weights import FILE_NAME, Saved
from replaybuf.produce import ProduceSummary

_TAKE_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """The user's options. Without `steps` the run is also bounded in time."""

    url: str
    folder: Path
    mode: Mode = Mode.DISAGGREGATED
    steps: int | None = None
    workers: int = 2
    seed: int | None = None
    fresh: bool = False

    @property
    def seconds(self) -> float | None:
        """The time that the run may take, in seconds."""
        return DEFAULT_SECONDS if self.steps is None else None


class Production(AbstractContextManager["Production"], Protocol):
    """The production of groups in one mode."""

    @property
    def pids(self) -> list[int]:
        """The process ids of the rollout workers."""

    async def produce(self) -> ProduceSummary:
        """Get a batch for the next step into the buffer. Return a summary."""

    async def tell(self, *, finished: bool) -> None:
        """Tell the workers of the saved weights."""

    async def stop(self) -> None:
        """Stop generating."""


async def run(options: Options, folder: RunFolder, display: Display) -> Training:
    """Train until the steps are done, or the time is up. Raises ReplayBufError."""
    async with buffer_config(options.url, "trainer").build() as buffer:
        if options.fresh:
            folder.clear()
            await clear(buffer)
        saved = await begin(buffer, folder, options.seed)
        training = Training(options, folder, buffer, display, saved)
        await training.run()
        return training


class Training:
    """One run of the trainer's process, starting from `saved`."""

    def __init__(
        self, options: Options, folder: RunFolder, buffer: ReplayBuffer, display: Display, saved: Saved
    ) -> None:
        self.options, self.folder, self.buffer, self.display, self.saved = options, folder, buffer, display, saved
        self.figures = Figures(
            target=folder.target(saved.step, options.steps or DEFAULT_STEPS),
            rewards=folder.rewards(saved.step),
            session=uuid.uuid4().hex,
            mode=options.mode,
            step=saved.step,
        )

    async def run(self) -> None:
        """Run all steps."""
        figures = self.figures
        figures.count_store(await self.buffer.tallies())
        self._greet()
        production = await self._production()
        await production.tell(finished=False)
        with production, self.display.showing(figures, production):
            while figures.step < figures.target and not self._time_is_up():
                await self._step(production)
            await production.tell(finished=True)
            await production.stop()
            figures.count_store(await self.buffer.tallies())
        if any(figures.buffered.values()):
            await self.buffer.checkpoint(figures.step)  # keeps groups generated since, for when the run goes on

    def _greet(self) -> None:
        step, steps, target = self.saved.step, self.options.steps or DEFAULT_STEPS, self.figures.target
        if step == 0:
            self.display.say(f"Training a new policy for {target} steps (seed {self.saved.seed})")
            return
        groups = sum(self.figures.buffered.values())
        self.display.say(f"Resuming at step {step} with {groups} groups in the buffer")
        if target > step >= steps:
            self.display.say(f"It has done {step} steps already, so it does {target - step} more")

    async def _production(self) -> Production:
        options, folder, saved = self.options, self.folder, self.saved
        drawn = (await self.buffer.cursors.read(TASK)).position
        prompts = max(self.figures.target * BATCH_GROUPS, drawn)  # more were drawn if the target was higher before
        session = self.figures.session
        if options.mode != Mode.DISAGGREGATED:
            return Colocated(options.mode, self.buffer, saved, session, prompts, self.display.update)
        workers = WorkerProcesses(
            folder,
            [
                WorkerSettings(options.url, str(folder.path), worker, saved.seed, prompts, session)
                for worker in range(options.workers)
            ],
        )
        return Disaggregated(self.buffer, saved, workers, str(folder.path / FILE_NAME), self._look_at(workers))

    def _look_at(self, workers: WorkerProcesses) -> Callable[[], None]:
        def look() -> None:
            for line in workers.restart_dead():
                self.display.say(line)
            self.display.update()

        return look

    def _time_is_up(self) -> bool:
        return self.options.seconds is not None and self.figures.seconds > self.options.seconds

    async def _step(self, production: Production) -> None:
        summary = await production.produce()
        step = self.saved.step + 1
        batch, _ = await self.buffer.take_batch({TASK: BATCH_GROUPS}, timeout=_TAKE_SECONDS, current_train_step=step)
        with summary.training():
            groups = sorted(batch[TASK], key=_number)  # so that the sums don't depend on the order of arrival
            reward = await self._train(groups)
        self.figures.count_batch(groups, self.saved.step, reward)
        self.figures.count_summary(summary)
        self.figures.count_store(await self.buffer.tallies())
        await production.tell(finished=False)
        self.display.update()

    async def _train(self, groups: list[list[RolloutState]]) -> float:
        """Train, then save the buffer, then the weights. Return the mean reward."""
        metrics = await asyncio.to_thread(self.saved.trainer.train, groups)
        self.saved.trained += map(_number, groups)
        await self.buffer.checkpoint(self.saved.step)
        await asyncio.to_thread(self.folder.save, self.saved, metrics.reward)
        return metrics.reward


def _number(group: list[RolloutState]) -> int:
    return int(group[0].group_id or 0)
