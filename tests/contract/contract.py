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


class ExactContract(
    PuttingLaws,
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
    LeaseLaws,
    LeaseTimeLaws,
    LeaseRecordLaws,
    SettlingLaws,
    CheckpointLaws,
    ClaimLaws,
    ImportLaws,
    PersistenceLaws,
    DamageLaws,
):
    """The laws of one process that a database can break, except those of chance."""


class StorageContract(ExactContract, ChanceLaws, ExpiryLaws):
    """All laws of one process. Needs the fixture `new_storage`, as all contracts do."""


class DurableContract(DurableLaws, DurableRulesLaws, FenceLaws):
    """The laws of databases that outlive their process. Needs the fixtures `new_storage` and `same_place`."""
