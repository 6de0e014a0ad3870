"""The whole suite, for subclassing: `tests/contract/__init__.py` says how."""

from __future__ import annotations

from tests.contract.archiving import ArchiveLaws
from tests.contract.chances import ChanceLaws
from tests.contract.checkpointing import CheckpointLaws
from tests.contract.claiming import ClaimLaws, ImportLaws, SettlingLaws
from tests.contract.damage import DamageLaws
from tests.contract.drawing import DrawingLaws
from tests.contract.dropping import DroppingLaws
from tests.contract.durable import DurableLaws
from tests.contract.durable_rules import DurableRulesLaws
from tests.contract.expiring import ExpiryLaws
from tests.contract.fencing import FenceLaws
from tests.contract.filling import EvictionLaws, FullLaws
from tests.contract.lapsing import LeaseTimeLaws
from tests.contract.leasing import LeaseLaws
from tests.contract.limiting import RateLaws
from tests.contract.persistence import PersistenceLaws
from tests.contract.policies import PolicyLaws
from tests.contract.putting import PuttingLaws
from tests.contract.querying import ChangingLaws, QueryingLaws
from tests.contract.recording import LeaseRecordLaws, RecordLaws
from tests.contract.refreshing import RefreshingLaws
from tests.contract.replacing import ReplacingLaws
from tests.contract.reusing import ReuseLaws
from tests.contract.taking import CountingLaws, TakingLaws
from tests.contract.tallying import MetricsLaws, TallyLaws
from tests.contract.waiting import ClosingLaws, WaitingLaws
from tests.contract.weighing import WeightLaws


class TransactionLaws(
    PuttingLaws,
    TakingLaws,
    CountingLaws,
    EvictionLaws,
    FullLaws,
    ArchiveLaws,
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
    DamageLaws,
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
