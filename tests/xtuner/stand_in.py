"""A stand-in for xtuner where it isn't installed: what the face uses of it, by its published interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from tests.frameworks import XtunerRollout, XtunerStatus

#: The calls of `release_and_discard_rollout_groups`: the sessions that each one released.
released: list[list[int]] = []


async def release_and_discard_rollout_groups(groups: list[list[XtunerRollout]]) -> None:
    """Reset the fields of the rollouts, those that have a default, as xtuner does after it released the sessions."""
    released.append([rollout.session_id for group in groups for rollout in group if rollout.session_id is not None])
    for group in groups:
        for rollout in group:
            for name, field in XtunerRollout.model_fields.items():
                if not field.is_required():
                    setattr(rollout, name, field.get_default(call_default_factory=True))


class SyncReplayBufferConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def build(self) -> Any: ...


class AsyncReplayBufferConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def build(self) -> Any: ...


class TrainerConfig(BaseModel):
    """As the trainers' configs declare it."""

    model_config = ConfigDict(extra="forbid")

    replay_buffer_config: SyncReplayBufferConfig | AsyncReplayBufferConfig = SyncReplayBufferConfig()


_MODULES: dict[str, dict[str, Any]] = {
    "xtuner": {},
    "xtuner.v1": {},
    "xtuner.v1.data_proto": {},
    "xtuner.v1.data_proto.rl_data": {"RolloutState": XtunerRollout, "Status": XtunerStatus},
    "xtuner.v1.rl": {},
    "xtuner.v1.rl.replay_buffer": {
        "SyncReplayBufferConfig": SyncReplayBufferConfig,
        "AsyncReplayBufferConfig": AsyncReplayBufferConfig,
    },
    "xtuner.v1.rl.rollout": {},
    "xtuner.v1.rl.rollout.trace_store": {"release_and_discard_rollout_groups": release_and_discard_rollout_groups},
    "xtuner.v1.train": {},
    "xtuner.v1.train.rl_trainer": {"RLColocateTrainerConfig": TrainerConfig},
}


@contextmanager
def installed(*, is_installed: bool = True) -> Iterator[None]:
    """Make it what `import xtuner` finds, or nothing. Within, `replaybuf.integrations.xtuner` is imported anew."""
    before = _forget()
    if is_installed:
        for name, values in _MODULES.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            module.__dict__.update(values)
            sys.modules[name] = module
    else:
        sys.modules["xtuner"] = None  # type: ignore[assignment]
    released.clear()
    try:
        yield
    finally:
        _forget()
        sys.modules.update(before)


def _forget() -> dict[str, ModuleType]:
    """Remove the modules of xtuner, and those that depend on it, from those that are imported. Return them."""
    names = [
        name
        for name in sys.modules
        if name.partition(".")[0] == "xtuner" or name.startswith("replaybuf.integrations.xtuner")
    ]
    return {name: sys.modules.pop(name) for name in names}
