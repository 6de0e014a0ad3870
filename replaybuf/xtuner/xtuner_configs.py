"""xtuner's configs of replay buffers, with a URL.

They are subclasses of xtuner's, because the configs of its trainers declare and check those classes.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ImportString

from replaybuf import config
from replaybuf.rules.policies import ReplayPolicy
from replaybuf.xtuner.installed import config_class, rollout_class
from replaybuf.xtuner.parts import DatabaseStorage
from replaybuf.xtuner.xtuner_buffer import ReplayBuffer

_TheirSync: Any = config_class("SyncReplayBufferConfig")
_TheirAsync: Any = config_class("AsyncReplayBufferConfig")


class _OverDatabase(config.ReplayBufferConfig[Any]):
    """Takes every setting of `replaybuf.ReplayBufferConfig`, and builds xtuner's face of the buffer.

    `rollout_type` is xtuner's RolloutState, or a subclass. Without a url the buffer is a private one in memory, as
    xtuner's is. Raises MissingDriverError where xtuner isn't installed.
    """

    url: str = "sqlite:///:memory:"
    rollout_type: type | ImportString[Any] = Field(default_factory=rollout_class)

    def build(self) -> ReplayBuffer:  # type: ignore[override]
        """Return the buffer that this config describes; it connects at first use. Raises ConfigError."""
        return ReplayBuffer(None, DatabaseStorage(super().build()))


class SyncReplayBufferConfig(_OverDatabase, _TheirSync):  # type: ignore[misc]
    """For synchronous training: oldest first."""

    policy: str | ReplayPolicy | type[ReplayPolicy] = "fifo"


class AsyncReplayBufferConfig(_OverDatabase, _TheirAsync):  # type: ignore[misc]
    """For asynchronous training: most stale first."""

    policy: str | ReplayPolicy | type[ReplayPolicy] = "staleness"
