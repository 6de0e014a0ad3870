"""The contract, kept by the pandas backend."""

import pytest

from replaybuf.storage.memory.pandas import PandasStorage
from replaybuf.testing import StorageContract


class TestPandas(StorageContract):
    @pytest.fixture
    def new_storage(self) -> type[PandasStorage]:
        return PandasStorage
