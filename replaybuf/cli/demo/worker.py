"""The files of a run of the demo, and a rollout worker: a process that generates groups with weights that lag behind.

`weights.npz` carries the weights from the trainer to the workers, and across a crash. It is replaced atomically: a
reader always opens the newest complete file, and a kill -9 during a save leaves the one before. The numbers of the
prompts that the weights were trained on are in the same file, so both always belong together.

When the run is over, or the trainer dead, also by kill -9, a worker gives back its groups in flight, and ends. The
prompts of a killed worker are handed out again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf import FencedError, ReplayBufError, ReplayBufferConfig
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.cli.demo.policy import Engine, Policy, Prompts, answer_of, prompt_of
from replaybuf.common.file_systems import partial_file, publish
from replaybuf.produce import AsyncProduceStrategy, Sampler, TrainState, produce_loop

NAME = "replaybuf-demo"  # of the buffer: groups of others in the same database aren't touched
TASK = "arithmetic"
GROUP_SIZE = 8  # rollouts of a prompt
BATCH_GROUPS = 32  # groups per training step
STALE_THRESHOLD = 4  # train steps at which a group expires
_ARCHIVED_GROUPS = 20 * BATCH_GROUPS  # trained groups that stay for SQL
_PROMPT_SECONDS = 5.0  # after which the prompts of a killed worker are handed out again
_LAGS = (1, 2)  # a worker loads new weights when it is more than this many steps behind: every second worker is slower
_CONCURRENCY = 24  # groups that a worker generates at the same time
_GRACE_SECONDS = 1.0
_REJOIN_SECONDS = 0.2
STOP = signal.SIGUSR1  # ends a worker, which gives its groups back


@dataclass
class Run:
    """The state of a run.

    `trained` are the numbers of the prompts that were trained, in order; `rewards` the mean reward of each step.
    `target` is the last step of the run, which generates the first `prompts` of the stream.
    """

    policy: Policy
    step: int = 0
    target: int = 0
    prompts: int = 0
    trained: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class RunFolder:
    """The folder with the weights of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "weights.npz"

    def make(self) -> None:
        """Make the folder, if it isn't there. Raises ReplayBufError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReplayBufError(f"can't write to the run folder {self.path}: {error.strerror}") from error

    def save(self, run: Run) -> None:
        """Save the run; it is on disk when this returns. Raises ReplayBufError."""
        arrays: dict[str, Any] = {**vars(run), **vars(run.policy)}
        del arrays["policy"]
        try:
            with partial_file(str(self.weights)) as partial:
                with open(partial, "wb") as file:
                    np.savez(file, allow_pickle=False, **arrays)
                publish(partial, str(self.weights))
        except OSError as error:
            raise ReplayBufError(f"can't write {self.weights}: {error.strerror or error}") from error

    def load(self) -> Run | None:
        """Return the run as last saved; None for a new one. Raises ReplayBufError for a file that can't be read."""
        try:
            with open(self.weights, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                policy = Policy(arrays["weights"], arrays["squares"])
                names = ("step", "target", "prompts", "trained", "rewards")
                return Run(policy, **{name: arrays[name].tolist() for name in names})
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ReplayBufError(f"can't read {self.weights}: {error.strerror or error}") from error
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
            raise ReplayBufError(
                f"{self.weights} can't be read, or is of another version of the demo: remove the folder and the "
                f"database ({error})"
            ) from error


def buffer_config(url: str, worker: str | None = None) -> ReplayBufferConfig:
    """Return the config of a process's buffer. Deliveries aren't limited, since users of the demo kill workers."""
    return ReplayBufferConfig(
        url=url, name=NAME, policy="staleness", max_deliveries=0, archive=_ARCHIVED_GROUPS, worker=worker
    )


def sampler_of(buffer: ReplayBuffer, prompts: int) -> Sampler:
    """Return a sampler of the first `prompts` prompts of a run; interrupted and expired ones come first."""
    return Sampler(buffer, Prompts(prompts), TASK, prompt_repeat_k=GROUP_SIZE, epochs=1, seconds=_PROMPT_SECONDS)


def strategy_of(worker: int) -> AsyncProduceStrategy:
    """Return the strategy of workers, which together run ahead until further groups would expire.

    The slowest groups are interrupted and continued.
    """
    return AsyncProduceStrategy(
        enable_partial_rollout=True,
        max_staleness=STALE_THRESHOLD - 1,
        over_sample=0.75,
        max_concurrency=_CONCURRENCY,
        tags=lambda group: {"worker": worker, "level": len(str(answer_of(prompt_of(group))))},
    )


async def work(url: str, folder: RunFolder, number: int, stop: asyncio.Event) -> None:
    """Generate until the trainer has finished, or `stop` is set; after a restore, join the buffer again."""
    engine = Engine()

    async def load() -> Run:
        if (run := await asyncio.to_thread(folder.load)) is None:
            raise ReplayBufError(f"there are no weights in {folder.path}: was the folder removed?")
        engine.load(run.policy, run.step)
        return run

    async def load_weights(state: TrainState) -> int:
        return (await load()).step

    initial = await load()

    while not stop.is_set():
        try:
            async with buffer_config(url, f"worker-{number}").build() as buffer:
                await produce_loop(
                    strategy_of(number),
                    engine,
                    sampler_of(buffer, initial.prompts),
                    BATCH_GROUPS,
                    load_weights=load_weights,
                    max_lag=_LAGS[number % len(_LAGS)],
                    stop=stop,
                )
                return
        except FencedError:
            await asyncio.sleep(_REJOIN_SECONDS)  # if this worker's own trainer is dead, `stop` is set by then


async def _work_until_told(url: str, folder: RunFolder, number: int) -> None:
    """Work until the trainer says that it is over, by STOP, or is dead."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(STOP, stop.set)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    await work(url, folder, number, stop)


def _end_with_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()  # also of one that was killed by kill -9
    os.kill(os.getpid(), STOP)
    time.sleep(_GRACE_SECONDS)
    os._exit(0)


def main(url: str, folder: RunFolder, number: int) -> None:
    """Run a worker in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then ends this process
    try:
        asyncio.run(_work_until_told(url, folder, number))
    except ReplayBufError as error:
        print(f"worker {number}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
