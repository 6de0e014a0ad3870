"""The replay buffer of InternLM xtuner, over a database: the names of `xtuner.v1.rl.replay_buffer`, call for call.

    from replaybuf.xtuner import AsyncReplayBufferConfig

    trainer = RLColocateTrainerConfig(replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"), ...)

xtuner's trainers, agent-loop managers, samplers and producers run over it unchanged. `docs/xtuner.md` explains the
benefits and differences. Each name is imported at its first use; xtuner, where it is installed, with the buffer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.xtuner.parts import BetweenNode as BetweenNode
    from replaybuf.xtuner.parts import ConditionNode as ConditionNode
    from replaybuf.xtuner.parts import DatabaseStorage as DatabaseStorage
    from replaybuf.xtuner.parts import FIFOReplayPolicy as FIFOReplayPolicy
    from replaybuf.xtuner.parts import LogicNode as LogicNode
    from replaybuf.xtuner.parts import QueryNode as QueryNode
    from replaybuf.xtuner.parts import ReplayPolicy as ReplayPolicy
    from replaybuf.xtuner.parts import ScalarNode as ScalarNode
    from replaybuf.xtuner.parts import SetNode as SetNode
    from replaybuf.xtuner.parts import StalenessReplayPolicy as StalenessReplayPolicy
    from replaybuf.xtuner.parts import StorageBackend as StorageBackend
    from replaybuf.xtuner.parts import StorageItem as StorageItem
    from replaybuf.xtuner.parts import parse_query as parse_query
    from replaybuf.xtuner.xtuner_buffer import AsyncReplayBufferConfig as AsyncReplayBufferConfig
    from replaybuf.xtuner.xtuner_buffer import ReplayBuffer as ReplayBuffer
    from replaybuf.xtuner.xtuner_buffer import SyncReplayBufferConfig as SyncReplayBufferConfig

_NAMES = {
    "parts": """
        BetweenNode ConditionNode DatabaseStorage FIFOReplayPolicy LogicNode QueryNode ReplayPolicy ScalarNode SetNode
        StalenessReplayPolicy StorageBackend StorageItem parse_query
    """,
    "xtuner_buffer": "AsyncReplayBufferConfig ReplayBuffer SyncReplayBufferConfig",
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
