"""The contract, kept by the memory backend."""

import pytest

from replaybuf.storage.memory.backend import MemoryStorage
from replaybuf.testing import StorageContract


class TestMemory(StorageContract):
    @pytest.fixture
    def new_storage(self) -> type[MemoryStorage]:
        return MemoryStorage
