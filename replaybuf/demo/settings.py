"""The figures of the demo's run, and what a worker is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

TASK = "arithmetic"

BATCH_GROUPS = 32  # that a training step takes
ENOUGH_GROUPS = 80  # completed ones in the buffer, at which the workers pause
STALE_THRESHOLD = 4  # train steps, at which a group expires
CHUNK_GROUPS = 4  # that a worker generates between two looks at the buffer

DEFAULT_STEPS = 200
DEFAULT_SECONDS = 45.0  # unless --steps is given

#: A worker loads new weights when it is this many steps behind: odd workers are slower.
LAGS = (1, 3)


@dataclass(frozen=True)
class WorkerSettings:
    """What one rollout worker needs to know. `session` names the run of the trainer that it works for."""

    url: str
    folder: str
    worker: int
    workers: int
    seed: int
    session: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        """The settings in a line of `to_json`."""
        return cls(**json.loads(text))

    @property
    def lag(self) -> int:
        """How many steps behind the trainer it gets before it loads new weights."""
        return LAGS[self.worker % len(LAGS)]


def group_key(seed: int, index: int) -> str:
    """The key under which prompt `index` of the stream is put: generated again, it replaces what was there."""
    return f"demo/{seed}/{index}"
