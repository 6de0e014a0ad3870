"""Configs: what a training config holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ImportString, ValidationError

from replaybuf.buffer import ReplayBuffer
from replaybuf.codec import Codec
from replaybuf.errors import ConfigError, MissingDriverError
from replaybuf.policy import ReplayPolicy, resolve_policy
from replaybuf.rollout import RolloutState
from replaybuf.rollout_type import RolloutType
from replaybuf.storage.base import StorageBackend
from replaybuf.storage.memory import MemoryStorage
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.driver import redact


class ReplayBufferConfig(BaseModel):
    """Where groups are kept and in what order they are drawn.

    `url` is `sqlite:///run.db`, `postgresql://user@host/database`, or `memory://` and `pandas://` for buffers that live
    in this process only. `policy` is a name (`fifo`, `staleness`) or a ReplayPolicy. `durability="full"` makes SQLite
    survive even a power cut. `lock_timeout` bounds the wait for a lock, in seconds. `rollout_type` is the class of the
    rollouts: a pydantic model, a dataclass or dict, itself or as "module:Class".
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True, hide_input_in_errors=True)

    url: str
    policy: str | ReplayPolicy | type[ReplayPolicy] = "staleness"
    durability: Literal["normal", "full"] = "normal"
    compression: Literal["none", "zstd"] = "none"
    lock_timeout: float = Field(default=30.0, gt=0, le=86_400)
    rollout_type: type | ImportString[Any] = RolloutState

    env_prefix: ClassVar[str] = "REPLAYBUF_"

    def build(self) -> ReplayBuffer:
        """The buffer that this config describes; it connects at first use. Raises ConfigError."""
        policy = resolve_policy(self.policy)
        rollout_type = RolloutType(self.rollout_type)
        codec = Codec(rollout_type, compression=self.compression)
        return ReplayBuffer(policy, self._storage(codec), rollout_type)

    def _storage(self, codec: Codec) -> StorageBackend:
        if self.url.startswith("memory:"):
            return MemoryStorage(codec)
        if self.url.startswith("pandas:"):
            try:
                from replaybuf.storage.pandas import PandasStorage
            except ImportError as error:
                raise MissingDriverError(
                    "pandas:// needs pandas, which is not installed: pip install 'replaybuf[pandas]'"
                ) from error
            return PandasStorage(codec)
        return SQLStorage(self.url, codec, durability=self.durability, lock_timeout=self.lock_timeout)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The config in a mapping, such as a section of a training config. Raises ConfigError."""
        try:
            return cls(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)
            )
            raise ConfigError(f"{cls.__name__}: {problems} (fields: {', '.join(cls.model_fields)})") from None
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], section: str | None = None) -> Self:
        """The config in a YAML or JSON file, or in a section of it ("trainer.replay_buffer"). Raises ConfigError."""
        file = Path(path)
        try:
            text = file.read_text("utf-8")
            values: Any = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            # Not the text of the error, which quotes the file: there may be a password in it.
            mark = error.problem_mark
            where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise ConfigError(f"can't read {file}{where}: {redact(error.problem or 'not YAML')}") from None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"can't read {file}: {error}") from error
        for name in (section or "").split(".") if section else ():
            if not isinstance(values, Mapping) or name not in values:
                raise ConfigError(f"{file} has no section {section!r} (at {name!r})")
            values = values[name]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{file}: expected a mapping with {', '.join(cls.model_fields)}")
        return cls.from_mapping(values)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The config in environment variables: REPLAYBUF_URL, REPLAYBUF_POLICY, ... Raises ConfigError."""
        environ = os.environ if environ is None else environ
        names = {name: cls.env_prefix + name.upper() for name in cls.model_fields}
        return cls.from_mapping({name: environ[key] for name, key in names.items() if key in environ})

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [(name, redact(value) if name == "url" else value) for name, value in super().__repr_args__()]


class SyncReplayBufferConfig(ReplayBufferConfig):
    """For synchronous training: oldest first. Without a url the buffer is a private one in memory."""

    url: str = "sqlite:///:memory:"
    policy: str | ReplayPolicy | type[ReplayPolicy] = "fifo"


class AsyncReplayBufferConfig(ReplayBufferConfig):
    """For asynchronous training: most stale first. Without a url the buffer is a private one in memory."""

    url: str = "sqlite:///:memory:"
    policy: str | ReplayPolicy | type[ReplayPolicy] = "staleness"
