"""A durable, shared, queryable replay buffer for LLM reinforcement learning, on SQLite and PostgreSQL."""

from replaybuf.buffer import ReplayBuffer
from replaybuf.chunks import Chunk, ChunkBuffer, ChunkBufferConfig, OldestVersionPolicy, Selection
from replaybuf.codec import Codec
from replaybuf.config import AsyncReplayBufferConfig, ReplayBufferConfig, SyncReplayBufferConfig
from replaybuf.errors import (
    AccessError,
    ClosedError,
    ConfigError,
    ConflictError,
    DecodeError,
    DiskFullError,
    EncodeError,
    FragmentError,
    FullError,
    InputError,
    LeaseLostError,
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
from replaybuf.lease import Lease
from replaybuf.policy import (
    FIFOPolicy,
    LIFOPolicy,
    OrderTerm,
    PrioritizedPolicy,
    ReplayPolicy,
    StalenessPolicy,
    UniformPolicy,
)
from replaybuf.rollout import RolloutState, Status, group_status
from replaybuf.rollout_type import RolloutType
from replaybuf.rules import Limits, Rules
from replaybuf.staleness import ExpiryRule
from replaybuf.storage.base import Changes, Draw, Leased, NewGroup, Refresh, StorageBackend, StorageItem
from replaybuf.tally import Tally

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "AsyncReplayBufferConfig",
    "Changes",
    "Chunk",
    "ChunkBuffer",
    "ChunkBufferConfig",
    "ClosedError",
    "Codec",
    "ConfigError",
    "ConflictError",
    "DecodeError",
    "DiskFullError",
    "Draw",
    "EncodeError",
    "ExpiryRule",
    "FIFOPolicy",
    "FragmentError",
    "FullError",
    "InputError",
    "LIFOPolicy",
    "Lease",
    "LeaseLostError",
    "Leased",
    "Limits",
    "LockedError",
    "MissingDriverError",
    "MissingSnapshotError",
    "NewGroup",
    "NotADatabaseError",
    "NotEmptyError",
    "NotPicklableError",
    "NotReadyError",
    "OldestVersionPolicy",
    "OrderTerm",
    "PrioritizedPolicy",
    "QueryError",
    "Refresh",
    "ReplayBufError",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "ReplayPolicy",
    "RolloutError",
    "RolloutState",
    "RolloutType",
    "Rules",
    "SchemaError",
    "Selection",
    "SnapshotError",
    "SnapshotMismatchError",
    "StalenessPolicy",
    "Status",
    "StorageBackend",
    "StorageError",
    "StorageItem",
    "SyncReplayBufferConfig",
    "Tally",
    "UniformPolicy",
    "UnreachableError",
    "group_status",
]
