"""Runs an example script so that all of its processes have looked for weights before any of them saves some.

`python -m tests.examples.together SCRIPT COUNT`, in the folder of the run, so many times.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

_exists = Path.exists
_PATIENCE = 60.0


def _exists_for_all(path: Path, **options: Any) -> bool:
    there = _exists(path, **options)
    if path.name.endswith("-weights.json"):
        Path(f"{os.getpid()}.looked").touch()
        end = time.monotonic() + _PATIENCE
        while len(list(Path.cwd().glob("*.looked"))) < int(sys.argv[2]):
            assert time.monotonic() < end, f"the others have not looked within {_PATIENCE:g} s"
            time.sleep(0.005)
    return there


if __name__ == "__main__":
    Path.exists = _exists_for_all  # type: ignore[method-assign]
    runpy.run_path(sys.argv[1], run_name="__main__")
