"""The replay buffer of InternLM xtuner, over a database: the names of `xtuner.v1.rl.replay_buffer`, call for call.

    from replaybuf.integrations.xtuner import AsyncReplayBufferConfig

    trainer = RLColocateTrainerConfig(replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"), ...)

xtuner's trainers, agent-loop managers, samplers and producers run over it unchanged. `docs/xtuner.md` explains the
benefits and differences. Each name is imported at its first use; xtuner, where it is installed, with the buffer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.integrations.xtuner.xtuner_buffer import AsyncReplayBufferConfig as AsyncReplayBufferConfig
    from replaybuf.integrations.xtuner.xtuner_buffer import ReplayBuffer as ReplayBuffer
    from replaybuf.integrations.xtuner.xtuner_buffer import SyncReplayBufferConfig as SyncReplayBufferConfig

__all__ = ["AsyncReplayBufferConfig", "ReplayBuffer", "SyncReplayBufferConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.xtuner_buffer"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
