"""The run folder: the files of a run outside the buffer.

    weights.npz         weights, optimiser, step, seed, and the numbers of the prompts trained
    rewards.txt         the reward of each step: a line "STEP REWARD" each; of two for one step the later counts
    target.txt          the step that the run goes to, and "done" when it has ended there
    worker-0.log        the output of the worker
    lock                held by the trainer while it lives

Weights and target are replaced atomically. The other files may be lost or old after a crash without harm.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replaybuf.demo.weights import FILE_NAME, Saved, load_trainer, remove_leftovers, save_trainer
from replaybuf.errors import ReplayBufError

_TARGET, _DONE = "target.txt", "done"


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainers out. The lock ends with the process, also by kill -9. Raises ReplayBufError."""
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
        """Remove the files of an earlier run."""
        for pattern in (FILE_NAME, "rewards.txt", _TARGET, f".{_TARGET}.tmp", "worker-*.log"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    # Weights

    def load(self) -> Saved | None:
        """Return the trainer as last saved; None for a new run."""
        remove_leftovers(self.path)
        return load_trainer(self.path)

    def save(self, saved: Saved, reward: float | None = None) -> None:
        """Save the trainer, and the reward of the step that it has just done."""
        if reward is not None:
            with open(self.path / "rewards.txt", "a", encoding="ascii") as file:
                file.write(f"{saved.step} {reward:.6f}\n")
        save_trainer(self.path, saved)

    def rewards(self, steps: int) -> list[float]:
        """Return the rewards of steps 1 to `steps`, as far as they are known."""
        found: dict[int, float] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "rewards.txt").read_text("ascii", "replace").splitlines():
                with contextlib.suppress(ValueError):  # a line that a crash cut off
                    step, reward = line.split()
                    found[int(step)] = float(reward)
        return [found[step] for step in sorted(found) if step <= steps]

    def target(self, step: int, steps: int) -> int:
        """Return the target of a run that is at `step`: `steps`, or that many more when these are done. Remembered.

        A run that was killed goes on to its old target, also if that was just reached: the same command does the rest.
        """
        before, done = self._target()
        if step < steps:
            before = steps
        elif done or before < step:
            before = step + steps
        self._remember(str(before))
        return before

    def finish(self) -> None:
        """Note that the run has reached its target, and said so."""
        self._remember(f"{self._target()[0]} {_DONE}")

    def _target(self) -> tuple[int, bool]:
        try:
            step, *done = (self.path / _TARGET).read_text("ascii").split()
            return int(step), done == [_DONE]
        except (FileNotFoundError, ValueError):
            return 0, False

    def _remember(self, text: str) -> None:
        temporary = self.path / f".{_TARGET}.tmp"
        temporary.write_text(text, "ascii")
        os.replace(temporary, self.path / _TARGET)

    # Workers

    def log(self, worker: int) -> Path:
        """Return the file for a worker's error output."""
        return self.path / f"worker-{worker}.log"
