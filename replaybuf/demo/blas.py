"""One thread for numpy's matrix products.

The demo's matrices are small: OpenBLAS' threads, which spin while they wait for each other, make a training step 20
times slower if other processes, such as the rollout workers, use the cores.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def use_one_thread() -> None:
    """Let numpy's own OpenBLAS, if it has one, use only the calling thread."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for path in folder.glob("*openblas*"):
            _set_threads(path)


def _set_threads(path: Path) -> None:
    try:
        library = ctypes.CDLL(str(path))  # already loaded: this returns a handle
    except OSError:
        return
    for name in _SETTERS:
        setter = getattr(library, name, None)
        if setter is not None:
            setter(ctypes.c_int(1))
            return
