"""The state that a trainer publishes to workers: its step and its newest weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from replaybuf.common.checks import check_step, check_whole
from replaybuf.errors import InputError

#: The name of the state's cursor, in the table in which prompt ledgers keep their positions.
TRAINER = "replaybuf:trainer"


@dataclass(frozen=True, slots=True)
class TrainState:
    """The trainer's state: `train_step` is its next step, `model_step` that of its newest weights.

    `weights` locates the weights (a path, a URL, a name that the workers understand). `finished` is true after the
    trainer's last step.
    """

    train_step: int
    model_step: int
    weights: str | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "train_step", check_whole(self.train_step, "train_step"))
        object.__setattr__(self, "model_step", check_step(self.model_step, "model_step"))
        if self.weights is not None and not isinstance(self.weights, str):
            raise InputError(f"weights must be a text that says where they are, or None, got {self.weights!r:.100}")
        if not isinstance(self.finished, bool):
            raise InputError(f"finished must be true or false, got {self.finished!r:.100}")

    def encode(self) -> bytes:
        """Return the state as the store keeps it."""
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def decode(cls, value: bytes) -> TrainState:
        """Decode a state from `encode`. Raises InputError for anything else."""
        try:
            fields: Any = msgpack.unpackb(value)
            return cls(**fields)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InputError(f"this is not what a trainer has published: {error}") from error
