"""The contract, kept by SQLite in memory: by default what its single connection can change of it."""

import pytest

from replaybuf.storage.sql.backend import SQLStorage
from tests.contract import StorageContract
from tests.contract.drawing import ChanceLaws
from tests.contract.harness import NewStorage
from tests.contract.persistence import PersistenceLaws
from tests.contract.putting import TakingLaws
from tests.contract.querying import ClaimLaws
from tests.contract.refreshing import ExpiryLaws
from tests.contract.waiting import ClosingLaws, WaitingLaws


class SqliteMemory:
    @pytest.fixture
    def new_storage(self) -> NewStorage:
        return lambda codec, rules: SQLStorage("memory://", codec, rules)


class TestSqliteMemory(
    SqliteMemory, TakingLaws, WaitingLaws, ClosingLaws, PersistenceLaws, ClaimLaws, ChanceLaws, ExpiryLaws
):
    """Reads and writes in turn, waits without other processes, and the end; statements are those of a file.

    The laws of chance are here because no disk slows their many draws; other databases draw the same
    (`tests/storage/test_same_draws.py`). What expires in a put does before a database sees it.
    """


@pytest.mark.long
class TestSqliteMemoryWhole(SqliteMemory, StorageContract):
    """All of it."""
