"""The settings of the demo's run, and its folder: the weights, the lock of the trainer, the logs of the workers.

`weights.npz` carries the weights from the trainer to the workers, and across a crash. It is replaced atomically: a
reader always opens the newest complete file, and a kill -9 during a save leaves the one before. The numbers of the
prompts that the weights were trained on are in the same file, so both always belong together.
"""

from __future__ import annotations

import fcntl
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.atomic_file import partial_file, publish
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.checks import Tags
from replaybuf.config import ReplayBufferConfig
from replaybuf.demo import Mode
from replaybuf.demo.policy import Policy, Prompts, answer_of, prompt_of
from replaybuf.errors import ReplayBufError
from replaybuf.places.owners import IN_DATABASE, parse_place
from replaybuf.produce import (
    AsyncProduceStrategy,
    ProduceStrategy,
    Sampler,
    SyncProduceStrategy,
)

TASK = "arithmetic"
GROUP_SIZE = 8  # rollouts of a prompt
BATCH_GROUPS = 32  # groups per training step
STALE_THRESHOLD = 4  # train steps at which a group expires
ARCHIVED_GROUPS = 20 * BATCH_GROUPS  # trained groups that stay for SQL
PROMPT_SECONDS = 5.0  # after which the prompts of a killed worker are handed out again
LAGS = (1, 2)  # a worker loads new weights when it is more than this many steps behind: odd workers are slower
CONCURRENCY = 24  # groups that a worker generates at the same time
#: Bytes; low, since the demo's groups are small: all payloads with arrays go to the place of `--payloads`.
PAYLOAD_THRESHOLD = 1024


@dataclass
class Run:
    """The state of a run.

    `trained` are the numbers of the prompts that were trained, in order; `rewards` the mean reward of each step.
    `target` is the last step of the run; `finished` says that the run has reached it and reported that.
    """

    policy: Policy
    seed: int
    step: int = 0
    target: int = 0
    finished: bool = False
    trained: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def aim(self, steps: int) -> bool:
        """Set the target to `steps`, or that many more once a run has finished them. Return whether it changed.

        A killed run continues to its old target, even if it had just reached it, when the same command is repeated.
        """
        before = self.target, self.finished
        if self.step < steps:
            self.target = steps
        elif self.finished or self.target < self.step:
            self.target = self.step + steps
        self.finished = False
        return (self.target, self.finished) != before


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "weights.npz"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the trainer's lock, released even by kill -9. Raises ReplayBufError if another trainer holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / "lock", "ab")  # noqa: SIM115
        except OSError as error:
            raise ReplayBufError(f"can't write to the run folder {self.path}: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ReplayBufError(
                    f"another demo is running on {self.path}; wait for it, or give this one its own --url and --run-dir"
                ) from error
            yield

    def clear(self) -> None:
        """Remove the files of an earlier run."""
        for path in (self.weights, *self.path.glob("worker-*.log")):
            path.unlink(missing_ok=True)

    def log(self, worker: int) -> Path:
        """Return the file for a worker's error output."""
        return self.path / f"worker-{worker}.log"

    def save(self, run: Run) -> None:
        """Save the run; it is on disk when this returns."""
        arrays: dict[str, Any] = {**vars(run), **vars(run.policy)}
        del arrays["policy"]
        with partial_file(str(self.weights)) as partial:
            with open(partial, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            publish(partial, str(self.weights))

    def finish(self, run: Run) -> None:
        """Record that the run has reached its target and reported that."""
        run.finished = True
        self.save(run)

    def load(self) -> Run | None:
        """Return the run as last saved; None for a new one. Raises ReplayBufError for a file that can't be read."""
        try:
            with open(self.weights, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                policy = Policy(arrays["weights"], arrays["squares"])
                names = ("seed", "step", "target", "finished", "trained", "rewards")
                return Run(policy, **{name: arrays[name].tolist() for name in names})
        except FileNotFoundError:
            return None
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
            raise ReplayBufError(
                f"{self.weights} can't be read, or is of another version of the demo: start anew with --fresh ({error})"
            ) from error


def buffer_config(url: str, worker: str | None = None, payloads: str = IN_DATABASE) -> ReplayBufferConfig:
    """Return the config of a process's buffer. Deliveries aren't limited, since users of the demo kill workers."""
    return ReplayBufferConfig(
        url=url,
        policy="staleness",
        max_deliveries=0,
        archive=ARCHIVED_GROUPS,
        worker=worker,
        payloads=payloads,
        payload_threshold=PAYLOAD_THRESHOLD,
    )


def made_place(payloads: str) -> str:
    """Return the setting `payloads` with an absolute path; create its folder. Raises ReplayBufError."""
    place = parse_place(payloads) or IN_DATABASE
    if place != IN_DATABASE and "://" not in place:
        try:
            Path(place).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReplayBufError(f"can't make the folder for payloads {place}: {error.strerror}") from error
    return place


def sampler_of(buffer: ReplayBuffer, seed: int, prompts: int) -> Sampler:
    """Return a sampler of the first `prompts` prompts of a run; interrupted and expired ones come first."""
    return Sampler(buffer, Prompts(seed, prompts), TASK, prompt_repeat_k=GROUP_SIZE, epochs=1, seconds=PROMPT_SECONDS)


def strategy_of(mode: Mode) -> ProduceStrategy:
    """Return the strategy of the trainer's own process: exactly the groups of the next step (sync), or more (async)."""
    if mode == Mode.SYNC:
        return SyncProduceStrategy(tags=_tags_of(0))
    return _ahead(0, over_sample=0.5, tail_batch_trigger_size=BATCH_GROUPS // 4, tail_batch_max_tries=3)


def worker_strategy(worker: int) -> AsyncProduceStrategy:
    """Return the strategy of workers, which together run ahead until further groups would expire."""
    return _ahead(worker, over_sample=0.75, max_concurrency=CONCURRENCY)


def _ahead(worker: int, **settings: Any) -> AsyncProduceStrategy:
    """Return a strategy that generates more than the next step needs, and interrupts and continues the slowest."""
    return AsyncProduceStrategy(
        enable_partial_rollout=True, max_staleness=STALE_THRESHOLD - 1, tags=_tags_of(worker), **settings
    )


def _tags_of(worker: int) -> Callable[[list[Any]], Tags]:
    return lambda group: {"worker": worker, "level": len(str(answer_of(prompt_of(group))))}
