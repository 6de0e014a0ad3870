"""The demo in a process that kills itself (kill -9) at a point: `DYING=POINT python -m tests.demo.dying ...`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.cli import main
from replaybuf.cli.demo.policy import Policy
from replaybuf.cli.demo.worker import Run, RunFolder

Call = Callable[..., Any]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str) -> Callable[[], None]:
    def patch() -> None:
        setattr(owner, name, lambda *arguments, **options: _die())

    return patch


def _at_save(step: int, *, before: bool) -> Callable[[], None]:
    """Die before or after the weights of this step, or of a later one, are saved."""
    original: Call = RunFolder.save

    def dying(folder: RunFolder, run: Run) -> None:
        if before and run.step >= step:
            _die()
        original(folder, run)
        if run.step >= step:
            _die()

    return lambda: setattr(RunFolder, "save", dying)


#: In the order in which a run comes to them. A run that goes on comes to those from the third on at its next step.
POINTS: dict[str, Callable[[], None]] = {
    "before the first checkpoint": _before(ReplayBuffer, "checkpoint"),
    "between the first checkpoint and the first weights": _at_save(0, before=True),
    "after the first weights": _at_save(0, before=False),
    "with a batch in hand": _before(Policy, "train"),
    "trained, but without a checkpoint": _before(ReplayBuffer, "checkpoint"),
    "between checkpoint and weights": _at_save(1, before=True),
    "after the weights": _at_save(1, before=False),
}

if __name__ == "__main__":
    POINTS[os.environ["DYING"]]()
    sys.argv[1:1] = ["demo"]
    main()
