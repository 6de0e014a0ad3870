"""The whole suite, for subclassing: `replaybuf.testing` says how."""

from __future__ import annotations

from replaybuf.testing.archiving import ArchiveLaws
from replaybuf.testing.chances import ChanceLaws
from replaybuf.testing.checkpointing import CheckpointLaws
from replaybuf.testing.claiming import ClaimLaws, SettlingLaws
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
    ReplacingLaws,
    DroppingLaws,
    QueryingLaws,
    ChangingLaws,
    RefreshingLaws,
    WaitingLaws,
    ClosingLaws,
):
    """What every backend keeps to, but for what is left to chance."""


class GroupContract(ExactGroupContract, ChanceLaws):
    """What every backend keeps to: a `GroupStorage`. Needs the fixture `new_storage`, as all of these."""


class LeaseContract(LeaseLaws, LeaseTimeLaws, SettlingLaws):
    """What a `LeaseStorage` keeps to."""


class CheckpointContract(CheckpointLaws):
    """What a `CheckpointStorage` keeps to."""


class CursorContract(ClaimLaws):
    """What a `CursorStorage` keeps to."""


class CopyContract(PersistenceLaws, DamageLaws):
    """What a `CopyStorage` keeps to; damage is done to groups by way of a state dict."""


class ExactContract(ExactGroupContract, LeaseContract, CheckpointContract, CursorContract, CopyContract):
    """`StorageContract`, but for what is left to chance."""


class StorageContract(GroupContract, LeaseContract, CheckpointContract, CursorContract, CopyContract):
    """What a `StorageBackend` keeps to, which can do everything."""


class DurableContract(DurableLaws, DurableRulesLaws, FenceLaws):
    """What backends keep to that outlive their process. Needs the fixtures `new_storage` and `same_place`."""
