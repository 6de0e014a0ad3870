"""The whole suite, for subclassing: `tests/contract/__init__.py` says how."""

from __future__ import annotations

from tests.contract.annotating import AnnotatingLaws
from tests.contract.drawing import ChanceLaws, DrawingLaws, PolicyLaws, ReuseLaws, WeightLaws
from tests.contract.dropping import ArchiveLaws, DroppingLaws
from tests.contract.durable import DamageLaws, DurableLaws, DurableRulesLaws, FenceLaws
from tests.contract.filling import EvictionLaws, FullLaws, RateLaws
from tests.contract.leasing import LeaseLaws, LeaseTimeLaws
from tests.contract.mixing import MixLaws
from tests.contract.persistence import CheckpointLaws, PersistenceLaws
from tests.contract.putting import CountingLaws, PuttingLaws, ReplacingLaws, TakingLaws
from tests.contract.querying import ChangingLaws, ClaimLaws, ImportLaws, QueryingLaws, SettlingLaws
from tests.contract.refreshing import ExpiryLaws, RefreshingLaws
from tests.contract.segments import SegmentLaws
from tests.contract.waiting import ClosingLaws, LeaseRecordLaws, MetricsLaws, RecordLaws, TallyLaws, WaitingLaws


class TransactionLaws(
    PuttingLaws,
    TakingLaws,
    CountingLaws,
    EvictionLaws,
    FullLaws,
    ArchiveLaws,
    MixLaws,
    RecordLaws,
    ReplacingLaws,
    DroppingLaws,
    ChangingLaws,
    RefreshingLaws,
    WaitingLaws,
    LeaseLaws,
    LeaseTimeLaws,
    LeaseRecordLaws,
    SettlingLaws,
    CheckpointLaws,
    ClaimLaws,
    ImportLaws,
    AnnotatingLaws,
    DamageLaws,
    SegmentLaws,
):
    """The laws that rest on how a database locks, commits, and tells others of it."""


class ModelledLaws(
    DrawingLaws,
    PolicyLaws,
    WeightLaws,
    ReuseLaws,
    RateLaws,
    TallyLaws,
    MetricsLaws,
    QueryingLaws,
    ClosingLaws,
    PersistenceLaws,
):
    """The laws of draws, rates, figures, queries and copies. They hold where random operations agree with the model."""


class ExactContract(TransactionLaws, ModelledLaws):
    """The laws of one process that a database can break, except those of chance."""


class StorageContract(ExactContract, ChanceLaws, ExpiryLaws):
    """All laws of one process. Needs the fixture `new_storage`, as all contracts do."""


class DurableContract(DurableLaws, DurableRulesLaws, FenceLaws):
    """The laws of databases that outlive their process. Needs the fixtures `new_storage` and `same_place`."""
