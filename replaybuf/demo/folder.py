"""The run folder: what of a run isn't in the buffer.

    weights.npz         weights, optimiser, step and seed
    rewards.txt         the reward of each step: a line "STEP REWARD" each; of two for one step the later counts
    target.txt          the step that the run goes to
    worker-0.position   the prompt that the worker generates next
    worker-0.log        what the worker wrote before it ended
    lock                held by the trainer while it lives

Every file may be lost or old after a crash without harm: the weights are replaced as a whole, and a prompt that is
generated twice replaces itself in the buffer.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replaybuf.demo.grpo import Trainer
from replaybuf.demo.weights import FILE_NAME, load_trainer, remove_leftovers, save_trainer
from replaybuf.errors import ReplayBufError


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainers out. The lock goes with the process, also by kill -9. Raises ReplayBufError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / "lock", "ab")  # noqa: SIM115
        except OSError as error:
            raise ReplayBufError(f"can't write to the run folder {self.path}: {error.strerror}") from error
        with file:
            if sys.platform != "win32":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise ReplayBufError(
                        f"another demo is running on {self.path}; wait for it, or give this one its own "
                        "--url and --run-dir"
                    ) from error
            yield

    def clear(self) -> None:
        """Remove what a run has left."""
        for pattern in (FILE_NAME, "rewards.txt", "target.txt", "worker-*.position", "worker-*.log"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    # Weights

    def load(self) -> tuple[Trainer, int] | None:
        """The trainer as it was last saved, and its seed; None for a new run."""
        remove_leftovers(self.path)
        return load_trainer(self.path)

    def save(self, trainer: Trainer, seed: int, reward: float | None = None) -> None:
        """Save the trainer, and the reward of the step that it has just done."""
        if reward is not None:
            with open(self.path / "rewards.txt", "a", encoding="ascii") as file:
                file.write(f"{trainer.step} {reward:.6f}\n")
        save_trainer(self.path, trainer, seed)

    def rewards(self, steps: int) -> list[float]:
        """The rewards of steps 1 to `steps`, as far as they are known."""
        found: dict[int, float] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "rewards.txt").read_text("ascii", "replace").splitlines():
                with contextlib.suppress(ValueError):  # a line that a crash cut off
                    step, reward = line.split()
                    found[int(step)] = float(reward)
        return [found[step] for step in sorted(found) if step <= steps]

    def target(self, step: int, steps: int) -> int:
        """The step that a run which is at `step` goes to: `steps`; when that is done, as many more. Remembered."""
        path = self.path / "target.txt"
        if step < steps:
            target = steps
        else:
            target = _number(path)  # of a run that was killed on the way there
            if target <= step:
                target = step + steps
        path.write_text(str(target), "ascii")
        return target

    # Workers

    def log(self, worker: int) -> Path:
        """Where a worker's error output goes."""
        return self.path / f"worker-{worker}.log"

    def position(self, worker: int) -> int:
        """The first prompt that the worker hasn't put yet; 0 when that isn't known."""
        return _number(self.path / f"worker-{worker}.position")

    def save_position(self, worker: int, position: int) -> None:
        """Remember where the worker goes on."""
        path = self.path / f"worker-{worker}.position"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(str(position), "ascii")
        os.replace(temporary, path)


def _number(path: Path) -> int:
    """The number in a file; 0 where there is none."""
    try:
        return int(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        return 0
