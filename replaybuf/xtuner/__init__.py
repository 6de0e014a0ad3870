"""The replay buffer of InternLM xtuner, over a database: the names of `xtuner.v1.rl.replay_buffer`, call for call.

    from replaybuf.xtuner import AsyncReplayBufferConfig

    trainer = RLColocateTrainerConfig(replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"), ...)

xtuner's trainers, agent-loop managers, samplers and producers run over it unchanged. `docs/xtuner.md` says what they
win and what differs. Each name is imported when it is first used, and xtuner with its
configs, where it is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.xtuner.config import AsyncReplayBufferConfig as AsyncReplayBufferConfig
    from replaybuf.xtuner.config import SyncReplayBufferConfig as SyncReplayBufferConfig
    from replaybuf.xtuner.database import DatabaseStorage as DatabaseStorage
    from replaybuf.xtuner.parts import FIFOReplayPolicy as FIFOReplayPolicy
    from replaybuf.xtuner.parts import ReplayPolicy as ReplayPolicy
    from replaybuf.xtuner.parts import StalenessReplayPolicy as StalenessReplayPolicy
    from replaybuf.xtuner.parts import StorageBackend as StorageBackend
    from replaybuf.xtuner.parts import StorageItem as StorageItem
    from replaybuf.xtuner.queries import BetweenNode as BetweenNode
    from replaybuf.xtuner.queries import ConditionNode as ConditionNode
    from replaybuf.xtuner.queries import LogicNode as LogicNode
    from replaybuf.xtuner.queries import QueryNode as QueryNode
    from replaybuf.xtuner.queries import ScalarNode as ScalarNode
    from replaybuf.xtuner.queries import SetNode as SetNode
    from replaybuf.xtuner.queries import parse_query as parse_query
    from replaybuf.xtuner.replay_buffer import ReplayBuffer as ReplayBuffer

_NAMES = {
    "config": "AsyncReplayBufferConfig SyncReplayBufferConfig",
    "database": "DatabaseStorage",
    "parts": "FIFOReplayPolicy ReplayPolicy StalenessReplayPolicy StorageBackend StorageItem",
    "queries": "BetweenNode ConditionNode LogicNode QueryNode ScalarNode SetNode parse_query",
    "replay_buffer": "ReplayBuffer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
