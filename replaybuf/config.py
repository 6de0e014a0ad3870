"""Configs of replay buffers, for sections of a training config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ImportString,
    field_validator,
    model_validator,
)
from typing_extensions import TypeVar

from replaybuf.buffer.putting import PUT_TIMEOUT
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.common.checks import check_seconds, check_task_name
from replaybuf.common.passwords import PasswordFunction, password_function
from replaybuf.common.readable_config import Function, ReadableConfig, refusal
from replaybuf.errors import ConfigError, InputError, MissingDriverError, ReplayBufError
from replaybuf.rules.limits import ErrorBuffer, Limits, OnFull, Rules
from replaybuf.rules.policies import ReplayPolicy, resolve_policy
from replaybuf.storage.places.owners import IN_DATABASE, PAYLOAD_THRESHOLD
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.values import HISTORY, KEEP_CHECKPOINTS, LOCK_SECONDS, RECONNECT_SECONDS
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rewards import SCORE
from replaybuf.values.rollouts.rollout import RolloutState
from replaybuf.values.rollouts.rollout_type import RolloutType

#: The class of the rollouts, for type checkers.
R = TypeVar("R", default=RolloutState)


_EXPECTED_BOUND = "expected a number of groups, or a time such as '12h' or '7d', got {}"


def _check_bound(bound: Any) -> Any:
    """Refuse texts that aren't times, and booleans, which pydantic would read as numbers (`archive: true`)."""
    if isinstance(bound, bool):
        raise ValueError(_EXPECTED_BOUND.format(repr(bound)))
    _parse_bound(bound)
    return bound


#: A function that returns PostgreSQL's password; a text "module:function" becomes one.
Password = Annotated[
    PasswordFunction | str | None, BeforeValidator(lambda value: None if value is None else password_function(value))
]


class ReplayBufferConfig(ReadableConfig, Generic[R]):
    """The database of a buffer, the order of its draws, and its limits on sizes, reuse and rates."""

    url: str
    """`sqlite:///run.db`, `postgresql://user@host/database`, or `memory://` for a SQLite database in memory, which is
    private to this buffer and ends with it."""

    name: str = "default"
    """Distinguishes several buffers in one database."""

    policy: str | ReplayPolicy | type[ReplayPolicy] = "staleness"
    """`fifo`, `lifo`, `staleness`, `uniform`, `prioritized`, or a ReplayPolicy."""

    seed: int | None = None
    """Makes random policies reproducible."""

    max_times_sampled: int = 1
    """A completed group is removed with its n-th draw; 0 keeps it."""

    capacity: int | None = None
    """Bounds the groups of a task, or the completed ones (`on_full`)."""

    on_full: OnFull = "evict"
    """A put of one group more than `capacity` removes others ("evict"), waits ("block") or is refused ("reject"). Only
    completed groups count with the latter two."""

    remover: str | ReplayPolicy | type[ReplayPolicy] = "fifo"
    """The policy whose first groups are evicted."""

    put_timeout: float | None = Field(default=PUT_TIMEOUT, ge=0)
    """A put waits for room for up to so many seconds (None: for ever)."""

    min_size: int = 0
    """Draws block while there are fewer completed groups."""

    samples_per_insert: float | None = None
    """Blocks puts and draws so that each completed group that is put gets about this many draws, to within
    `error_buffer` draws in all."""

    error_buffer: ErrorBuffer | None = None
    """At least the size of a batch; the default is enough for a batch of min_size. Two numbers bound the error itself,
    completed groups put * samples_per_insert - draws, which min_size doesn't shift then: `(0, 64)`."""

    archive: Annotated[int | str | None, BeforeValidator(_check_bound)] = None
    """The retention of completed groups that are removed by their draw, as ARCHIVED, for SQL: a number of groups per
    task, or an age such as "12h" or "7d"."""

    unfit: Annotated[int | str | None, BeforeValidator(_check_bound)] = None
    """The retention of FILTERED and FAILED groups, per status. They don't count for the capacity and are never evicted.
    By default, groups that are put or set aside stay, and groups that a produce strategy filters aren't stored."""

    fill_seconds: float | None = Field(default=None, gt=0)
    """A group that fills rollout by rollout (`put(group=, size=)`) goes without the missing ones so many seconds after
    its first: it is drawable if it has `min_size` completed rollouts, else FAILED. None: it waits for them."""

    max_deliveries: int = 5
    """A group is set aside as FAILED after this many failed deliveries; 0 means no limit."""

    keep_checkpoints: int | None = Field(default=KEEP_CHECKPOINTS, ge=1)
    """The number of last step checkpoints that are kept (None: all)."""

    durability: Literal["normal", "full"] = "normal"
    """With "full", commits to SQLite survive a power cut."""

    payloads: str = IN_DATABASE
    """The place of large payloads: the `"database"`, a folder (on a local disk, or one that all hosts mount), or an
    object store (`s3://bucket/prefix`, `gs://...`, `az://...`). Arrays, tensors and images go there; all values for SQL
    stay in the database."""

    payload_threshold: int = Field(default=PAYLOAD_THRESHOLD, ge=0)
    """Groups with fewer bytes of arrays, tensors and images keep them in the database."""

    lock_timeout: float = Field(default=LOCK_SECONDS, gt=0, le=86_400)
    """Bounds the wait for a lock, in seconds."""

    reconnect_timeout: float = Field(default=RECONNECT_SECONDS, ge=0, le=86_400)
    """An operation that loses its connection to PostgreSQL is retried for up to so many seconds, which also bound the
    wait of a commit for a missing synchronous standby."""

    password: Password = None
    """A function without arguments, or a coroutine function, itself or as "module:function", that returns PostgreSQL's
    password; it is called before each new connection, in a thread or loop of the buffer's own."""

    allow_network_filesystem: bool = False
    """Allows a SQLite file on a network file system, whose locks often don't work."""

    if TYPE_CHECKING:
        rollout_type: type[R] = RolloutState  # type: ignore[assignment]
    else:
        rollout_type: type | ImportString[Any] = RolloutState
    """The class of the rollouts, itself or as "module:Class": a pydantic model, a dataclass, a TypedDict or dict.
    Values of the types in its annotations can be stored. A text imports its module: configs are trusted input."""

    types: Annotated[Sequence[type | ImportString[Any]], AfterValidator(tuple)] = ()
    """Further classes, for fields that declare Any."""

    fields: dict[str, str | None] = Field(default_factory=dict)
    """Our names, and those of the rollout type's fields: {"response_ids": "tokens", "status": None}."""

    statuses: dict[Any, Any] = Field(default_factory=dict)
    """The rollout type's own statuses, and ours: {"truncated": "completed"}."""

    reward_key: str = SCORE
    """If a reward is a dict, means, orders and SQL use this part; all parts are stored, and are in SQL, too."""

    tensors: Literal["torch", "numpy"] = "torch"
    """Torch tensors are read as tensors ("torch"), or as arrays ("numpy")."""

    object_refs: Literal["ref", "value"] = "ref"
    """Ray ObjectRefs are stored by value and read as new ones, or as values."""

    object_ref_timeout: float = Field(default=60.0, gt=0, le=86_400)
    """A put waits for the objects of ObjectRefs for up to so many seconds."""

    converters: dict[type | ImportString[Any], tuple[str, Function, Function]] | None = None
    """Store values of other classes: `{MyClass: ("name", encode, decode)}`, where each class and function may be a
    "module:name"."""

    worker: str | None = None
    """The name recorded with this process's puts and draws, for `worker` in queries and SQL; by default "host:pid"."""

    history: int | None = Field(default=HISTORY, ge=0)
    """The number of last draws whose groups, worker and train step stay on record (None: all)."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        """Refuse a wrong url where the config is made. (Its driver may be installed only where the buffer is built.)"""
        try:
            SQLStorage.check_url(url)
        except MissingDriverError:
            pass
        except ReplayBufError as error:
            raise refusal(cls, {"": str(error)}) from None  # another model would show the url, with its password
        return url

    @field_validator("policy", "remover")
    @classmethod
    def _check_policy(cls, policy: str | ReplayPolicy | type[ReplayPolicy]) -> Any:
        resolve_policy(policy)
        return policy

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        """Refuse a wrong name, and limits with which nothing could ever be drawn, where the config is made."""
        try:
            check_task_name(self.name, "name")
            self.rules()
        except ReplayBufError as error:
            raise refusal(type(self), {"": str(error)}) from None
        return self

    def __hash__(self) -> int:
        return hash((type(self), self.url, self.name))  # other fields may have unhashable values

    def build(self) -> ReplayBuffer[R]:
        """Return the buffer that this config describes; `async with` opens its database, or else the first call.

        Raises ConfigError.
        """
        password = None if self.password is None else password_function(self.password)
        try:
            rollout_type = RolloutType(
                self.rollout_type,
                types=self.types,
                fields=self.fields,
                statuses=self.statuses,
                reward_key=self.reward_key,
            )
            codec = Codec(
                rollout_type,
                tensors=self.tensors,
                object_refs=self.object_refs,
                object_ref_timeout=self.object_ref_timeout,
                converters=self.converters,
            )
            storage = SQLStorage(
                self.url,
                codec,
                self.rules(),
                name=self.name,
                durability=self.durability,
                lock_timeout=self.lock_timeout,
                reconnect_timeout=self.reconnect_timeout,
                allow_network_filesystem=self.allow_network_filesystem,
                history=self.history,
                worker=self.worker,
                payloads=self.payloads,
                payload_threshold=self.payload_threshold,
                password=password,
            )
            return ReplayBuffer(
                storage,
                put_timeout=self.put_timeout,
                keep_checkpoints=self.keep_checkpoints,
            )
        except InputError as error:
            raise ConfigError(str(error)) from None

    def build_sync(self) -> SyncReplayBuffer[R]:
        """Return the buffer as `build` does, for callers without `await`, opened by `with`: the same calls block."""
        return SyncReplayBuffer(self.build())

    def rules(self) -> Rules:
        """Return the policies for draws and evictions, and the limits. Raises ConfigError."""
        groups, seconds = _parse_bound(self.archive)
        unfit_groups, unfit_seconds = _parse_bound(self.unfit)
        limits = Limits(
            archive_groups=groups,
            archive_seconds=seconds,
            unfit_groups=unfit_groups,
            unfit_seconds=unfit_seconds,
            max_times_sampled=self.max_times_sampled,
            capacity=self.capacity,
            on_full=self.on_full,
            min_size=self.min_size,
            samples_per_insert=self.samples_per_insert,
            error_buffer=self.error_buffer,
            max_deliveries=self.max_deliveries,
            fill_seconds=self.fill_seconds,
        )
        return Rules(resolve_policy(self.policy, self.seed), resolve_policy(self.remover, self.seed), limits)


class SyncReplayBufferConfig(ReplayBufferConfig[R], Generic[R]):
    """For synchronous training: oldest first. Without a url the buffer is a private one in memory."""

    url: str = "sqlite:///:memory:"
    policy: str | ReplayPolicy | type[ReplayPolicy] = "fifo"


class AsyncReplayBufferConfig(ReplayBufferConfig[R], Generic[R]):
    """For asynchronous training: most stale first. Without a url the buffer is a private one in memory."""

    url: str = "sqlite:///:memory:"


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _parse_bound(bound: int | str | None) -> tuple[int | None, float | None]:
    """Parse a retention bound: return a number of groups, or a time in seconds. Raises ValueError."""
    if isinstance(bound, str):
        number, unit = bound[:-1], bound[-1:]
        if bound.isascii() and bound.isdigit():  # a text from an environment variable
            return int(bound), None
        try:
            return None, check_seconds(float(number) * _UNITS[unit], "a time")
        except (KeyError, ValueError):
            raise ValueError(_EXPECTED_BOUND.format(repr(bound[:50]))) from None
    return bound, None
