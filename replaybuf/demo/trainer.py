"""The trainer of the demo: the process that takes batches from the buffer, trains, and looks after the workers.

A training step takes its batch, trains and saves with nothing awaited in between, so that Ctrl-C never loses a batch;
kill -9 in that moment costs one batch, and the run goes on from the weights saved last.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replaybuf import NotReadyError, ReplayBufError, ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.demo.display import Display
from replaybuf.demo.figures import Figures
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.processes import WorkerProcesses
from replaybuf.demo.settings import (
    BATCH_GROUPS,
    DEFAULT_SECONDS,
    DEFAULT_STEPS,
    STALE_THRESHOLD,
    TASK,
    WorkerSettings,
)

_LOOK_SECONDS = 0.2  # between two looks at the workers while waiting for a batch
_STARVED_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """What the user asked for. Without `steps` the run is also bounded in time."""

    url: str
    folder: Path
    steps: int | None = None
    workers: int = 2
    seed: int | None = None
    fresh: bool = False

    @property
    def seconds(self) -> float | None:
        """How long the run may take."""
        return DEFAULT_SECONDS if self.steps is None else None


async def run(options: Options, display: Display) -> Figures:
    """Train until the steps are done, and give what was done. Raises ReplayBufError."""
    folder = RunFolder(options.folder)
    with folder.locked():
        async with ReplayBufferConfig(url=options.url, policy="staleness").build() as buffer:
            if options.fresh:
                await buffer.delete({"task_name": TASK})
                folder.clear()
            training = await Training.start(options, folder, buffer, display)
            await training.run()
            return training.figures


class Training:
    """One run of the trainer's process."""

    def __init__(
        self, options: Options, folder: RunFolder, buffer: ReplayBuffer, display: Display, trainer: Trainer, seed: int
    ) -> None:
        self.options, self.folder, self.buffer, self.display = options, folder, buffer, display
        self.trainer, self.seed = trainer, seed
        steps, session = options.steps or DEFAULT_STEPS, uuid.uuid4().hex
        self.figures = Figures(
            target=folder.target(trainer.step, steps),
            rewards=folder.rewards(trainer.step),
            session=session,
            step=trainer.step,
        )
        self.workers = WorkerProcesses(
            folder,
            [
                WorkerSettings(options.url, str(options.folder), worker, options.workers, seed, session)
                for worker in range(options.workers)
            ],
        )

    @classmethod
    async def start(cls, options: Options, folder: RunFolder, buffer: ReplayBuffer, display: Display) -> Training:
        """A new run, or the one that the folder has. Raises ReplayBufError where folder, buffer or seed don't match."""
        counts = await _counts(buffer)
        saved = folder.load()
        if saved is None:
            if any(counts.values()):
                raise ReplayBufError(
                    f"the buffer has {sum(counts.values())} groups of a demo run whose weights are not in "
                    f"{folder.path}: give its --run-dir, or start anew with --fresh (removes these groups)"
                )
            seed = options.seed or 0
            saved = Trainer.create(seed), seed
            folder.save(*saved)
        trainer, seed = saved
        if options.seed not in (None, seed):
            raise ReplayBufError(
                f"the run in {folder.path} was started with seed {seed}: go on with --seed {seed}, start anew with "
                "--fresh (removes its groups and weights), or give another --url"
            )
        training = cls(options, folder, buffer, display, trainer, seed)
        training.figures.left = counts[Status.COMPLETED]
        training.figures.count_buffered(counts)
        training._greet(sum(counts.values()))
        return training

    def _greet(self, groups: int) -> None:
        step, steps, target = self.trainer.step, self.options.steps or DEFAULT_STEPS, self.figures.target
        if step == 0:
            self.display.say(f"Training a new policy for {target} steps (seed {self.seed})")
            return
        self.display.say(f"Resuming at step {step} with {groups} groups in the buffer")
        if step >= steps:
            self.display.say(f"It has done {steps} steps already, so it does {target - step} more")

    async def run(self) -> None:
        """All steps."""
        with self.workers, self.display.showing(self.figures, self.workers):
            while self.figures.step < self.figures.target and not self._time_is_up():
                await self._step()
            await self._leave_some_groups()

    def _time_is_up(self) -> bool:
        return self.options.seconds is not None and self.figures.seconds > self.options.seconds

    async def _step(self) -> None:
        await self._refresh()
        groups = await self._batch()
        reward = self.trainer.train(groups).reward
        self.folder.save(self.trainer, self.seed, reward)
        self.figures.count_batch(groups, self.trainer.step, reward)
        self.figures.count_buffered(await _counts(self.buffer))
        self._look()

    async def _refresh(self) -> None:
        expired = await self.buffer.refresh_staleness(
            task_stale_thresholds={TASK: STALE_THRESHOLD}, current_train_step=self.trainer.step + 1
        )
        self.figures.count_expired(expired[TASK])

    async def _batch(self) -> list[list[RolloutState]]:
        """The next batch, most stale groups first; looks after workers and display while it waits."""
        deadline = time.monotonic() + _STARVED_SECONDS
        while True:
            try:
                batch, _ = await self.buffer.take_batch({TASK: BATCH_GROUPS}, timeout=_LOOK_SECONDS)
                return batch[TASK]
            except NotReadyError as error:
                if time.monotonic() > deadline:
                    raise NotReadyError(
                        f"the workers gave no batch of {BATCH_GROUPS} groups within {_STARVED_SECONDS:g} s ({error}); "
                        f"what they wrote is in {self.folder.log(0)}"
                    ) from error
            self._look()

    def _look(self) -> None:
        for line in self.workers.restart_dead():
            self.display.say(line)
        self.display.update()

    async def _leave_some_groups(self) -> None:
        """So that there is something to look at in the buffer afterwards."""
        await self._refresh()
        with suppress(NotReadyError):
            await self.buffer.wait_ready({TASK: BATCH_GROUPS}, timeout=2.0)
        self.workers.stop()
        self.figures.count_buffered(await _counts(self.buffer))


async def _counts(buffer: ReplayBuffer) -> dict[Status, int]:
    return (await buffer.count_statuses([TASK], Status))[TASK]
