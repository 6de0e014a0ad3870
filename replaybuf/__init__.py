"""A durable, shared, queryable replay buffer for LLM reinforcement learning, on SQLite and PostgreSQL.

The main public names; each is imported at its first use. Rarer names are imported from their modules:
`replaybuf.produce`, `replaybuf.chunks`, `replaybuf.errors`. `docs/backends.md` is for authors of policies.
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
    from replaybuf.errors import ClosedError as ClosedError
    from replaybuf.errors import ConfigError as ConfigError
    from replaybuf.errors import FencedError as FencedError
    from replaybuf.errors import FullError as FullError
    from replaybuf.errors import LeaseLostError as LeaseLostError
    from replaybuf.errors import NotReadyError as NotReadyError
    from replaybuf.errors import QueryError as QueryError
    from replaybuf.errors import ReplayBufError as ReplayBufError
    from replaybuf.errors import StorageError as StorageError
    from replaybuf.prompts import Prompt as Prompt
    from replaybuf.prompts import PromptLedger as PromptLedger
    from replaybuf.rollouts.rollout import RolloutState as RolloutState
    from replaybuf.rollouts.rollout import Status as Status
    from replaybuf.rules.policies import FIFOPolicy as FIFOPolicy
    from replaybuf.rules.policies import LIFOPolicy as LIFOPolicy
    from replaybuf.rules.policies import OrderTerm as OrderTerm
    from replaybuf.rules.policies import PrioritizedPolicy as PrioritizedPolicy
    from replaybuf.rules.policies import ReplayPolicy as ReplayPolicy
    from replaybuf.rules.policies import StalenessPolicy as StalenessPolicy
    from replaybuf.rules.policies import UniformPolicy as UniformPolicy
    from replaybuf.storage.sql.tasks.handles import ArrayHandle as ArrayHandle
    from replaybuf.storage.sql.tasks.handles import load_all as load_all
    from replaybuf.storage.sql.tasks.handles import load_into as load_into
    from replaybuf.storage.values import StorageItem as StorageItem

__version__ = "0.1.0"

_PUBLIC = {
    "buffer.lease": "Lease",
    "buffer.replay_buffer": "ReplayBuffer",
    "config": "AsyncReplayBufferConfig ReplayBufferConfig SyncReplayBufferConfig",
    "errors": """
        ClosedError ConfigError FencedError FullError LeaseLostError NotReadyError QueryError ReplayBufError
        StorageError
    """,
    "prompts": "Prompt PromptLedger",
    "rollouts.rollout": "RolloutState Status",
    "rules.policies": """
        FIFOPolicy LIFOPolicy OrderTerm PrioritizedPolicy ReplayPolicy StalenessPolicy UniformPolicy
    """,
    "storage.sql.tasks.handles": "ArrayHandle load_all load_into",
    "storage.values": "StorageItem",
}
# Names that users may look for here; the error names their modules.
_ELSEWHERE = {
    "chunks": "Chunk ChunkBuffer ChunkBufferConfig OldestVersionPolicy Selection",
    "codec.payload": "Codec",
    "errors": """
        AccessError CheckpointError CommitsLostError ConflictError CutShortError DecodeError DiskFullError
        EncodeError FileEndsError FileError FileThereError ForkedError FragmentError GroupError InputError
        LeaseNotBegunError LockedError MissingDriverError MissingSnapshotError NetworkFilesystemError
        NoConnectionLeftError NoPrimaryError NotADatabaseError NotAdmittedError NotConnectedError NotEmptyError
        NotPicklableError OnlyStandbysError PartlyStoredError PayloadStoreError PoolBusyError ProduceError
        PromptsExhaustedError RankError RolloutError SchemaError SnapshotError SnapshotMismatchError
        StandbyAwaitedError TooLargeError UnreachableError UnsupportedError
    """,
    "files.exporting": "Exported",
    "files.importing": "Imported",
    "produce": """
        AgentLoop AsyncProduceStrategy Generated JSONLines ProduceStrategy ProduceSummary Sampler
        SamplerWithReplayBuffer SyncProduceStrategy TrainState batch_sizes produce_loop publish published
        reward_varies to_rollout wait_published
    """,
    "progress": "Progress",
    "rollouts.rollout": "group_status",
    "rollouts.rollout_type": "RolloutType",
    "rollouts.staleness": "ExpiryRule",
    "rules.causes": "Reason",
    "rules.diagnosis": "Diagnosis",
    "rules.limits": "Limits Rules",
    "rules.transitions": "Tally",
    "storage.sql.backend": "SQLStorage",
    "sync": "SyncLease SyncReplayBuffer",
    "storage.values": "Changes Checkpoint Cursor Draw Leased NewGroup Refresh",
}


def _modules(names: dict[str, str]) -> dict[str, str]:
    """Return the module of each name."""
    return {name: f"replaybuf.{module}" for module, line in names.items() for name in line.split()}


_MODULES = _modules(_PUBLIC)

if not TYPE_CHECKING:  # type checkers use the imports above
    __all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if module := _MODULES.get(name):
        value = globals()[name] = getattr(import_module(module), name)
        return value
    message = f"module 'replaybuf' has no attribute {name!r}"
    if module := _modules(_ELSEWHERE).get(name):
        message = f"{name} is not in 'replaybuf' itself: from {module} import {name}"
        # `from replaybuf import NAME` tests with hasattr, and its own ImportError wouldn't say this.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(message, name=__name__)
    raise AttributeError(message, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
