"""A durable, shared, queryable replay buffer for LLM reinforcement learning, on SQLite and PostgreSQL.

The main public names; each is imported at its first use. Rarer names are imported from their modules:
`replaybuf.produce`, `replaybuf.errors`, `replaybuf.rules.policies` and others. `docs/sampling.md` is for authors of
policies.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.buffer.lease import Lease as Lease
    from replaybuf.buffer.replay_buffer import ReplayBuffer as ReplayBuffer
    from replaybuf.config import AsyncReplayBufferConfig as AsyncReplayBufferConfig
    from replaybuf.config import ReplayBufferConfig as ReplayBufferConfig
    from replaybuf.config import SyncReplayBufferConfig as SyncReplayBufferConfig
    from replaybuf.errors import ConfigError as ConfigError
    from replaybuf.errors import FencedError as FencedError
    from replaybuf.errors import FullError as FullError
    from replaybuf.errors import LeaseLostError as LeaseLostError
    from replaybuf.errors import NotReadyError as NotReadyError
    from replaybuf.errors import ReplayBufError as ReplayBufError
    from replaybuf.produce import AsyncProduceStrategy as AsyncProduceStrategy
    from replaybuf.produce import Generated as Generated
    from replaybuf.produce import JSONLines as JSONLines
    from replaybuf.produce import Prompt as Prompt
    from replaybuf.produce import Sampler as Sampler
    from replaybuf.produce import SyncProduceStrategy as SyncProduceStrategy
    from replaybuf.produce import TrainState as TrainState
    from replaybuf.produce import produce_loop as produce_loop
    from replaybuf.produce import publish as publish
    from replaybuf.storage.sql.tasks.handles import load_into as load_into
    from replaybuf.storage.values import StorageItem as StorageItem
    from replaybuf.values.rollouts.rollout import RolloutState as RolloutState
    from replaybuf.values.rollouts.rollout import Status as Status

__version__ = "0.1.0"

_PUBLIC = {
    "buffer.lease": "Lease",
    "buffer.replay_buffer": "ReplayBuffer",
    "config": "AsyncReplayBufferConfig ReplayBufferConfig SyncReplayBufferConfig",
    "errors": "ConfigError FencedError FullError LeaseLostError NotReadyError ReplayBufError",
    "produce": (
        "AsyncProduceStrategy Generated JSONLines Prompt Sampler SyncProduceStrategy TrainState produce_loop publish"
    ),
    "storage.sql.tasks.handles": "load_into",
    "storage.values": "StorageItem",
    "values.rollouts.rollout": "RolloutState Status",
}
_MODULES = {name: f"replaybuf.{module}" for module, names in _PUBLIC.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers use the imports above
    __all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if module := _MODULES.get(name):
        value = globals()[name] = getattr(import_module(module), name)
        return value
    raise AttributeError(f"module 'replaybuf' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
