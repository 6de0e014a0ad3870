"""A durable, shared, queryable replay buffer for LLM reinforcement learning, on SQLite and PostgreSQL."""

from replaybuf.buffer import ReplayBuffer
from replaybuf.codec import Codec
from replaybuf.config import AsyncReplayBufferConfig, ReplayBufferConfig, SyncReplayBufferConfig
from replaybuf.errors import (
    AccessError,
    ClosedError,
    ConfigError,
    DecodeError,
    DiskFullError,
    EncodeError,
    InputError,
    LockedError,
    MissingDriverError,
    MissingSnapshotError,
    NotADatabaseError,
    NotEmptyError,
    NotPicklableError,
    NotReadyError,
    QueryError,
    ReplayBufError,
    RolloutError,
    SchemaError,
    SnapshotError,
    SnapshotMismatchError,
    StorageError,
    UnreachableError,
)
from replaybuf.policy import FIFOPolicy, OrderTerm, ReplayPolicy, StalenessPolicy
from replaybuf.rollout import RolloutState, Status, group_status
from replaybuf.rollout_type import RolloutType
from replaybuf.staleness import ExpiryRule
from replaybuf.storage.base import Changes, NewGroup, Refresh, StorageBackend, StorageItem

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "AsyncReplayBufferConfig",
    "Changes",
    "ClosedError",
    "Codec",
    "ConfigError",
    "DecodeError",
    "DiskFullError",
    "EncodeError",
    "ExpiryRule",
    "FIFOPolicy",
    "InputError",
    "LockedError",
    "MissingDriverError",
    "MissingSnapshotError",
    "NewGroup",
    "NotADatabaseError",
    "NotEmptyError",
    "NotPicklableError",
    "NotReadyError",
    "OrderTerm",
    "QueryError",
    "Refresh",
    "ReplayBufError",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "ReplayPolicy",
    "RolloutError",
    "RolloutState",
    "RolloutType",
    "SchemaError",
    "SnapshotError",
    "SnapshotMismatchError",
    "StalenessPolicy",
    "Status",
    "StorageBackend",
    "StorageError",
    "StorageItem",
    "SyncReplayBufferConfig",
    "UnreachableError",
    "group_status",
]
