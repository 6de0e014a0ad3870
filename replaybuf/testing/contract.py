"""The whole suite, for subclassing: `replaybuf.testing` says how."""

from __future__ import annotations

from replaybuf.testing.archiving import ArchiveLaws
from replaybuf.testing.chances import ChanceLaws
from replaybuf.testing.checkpointing import CheckpointLaws
from replaybuf.testing.claiming import ClaimLaws, ImportLaws, SettlingLaws
from replaybuf.testing.damage import DamageLaws
from replaybuf.testing.drawing import DrawingLaws
from replaybuf.testing.dropping import DroppingLaws
from replaybuf.testing.durable import DurableLaws
from replaybuf.testing.durable_rules import DurableRulesLaws
from replaybuf.testing.expiring import ExpiryLaws
from replaybuf.testing.fencing import FenceLaws
from replaybuf.testing.filling import EvictionLaws, FullLaws
from replaybuf.testing.lapsing import LeaseTimeLaws
from replaybuf.testing.leasing import LeaseLaws
from replaybuf.testing.limiting import RateLaws
from replaybuf.testing.persistence import PersistenceLaws
from replaybuf.testing.policies import PolicyLaws
from replaybuf.testing.putting import PuttingLaws
from replaybuf.testing.querying import ChangingLaws, QueryingLaws
from replaybuf.testing.recording import LeaseRecordLaws, RecordLaws
from replaybuf.testing.refreshing import RefreshingLaws
from replaybuf.testing.replacing import ReplacingLaws
from replaybuf.testing.reusing import ReuseLaws
from replaybuf.testing.taking import CountingLaws, TakingLaws
from replaybuf.testing.tallying import MetricsLaws, TallyLaws
from replaybuf.testing.waiting import ClosingLaws, WaitingLaws
from replaybuf.testing.weighing import WeightLaws


class ExactGroupContract(
    PuttingLaws,
    ExpiryLaws,
    TakingLaws,
    CountingLaws,
    DrawingLaws,
    PolicyLaws,
    WeightLaws,
    ReuseLaws,
    EvictionLaws,
    FullLaws,
    RateLaws,
    ArchiveLaws,
    TallyLaws,
    MetricsLaws,
    RecordLaws,
    ReplacingLaws,
    DroppingLaws,
    QueryingLaws,
    ChangingLaws,
    RefreshingLaws,
    WaitingLaws,
    ClosingLaws,
):
    """The laws of every backend, except those of chance."""


class GroupContract(ExactGroupContract, ChanceLaws):
    """The laws of every backend: a `GroupStorage`. Needs the fixture `new_storage`, as all contracts do."""


class LeaseContract(LeaseLaws, LeaseTimeLaws, LeaseRecordLaws, SettlingLaws):
    """The laws of a `LeaseStorage`."""


class CheckpointContract(CheckpointLaws):
    """The laws of a `CheckpointStorage`."""


class CursorContract(ClaimLaws, ImportLaws):
    """The laws of a `CursorStorage`."""


class CopyContract(PersistenceLaws, DamageLaws):
    """The laws of a `CopyStorage`; groups are damaged through a state dict."""


class ExactContract(ExactGroupContract, LeaseContract, CheckpointContract, CursorContract, CopyContract):
    """`StorageContract` without the laws of chance."""


class StorageContract(GroupContract, LeaseContract, CheckpointContract, CursorContract, CopyContract):
    """The laws of a `StorageBackend`, which has all capabilities."""


class DurableContract(DurableLaws, DurableRulesLaws, FenceLaws):
    """The laws of backends that outlive their process. Needs the fixtures `new_storage` and `same_place`."""
