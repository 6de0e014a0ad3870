"""The file that carries weights from the trainer to the workers, and across a crash.

It also has the numbers of the prompts that the weights were trained on, so both always belong together.

The trainer writes `weights.npz` under another name, syncs it to disk and renames it, which is atomic: a reader always
opens the newest complete file, and a kill -9 during a save leaves the one before. The arrays are plain npz; reading
them never unpickles.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from replaybuf.demo.adam import Adam
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.policy import FloatArray, Parameters, Policy
from replaybuf.errors import ReplayBufError

FILE_NAME = "weights.npz"
_TEMPORARY = ".weights-{pid}.tmp"


@dataclass
class Saved:
    """A trainer, the seed of its run, and the numbers of the prompts that it was trained on, in order."""

    trainer: Trainer
    seed: int
    trained: list[int] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of training steps done."""
        return self.trainer.step


def save_trainer(directory: Path, saved: Saved) -> None:
    """Write weights, optimiser, step, seed and trained prompts; when this returns they are on disk."""
    directory.mkdir(parents=True, exist_ok=True)
    trainer = saved.trainer
    arrays: dict[str, Any] = {"step": trainer.step, "seed": saved.seed, "updates": trainer.adam.updates}
    arrays["trained"] = np.array(saved.trained, dtype=np.int64)
    arrays |= _prefixed("policy", trainer.policy.parameters)
    arrays |= _prefixed("first", trainer.adam.first)
    arrays |= _prefixed("second", trainer.adam.second)
    temporary = directory / _TEMPORARY.format(pid=os.getpid())
    with open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / FILE_NAME)
    _sync_directory(directory)


def load_trainer(directory: Path) -> Saved | None:
    """Return the trainer as last saved, or None. Raises ReplayBufError for a file that can't be read."""
    arrays = _read(directory, ("step", "seed", "updates", "trained", "policy", "first", "second"))
    if arrays is None:
        return None
    if "trained" not in arrays:
        raise ReplayBufError(f"{directory / FILE_NAME} is of an older demo, and can't go on: start anew with --fresh")
    policy = Policy(_without_prefix("policy", arrays))
    adam = Adam(policy.parameters)
    adam.updates = int(arrays["updates"])
    adam.first, adam.second = _without_prefix("first", arrays), _without_prefix("second", arrays)
    trainer = Trainer(policy, adam, step=int(arrays["step"]))
    return Saved(trainer, int(arrays["seed"]), arrays["trained"].tolist())


def load_policy(directory: Path) -> tuple[Policy, int] | None:
    """Return the policy saved last and its step, or None."""
    arrays = _read(directory, ("step", "policy"))
    return None if arrays is None else (Policy(_without_prefix("policy", arrays)), int(arrays["step"]))


def remove_leftovers(directory: Path) -> None:
    """Remove half-written files of killed trainers, when a trainer starts."""
    for path in directory.glob(_TEMPORARY.format(pid="*")):
        path.unlink(missing_ok=True)


def _read(directory: Path, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]] | None:
    """Return the arrays whose name up to the first slash is wanted."""
    path = directory / FILE_NAME
    try:
        with open(path, "rb") as file:
            return _read_arrays(file, wanted)
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
        raise ReplayBufError(f"{path} can't be read; remove it to start with new weights ({error})") from error


def _read_arrays(file: BinaryIO, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name.split("/")[0] in wanted}


def _prefixed(prefix: str, parameters: Parameters) -> dict[str, FloatArray]:
    return {f"{prefix}/{name}": value for name, value in parameters.items()}


def _without_prefix(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Parameters:
    return {name.removeprefix(f"{prefix}/"): value for name, value in arrays.items() if name.startswith(f"{prefix}/")}


def _sync_directory(directory: Path) -> None:
    """Make the rename survive a power cut, if the system can sync a directory."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
