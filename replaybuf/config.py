"""Configs: what a training config holds."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ImportString, ValidationError

from replaybuf.buffer import PUT_TIMEOUT, ReplayBuffer
from replaybuf.checks import check_seconds, check_task_name
from replaybuf.codec import Codec
from replaybuf.errors import ConfigError, MissingDriverError
from replaybuf.policy import ReplayPolicy, resolve_policy
from replaybuf.rollout import RolloutState
from replaybuf.rollout_type import RolloutType
from replaybuf.rules import Limits, OnFull, Rules
from replaybuf.storage.base import StorageBackend
from replaybuf.storage.memory import MemoryStorage
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.driver import redact

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Readable(ModelMetaclass):
    """Makes the errors of whoever calls the class ConfigErrors of one line.

    A config inside of another pydantic model is validated without this call: there pydantic names the place.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise ConfigError(f"{cls.__name__}: {_problems(cls, error)}") from None


class ReplayBufferConfig(BaseModel, metaclass=_Readable):
    """Where groups are kept, in what order they are drawn, and how many, how often and how fast.

    `url` is `sqlite:///run.db`, `postgresql://user@host/database`, or `memory://` and `pandas://` for buffers that live
    in this process only. `name` tells several buffers in one database apart. `policy` is a name (`fifo`, `lifo`,
    `staleness`, `uniform`, `prioritized`) or a ReplayPolicy; `seed` makes random ones reproducible.

    `max_times_sampled`: a completed group leaves with its n-th draw; 0 keeps it. `capacity` bounds the groups of a
    task; beyond it the policy `remover` says which are evicted (`on_full="evict"`), or the put waits for up to
    `put_timeout` seconds ("block"), or is refused ("reject"). `min_size`: nothing is drawn while fewer completed groups
    are there. `samples_per_insert` holds back puts and draws, so that there are about so many draws for each completed
    group that was put, to within `error_buffer` draws (default: enough for a batch of min_size).

    `archive`: completed groups that leave by being drawn stay as ARCHIVED for SQL, so many of each task (a number) or
    for so long (a timedelta, or a text such as "12h" or "7d"). `max_deliveries`: a group that was leased so often in
    vain is set aside as FAILED; 0 for no such limit.

    `durability="full"` makes SQLite survive even a power cut. `lock_timeout` bounds the wait for a lock, in seconds.
    `rollout_type` is the class of the rollouts: a pydantic model, a dataclass or dict, itself or as "module:Class".
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True, hide_input_in_errors=True)

    url: str
    name: str = "default"
    policy: str | ReplayPolicy | type[ReplayPolicy] = "staleness"
    seed: int | None = None
    max_times_sampled: int = 1
    capacity: int | None = None
    on_full: OnFull = "evict"
    remover: str | ReplayPolicy | type[ReplayPolicy] = "fifo"
    put_timeout: float | None = Field(default=PUT_TIMEOUT, ge=0)
    min_size: int = 0
    samples_per_insert: float | None = None
    error_buffer: float | None = None
    archive: int | timedelta | str | None = None
    max_deliveries: int = 5
    durability: Literal["normal", "full"] = "normal"
    compression: Literal["none", "zstd"] = "none"
    lock_timeout: float = Field(default=30.0, gt=0, le=86_400)
    rollout_type: type | ImportString[Any] = RolloutState

    env_prefix: ClassVar[str] = "REPLAYBUF_"

    def build(self) -> ReplayBuffer:
        """The buffer that this config describes; it connects at first use.

        Raises ConfigError, also for limits with which nothing could ever be drawn.
        """
        rollout_type = RolloutType(self.rollout_type)
        codec = Codec(rollout_type, compression=self.compression)
        return ReplayBuffer(self._storage(codec, self.rules()), rollout_type, put_timeout=self.put_timeout)

    def rules(self) -> Rules:
        """What is drawn, what is evicted, and the limits. Raises ConfigError."""
        groups, seconds = _parse_archive(self.archive)
        limits = Limits(
            max_times_sampled=self.max_times_sampled,
            capacity=self.capacity,
            on_full=self.on_full,
            min_size=self.min_size,
            samples_per_insert=self.samples_per_insert,
            error_buffer=self.error_buffer,
            archive_groups=groups,
            archive_seconds=seconds,
            max_deliveries=self.max_deliveries,
        )
        return Rules(resolve_policy(self.policy, self.seed), resolve_policy(self.remover, self.seed), limits)

    def _storage(self, codec: Codec, rules: Rules) -> StorageBackend:
        check_task_name(self.name, "name")
        if self.url.startswith("memory:"):
            return MemoryStorage(codec, rules)
        if self.url.startswith("pandas:"):
            try:
                from replaybuf.storage.pandas import PandasStorage
            except ImportError as error:
                raise MissingDriverError(
                    "pandas:// needs pandas, which is not installed: pip install 'replaybuf[pandas]'"
                ) from error
            return PandasStorage(codec, rules)
        return SQLStorage(
            self.url, codec, rules, name=self.name, durability=self.durability, lock_timeout=self.lock_timeout
        )

    @classmethod
    def queue(cls, url: str, size: int, **options: Any) -> Self:
        """A bounded queue: oldest first, each group once; puts wait while `size` groups are there."""
        return cls(url=url, **({"policy": "fifo", "capacity": size, "on_full": "block"} | options))

    @classmethod
    def stack(cls, url: str, size: int, **options: Any) -> Self:
        """A bounded stack: newest first, each group once; puts wait while `size` groups are there."""
        return cls(url=url, **({"policy": "lifo", "capacity": size, "on_full": "block"} | options))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The config in a mapping, such as a section of a training config. Raises ConfigError."""
        try:
            return cls(**values)
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
        """The config in environment variables: REPLAYBUF_URL, REPLAYBUF_POLICY, ... Raises ConfigError.

        Other variables that begin so are left alone, unless their name is nearly that of a field.
        """
        environ = os.environ if environ is None else environ
        names = {name: cls.env_prefix + name.upper() for name in cls.model_fields}
        for key in environ:
            name = key.removeprefix(cls.env_prefix).lower()
            if name != key.lower() and name not in names and (near := _nearest(name, names)):
                raise ConfigError(f"the environment variable {key} is unknown; did you mean {names[near]}?")
        values = {name: environ[key] for name, key in names.items() if key in environ}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {_problems(cls, error, names.__getitem__)}") from None

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


def _problems(config: type[BaseModel], error: ValidationError, called: Callable[[str], str] = lambda name: name) -> str:
    """What is wrong, on one line, without the values: there may be a password in them."""
    lines: dict[str, list[str]] = {}
    unknown = False
    for one in error.errors(include_input=False, include_url=False):
        name = str(one["loc"][0]) if one["loc"] else ""
        known = name in config.model_fields
        unknown |= not known
        if one["type"] == "missing":
            lines[f"{called(name)} is missing"] = []
        elif known:
            lines.setdefault(called(name), []).append(one["msg"].removeprefix("Value error, "))
        else:
            near = _nearest(name, config.model_fields)
            lines[f"{name} is no field" + (f"; did you mean {near}?" if near else "")] = []
    text = "; ".join(f"{start}: {' / '.join(dict.fromkeys(rest))}" if rest else start for start, rest in lines.items())
    return f"{text} (fields: {', '.join(config.model_fields)})" if unknown else text


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant. (The command line has variables of its own, which are no typos.)"""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=_SIMILAR)), None)


_SIMILAR = 0.8

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _parse_archive(archive: int | timedelta | str | None) -> tuple[int | None, float | None]:
    """The bound of an archive as a number of groups, or as a time in seconds."""
    if isinstance(archive, timedelta):
        return None, archive.total_seconds()
    if isinstance(archive, str):
        number, unit = archive[:-1], archive[-1:]
        if archive.isascii() and archive.isdigit():  # from the environment
            return int(archive), None
        try:
            return None, check_seconds(float(number) * _UNITS[unit], "archive")
        except (KeyError, ValueError):
            raise ConfigError(
                f"archive must be a number of groups, a timedelta or a time such as '12h' or '7d', got {archive!r:.50}"
            ) from None
    return archive, None
