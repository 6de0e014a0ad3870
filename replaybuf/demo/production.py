"""Where the groups of a run come from: the trainer's own process, or rollout workers, which are processes too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.demo import Mode
from replaybuf.demo.run_folder import Run, RunFolder
from replaybuf.demo.settings import BATCH_GROUPS, TASK, colocated_strategy, sampler_of, worker_strategy
from replaybuf.demo.worker import Engine, WorkerSettings
from replaybuf.errors import NotReadyError, ReplayBufError
from replaybuf.produce import ProduceSummary, TrainState, publish

_COMMAND = (sys.executable, "-m", "replaybuf.demo.worker")
_PATIENCE_SECONDS = 3.0  # for a worker to end by itself
_LOOK_SECONDS = 0.2  # between two looks at the workers while waiting for a batch
_STARVED_SECONDS = 60.0


class Colocated:
    """Production by the trainer's own process and weights, in turns with training: the modes sync and async."""

    pids: Sequence[int] = ()

    def __init__(self, mode: Mode, buffer: ReplayBuffer, run: Run, prompts: int) -> None:
        self._run = run
        self._engine = Engine(run.seed)
        self._sampler = sampler_of(buffer, run.seed, prompts)
        self._strategy = colocated_strategy(mode)

    async def produce(self) -> ProduceSummary:
        """Generate until a batch for the next step is in the buffer. Return a summary."""
        step = self._run.step
        self._engine.load(self._run.policy, step)
        return await self._strategy.produce_batch(
            self._engine, self._sampler, BATCH_GROUPS, train_step=step + 1, model_step=step, progress=False
        )

    async def tell(self, *, finished: bool) -> None:
        """Do nothing: there are no workers to be told."""

    def stop(self) -> None:
        """Do nothing: between two batches nothing is being generated."""


class Disaggregated:
    """Production by rollout workers while the trainer trains: the mode disaggregated. They are running from now on.

    Workers that are killed are started again; `say` gets a line about each.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        run: Run,
        folder: RunFolder,
        workers: Sequence[WorkerSettings],
        say: Callable[[str], None],
    ) -> None:
        self._buffer, self._run, self._folder, self._say = buffer, run, folder, say
        self._strategy = worker_strategy(0)
        self._processes = {settings: self._start(settings) for settings in workers}

    @property
    def pids(self) -> Sequence[int]:
        """The process ids, by worker."""
        return [process.pid for process in self._processes.values()]

    async def produce(self) -> ProduceSummary:
        """Expire the groups that are too old for the next step, and wait until a batch is in the buffer.

        Raises NotReadyError if the workers don't deliver a batch, ReplayBufError if one failed.
        """
        summary = ProduceSummary()
        with summary.producing():
            summary.expired = await self._strategy.refresh(self._buffer, TASK, self._run.step + 1)
            deadline = time.monotonic() + _STARVED_SECONDS
            while True:
                self.restart_killed()
                try:
                    await self._buffer.wait_ready({TASK: BATCH_GROUPS}, timeout=_LOOK_SECONDS)
                    return summary
                except NotReadyError as error:
                    if time.monotonic() > deadline:
                        raise NotReadyError(
                            f"the workers gave no batch of {BATCH_GROUPS} groups within {_STARVED_SECONDS:g} s "
                            f"({error}); what they wrote is in {self._folder.log(0)}"
                        ) from error

    async def tell(self, *, finished: bool) -> None:
        """Publish the saved weights, and the trainer's next step."""
        step = self._run.step
        await publish(self._buffer, TrainState(step + 1, step, str(self._folder.weights), finished))

    def stop(self) -> None:
        """End the workers, by the end of their input, or by force if that takes too long."""
        for process in self._processes.values():
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, settings: WorkerSettings) -> subprocess.Popen[bytes]:
        """Start a worker; its output goes to its log. Ctrl-C in the terminal doesn't reach it."""
        with open(self._folder.log(settings.worker), "wb") as log:
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; the next look notices
            process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
            process.stdin.flush()
        return process

    def restart_killed(self) -> None:
        """Start workers again that were killed. Raises ReplayBufError for one that ended by itself."""
        for settings, process in self._processes.items():
            code, name = process.poll(), f"worker {settings.worker}"
            if code is None:
                continue
            if code >= 0:
                log = self._folder.log(settings.worker)
                written = log.read_text("utf-8", "replace").split("\n")
                said = next((line.strip() for line in reversed(written) if line.strip()), "it wrote nothing")
                raise ReplayBufError(f"{name} failed: {said} (all that it wrote is in {log})")
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
            again = self._processes[settings] = self._start(settings)
            signal_name = signal.Signals(-code).name
            self._say(f"{name} (pid {process.pid}) was killed ({signal_name}); started again as pid {again.pid}")
