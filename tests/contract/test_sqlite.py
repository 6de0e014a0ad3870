"""The contract, kept by SQLite in a file."""

from itertools import count
from pathlib import Path

import pytest

from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.codec.payload import Codec
from tests.contract import DurableContract, ExactContract
from tests.contract.drawing import ChanceLaws
from tests.contract.durable import SamePlace
from tests.contract.harness import NewStorage


class Sqlite:
    @pytest.fixture
    def new_storage(self, tmp_path: Path) -> NewStorage:
        numbers = count()
        return lambda codec, rules: SQLStorage(f"sqlite:///{tmp_path}/{next(numbers)}.db", codec, rules)

    @pytest.fixture
    def same_place(self) -> SamePlace:
        def open_again(storage: SQLStorage, codec: Codec) -> SQLStorage:
            return SQLStorage(f"sqlite:///{storage.url.database}", codec, storage.rules)

        return open_again


class TestSqlite(Sqlite, ExactContract, DurableContract):
    """The laws of chance are kept in memory, and the same draws in a file (`tests/storage/test_same_draws.py`)."""


@pytest.mark.long
class TestSqliteByChance(Sqlite, ChanceLaws):
    """What SQLite in memory answers for by default."""
