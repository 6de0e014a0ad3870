"""How weights get from the trainer to the workers, and across a crash: one file that is replaced as a whole.

The trainer writes `weights.npz` under another name, syncs it to disk and renames it, which is atomic: whoever opens
the file, at whatever moment, has the newest complete one, and a kill -9 during a save leaves the one before. Workers
look only at the file's stamp until it changes; so they lag behind the trainer by the time between two looks. The
arrays are plain npz; reading them never unpickles.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
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


def save_trainer(directory: Path, trainer: Trainer, seed: int) -> None:
    """Writes weights, optimiser, step and seed; when it returns they are on disk."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"step": trainer.step, "seed": seed, "updates": trainer.adam.updates}
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


def load_trainer(directory: Path) -> tuple[Trainer, int] | None:
    """The trainer as it was last saved, and its seed; None where none was."""
    arrays = _read(directory, ("step", "seed", "updates", "policy", "first", "second"))
    if arrays is None:
        return None
    policy = Policy(_without_prefix("policy", arrays))
    adam = Adam(policy.parameters)
    adam.updates = int(arrays["updates"])
    adam.first, adam.second = _without_prefix("first", arrays), _without_prefix("second", arrays)
    return Trainer(policy, adam, step=int(arrays["step"])), int(arrays["seed"])


def remove_leftovers(directory: Path) -> None:
    """Removes half-written files of killed trainers; for a trainer that starts."""
    for path in directory.glob(_TEMPORARY.format(pid="*")):
        path.unlink(missing_ok=True)


class WeightsWatcher:
    """A worker's view of the weights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: tuple[int, int] | None = None

    def newest_step(self) -> int | None:
        """The step of the weights saved last, whether they were polled or not; None before the first save."""
        arrays = _read(self._directory, ("step",))
        return None if arrays is None else int(arrays["step"])

    def poll(self) -> tuple[Policy, int] | None:
        """The policy and its step if they were saved since the last poll, otherwise None; costs one stat then."""
        try:
            stat = os.stat(self._directory / FILE_NAME)
        except FileNotFoundError:
            return None
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp == self._seen:
            return None
        arrays = _read(self._directory, ("step", "policy"))
        if arrays is None:
            return None
        self._seen = stamp
        return Policy(_without_prefix("policy", arrays)), int(arrays["step"])


def _read(directory: Path, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]] | None:
    """The arrays whose name, up to the first slash, is wanted."""
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
    """Makes the rename itself survive a power cut, where the system can sync a directory."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
