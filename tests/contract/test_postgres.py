"""The contract, kept by PostgreSQL."""

from collections.abc import Iterator

import pytest

from replaybuf.codec.payload import Codec
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.testing import DurableContract, ExactContract
from replaybuf.testing.chances import ChanceLaws
from replaybuf.testing.durable import SamePlace
from replaybuf.testing.harness import NewStorage
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


class TestPostgres(Postgres, ExactContract, DurableContract):
    """Draws are compared with those of memory in `test_same_draws.py`."""


@pytest.mark.long
class TestPostgresByChance(Postgres, ChanceLaws):
    """What memory answers for by default."""


class OtherDefault(Postgres):
    """A database whose transactions are of another isolation unless they say so."""

    isolation: str

    @pytest.fixture(scope="class")
    def postgres_databases(self, postgres_url: str) -> Iterator[Databases]:  # type: ignore[override]
        databases = Databases(postgres_url, default_transaction_isolation=self.isolation)
        yield databases
        databases.close()


@pytest.mark.long
class TestPostgresRepeatableRead(OtherDefault, ExactContract, DurableContract):
    """By default, the laws that rest on the isolation: `faults/test_postgres_defaults.py`."""

    isolation = "repeatable read"


@pytest.mark.long
class TestPostgresSerializable(OtherDefault, ExactContract, DurableContract):
    isolation = "serializable"
