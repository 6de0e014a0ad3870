"""The contract, kept by SQLite in memory: by default what its single connection can change of it."""

import pytest

from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.testing import StorageContract
from replaybuf.testing.claiming import ClaimLaws
from replaybuf.testing.harness import NewStorage
from replaybuf.testing.lapsing import LeaseTimeLaws
from replaybuf.testing.persistence import PersistenceLaws
from replaybuf.testing.taking import TakingLaws
from replaybuf.testing.waiting import ClosingLaws, WaitingLaws


class SqliteMemory:
    @pytest.fixture
    def new_storage(self) -> NewStorage:
        return lambda codec, rules: SQLStorage("sqlite:///:memory:", codec, rules)


class TestSqliteMemory(SqliteMemory, TakingLaws, WaitingLaws, ClosingLaws, LeaseTimeLaws, PersistenceLaws, ClaimLaws):
    """Reads and writes in turn, waits without other processes, and the end; statements are those of a file."""


@pytest.mark.long
class TestSqliteMemoryWhole(SqliteMemory, StorageContract):
    """All of it."""
