"""The contract, kept by PostgreSQL."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from replaybuf.codec import Codec
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.testing import DurableContract, StorageContract
from replaybuf.testing.durable import SamePlace
from replaybuf.testing.harness import NewStorage
from tests.postgres import new_database


class TestPostgres(StorageContract, DurableContract):
    @pytest.fixture
    def new_storage(self, postgres_url: str) -> Iterator[NewStorage]:
        with ExitStack() as databases:
            yield lambda codec: SQLStorage(databases.enter_context(new_database(postgres_url)), codec)

    @pytest.fixture
    def same_place(self) -> SamePlace:
        def open_again(storage: SQLStorage, codec: Codec) -> SQLStorage:
            return SQLStorage(storage.url.render_as_string(hide_password=False), codec)

        return open_again
