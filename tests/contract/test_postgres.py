"""The contract, kept by PostgreSQL."""

from collections.abc import Iterator

import pytest

from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.codec.payload import Codec
from tests.contract import DurableContract, TransactionLaws
from tests.contract.contract import ModelledLaws
from tests.contract.drawing import ChanceLaws
from tests.contract.durable import SamePlace
from tests.contract.harness import NewStorage
from tests.postgres import Databases


class Postgres:
    @pytest.fixture
    def new_storage(self, postgres_databases: Databases) -> Iterator[NewStorage]:
        with postgres_databases.lent() as new_database:
            yield lambda codec, rules: SQLStorage(new_database(), codec, rules)

    @pytest.fixture
    def same_place(self) -> SamePlace:
        def open_again(storage: SQLStorage, codec: Codec) -> SQLStorage:
            return SQLStorage(storage.url.render_as_string(hide_password=False), codec, storage.rules)

        return open_again


class TestPostgres(Postgres, TransactionLaws, DurableContract):
    """What its locks, its puts in one statement and its notifications can break."""


@pytest.mark.long
class TestPostgresLikeTheModel(Postgres, ModelledLaws, ChanceLaws):
    """What `side_by_side` and `storage/test_same_draws.py` compare by default."""
