"""The contract, kept by SQLite in a file."""

from itertools import count
from pathlib import Path

import pytest

from replaybuf.codec.payload import Codec
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.testing import DurableContract, ExactContract
from replaybuf.testing.chances import ChanceLaws
from replaybuf.testing.durable import SamePlace
from replaybuf.testing.harness import NewStorage


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
    """Draws are compared with those of memory in `test_same_draws.py`."""


@pytest.mark.long
class TestSqliteByChance(Sqlite, ChanceLaws):
    """What memory answers for by default."""
