"""The contract, kept by pandas: by default what the metadata in a DataFrame can change of it."""

import pytest

from replaybuf.storage.memory.pandas import PandasStorage
from replaybuf.testing import StorageContract
from replaybuf.testing.expiring import ExpiryLaws
from replaybuf.testing.filling import EvictionLaws
from replaybuf.testing.harness import NewStorage
from replaybuf.testing.leasing import LeaseLaws
from replaybuf.testing.persistence import PersistenceLaws
from replaybuf.testing.policies import PolicyLaws
from replaybuf.testing.putting import PuttingLaws
from replaybuf.testing.querying import ChangingLaws, QueryingLaws
from replaybuf.testing.refreshing import RefreshingLaws
from replaybuf.testing.replacing import ReplacingLaws
from replaybuf.testing.taking import CountingLaws, TakingLaws


class Pandas:
    @pytest.fixture
    def new_storage(self) -> NewStorage:
        return PandasStorage


class TestPandas(
    Pandas,
    PuttingLaws,
    ExpiryLaws,
    TakingLaws,
    CountingLaws,
    PolicyLaws,
    EvictionLaws,
    LeaseLaws,
    ReplacingLaws,
    QueryingLaws,
    ChangingLaws,
    RefreshingLaws,
    PersistenceLaws,
):
    """What looks into the table of metadata, or changes it; the rest is the code of the memory backend."""


@pytest.mark.long
class TestPandasWhole(Pandas, StorageContract):
    """All of it."""
