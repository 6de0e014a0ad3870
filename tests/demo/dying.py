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
from replaybuf.cli.demo.worker import RunFolder

Call = Callable[..., Any]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str) -> Callable[[], None]:
    def patch() -> None:
        setattr(owner, name, lambda *arguments, **options: _die())

    return patch


def _after(owner: type, name: str) -> Callable[[], None]:
    original: Call = getattr(owner, name)

    def dying(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        _die()

    return lambda: setattr(owner, name, dying)


#: In the order in which a run comes to them. A run that goes on comes to those from the third on at its next step.
POINTS: dict[str, Callable[[], None]] = {
    "before the first checkpoint": _before(ReplayBuffer, "checkpoint"),
    "between the first checkpoint and the first weights": _before(RunFolder, "save"),
    "after the first weights": _after(RunFolder, "save"),
    "with a batch in hand": _before(Policy, "train"),
    "trained, but without a checkpoint": _before(ReplayBuffer, "checkpoint"),
    "between checkpoint and weights": _before(RunFolder, "save"),
    "after the weights": _after(RunFolder, "save"),
}

if __name__ == "__main__":
    POINTS[os.environ["DYING"]]()
    sys.argv[1:1] = ["demo"]
    main()
