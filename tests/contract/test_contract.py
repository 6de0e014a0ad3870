"""The contract, kept by SQLite in a file and in memory, and by PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.codec.payload import Codec
from tests.contract.annotating import AnnotatingLaws
from tests.contract.drawing import ChanceLaws, DrawingLaws, NarrowedChanceLaws, WeightLaws
from tests.contract.dropping import ArchiveLaws, DroppingLaws
from tests.contract.durable import DamageLaws, DurableLaws, DurableRulesLaws, FenceLaws, SamePlace
from tests.contract.filling import EvictionLaws, FullLaws, RateLaws
from tests.contract.harness import NewStorage
from tests.contract.leasing import LeaseLaws, LeaseTimeLaws
from tests.contract.mixing import MixLaws
from tests.contract.persistence import CheckpointLaws, PersistenceLaws
from tests.contract.putting import CountingLaws, PuttingLaws, ReplacingLaws, TakingLaws
from tests.contract.querying import ClaimLaws, ImportLaws, QueryingLaws, SettlingLaws
from tests.contract.refreshing import RefreshingLaws
from tests.contract.segments import SegmentLaws
from tests.contract.waiting import ClosingLaws, LeaseRecordLaws, MetricsLaws, RecordLaws, WaitingLaws
from tests.postgres import new_urls
from tests.reference.backend import Reference


class TransactionLaws(
    TakingLaws,
    FullLaws,
    WaitingLaws,
    LeaseTimeLaws,
    SettlingLaws,
    ClaimLaws,
    AnnotatingLaws,
):
    """The laws that rest on how a database locks, commits, and tells others of it."""


class ModelledLaws(
    PuttingLaws,
    EvictionLaws,
    RecordLaws,
    LeaseLaws,
    LeaseRecordLaws,
    CheckpointLaws,
    DrawingLaws,
    WeightLaws,
    MixLaws,
    CountingLaws,
    ReplacingLaws,
    DroppingLaws,
    ArchiveLaws,
    RefreshingLaws,
    ImportLaws,
    DamageLaws,
    SegmentLaws,
    RateLaws,
    MetricsLaws,
    QueryingLaws,
    ClosingLaws,
    PersistenceLaws,
):
    """The laws of what calls change, draw and count. They hold where random operations agree with the model."""


class ExactContract(TransactionLaws, ModelledLaws):
    """The laws of one process that a database can break, except those of chance."""


class StorageContract(ExactContract, ChanceLaws, NarrowedChanceLaws):
    """All laws of one process. Needs the fixture `new_storage`, as all contracts do."""


class DurableContract(DurableLaws, DurableRulesLaws, FenceLaws):
    """The laws of databases that outlive their process. Needs the fixtures `new_storage` and `same_place`."""


class Stores:
    """New storages of one kind."""

    kind: str

    @pytest.fixture
    def new_storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewStorage]:
        with new_urls(self.kind, request, tmp_path) as new_url:
            yield lambda codec, rules: SQLStorage(new_url(), codec, rules)

    @pytest.fixture
    def same_place(self) -> SamePlace:
        def open_again(storage: SQLStorage, codec: Codec) -> SQLStorage:
            return SQLStorage(storage.url.render_as_string(hide_password=False), codec, storage.rules)

        return open_again


class TestSqlite(Stores, ExactContract, DurableContract):
    """All but the laws of chance: the model keeps those."""

    kind = "sqlite"


class TestModel(ChanceLaws):
    """Databases draw and evict as the model does (`tests/storage/test_same_draws.py`), which is quicker."""

    @pytest.fixture
    def new_storage(self) -> Any:
        return Reference


@pytest.mark.long
class TestSqliteByChance(Stores, ChanceLaws, NarrowedChanceLaws):
    """What the model answers for by default."""

    kind = "sqlite"


class TestSqliteMemory(Stores, WaitingLaws, ClosingLaws, NarrowedChanceLaws):
    """Waits without other processes, and the end; statements are those of a file."""

    kind = "memory"


@pytest.mark.long
class TestSqliteMemoryWhole(Stores, StorageContract):
    """All of it."""

    kind = "memory"


class TestPostgres(Stores, TransactionLaws, DurableContract):
    """What its locks, what it sends with COMMIT and its notifications can break."""

    kind = "postgresql"


@pytest.mark.long
class TestPostgresLikeTheModel(Stores, ModelledLaws, ChanceLaws, NarrowedChanceLaws):
    """What `side_by_side` and `storage/test_same_draws.py` compare by default."""

    kind = "postgresql"
