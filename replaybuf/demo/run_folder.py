"""The run folder: the files of a run outside the buffer.

    weights.npz         the run as last saved (`Run`)
    worker-0.log        the output of a worker
    lock                held by the trainer while it lives

`weights.npz` carries the weights from the trainer to the workers, and across a crash. It is replaced atomically: a
reader always opens the newest complete file, and a kill -9 during a save leaves the one before. The numbers of the
prompts that the weights were trained on are in the same file, so both always belong together. Arrays are plain npz;
reading them never unpickles.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.atomic_file import partial_file, publish
from replaybuf.demo.policy import Policy
from replaybuf.errors import ReplayBufError


@dataclass
class Run:
    """All that a trainer knows of its run.

    `trained` are the numbers of the prompts that were trained, in order; `rewards` the mean reward of each step.
    `target` is the step that the run goes to; `finished` says that it got there, and said so.
    """

    policy: Policy
    seed: int
    step: int = 0
    target: int = 0
    finished: bool = False
    trained: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def aim(self, steps: int) -> bool:
        """Set the target: `steps`, or that many more when these are done. Return whether that changed anything.

        A run that was killed goes on to its old target, also if that was just reached: the same command does the rest.
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
        for path in (self.weights, *self.path.glob("worker-*.log")):
            path.unlink(missing_ok=True)

    def log(self, worker: int) -> Path:
        """Return the file for a worker's error output."""
        return self.path / f"worker-{worker}.log"

    def save(self, run: Run) -> None:
        """Save the run; when this returns it is on disk."""
        arrays: dict[str, Any] = {**vars(run), **vars(run.policy)}
        del arrays["policy"]
        with partial_file(str(self.weights)) as partial:
            with open(partial, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            publish(partial, str(self.weights))

    def finish(self, run: Run) -> None:
        """Note that the run has reached its target, and said so."""
        run.finished = True
        self.save(run)

    def load(self) -> Run | None:
        """Return the run as last saved; None for a new one. Raises ReplayBufError for a file that can't be read."""
        arrays = self._read("weights", "squares", "seed", "step", "target", "finished", "trained", "rewards")
        if arrays is None:
            return None
        policy = Policy(arrays.pop("weights"), arrays.pop("squares"))
        return Run(policy, **{name: array.tolist() for name, array in arrays.items()})

    def load_policy(self) -> tuple[Policy, int] | None:
        """Return the policy saved last and its step, or None: what a worker needs, to generate."""
        arrays = self._read("weights", "step")
        return None if arrays is None else (Policy(arrays["weights"], arrays["weights"]), int(arrays["step"]))

    def _read(self, *names: str) -> dict[str, Any] | None:
        try:
            with open(self.weights, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                if lacking := set(names).difference(arrays.files):
                    raise ReplayBufError(
                        f"{self.weights} is of another version of the demo (it has no {min(lacking)}), and can't go "
                        "on: start anew with --fresh"
                    )
                return {name: arrays[name] for name in names}
        except FileNotFoundError:
            return None
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
            raise ReplayBufError(
                f"{self.weights} can't be read; remove it to start with new weights ({error})"
            ) from error
