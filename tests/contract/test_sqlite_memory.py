"""The contract, kept by SQLite in memory."""

import pytest

from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.testing import StorageContract
from replaybuf.testing.harness import NewStorage


class TestSqliteMemory(StorageContract):
    @pytest.fixture
    def new_storage(self) -> NewStorage:
        return lambda codec, rules: SQLStorage("sqlite:///:memory:", codec, rules)
