"""The contract suite: the laws that every storage backend of replaybuf keeps, as tests that anyone can run.

The author of a backend subclasses `StorageContract` in a test file and says how a new, empty storage is made. pytest
runs one test for each law (it needs pytest and pytest-asyncio, in any mode):

    from replaybuf.testing import StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def new_storage(self, tmp_path):
            numbers = itertools.count()
            return lambda codec, rules: MyStorage(tmp_path / str(next(numbers)), codec, rules)

`new_storage(codec, rules)` returns another empty storage at each call, not opened yet; the suite opens and closes it. A
backend that outlives its process, or that several processes share, passes `DurableContract` too, which needs a second
fixture: `same_place(storage, codec)` returns a further storage over the same data, with the same rules, whether or not
the first one is open.

    class TestMyStorageIsDurable(DurableContract):
        new_storage = ...
        @pytest.fixture
        def same_place(self):
            return lambda storage, codec: MyStorage(storage.path, codec, storage.rules)

A backend with only some capabilities of a `StorageBackend` (`replaybuf.storage.contract`) is certified for these, by
subclassing their contracts only:

    class TestMyStorage(GroupContract, LeaseContract): ...

`GroupContract` (every backend), `LeaseContract`, `CheckpointContract`, `CursorContract` and `CopyContract` together are
`StorageContract`. A law that also needs another capability is skipped if the backend doesn't have it.

Laws about groups and metadata are tested on the backend itself, those about rules of the buffer (staleness, expiry,
waiting) on a `ReplayBuffer` over it. The laws of chance (`chances.py`) take long. A backend whose draws are compared
with those of the one in memory can do without them: `ExactContract` is the rest.
"""

import pytest

_PARTS = (
    *("harness", "putting", "expiring", "taking", "policies", "chances", "weighing", "reusing", "filling"),
    *("limiting", "leasing", "lapsing", "archiving"),
    *("drawing", "tallying", "replacing", "dropping", "querying", "recording", "refreshing", "waiting", "persistence"),
    *("damage", "checkpointing", "claiming", "fencing"),
    *("durable", "durable_rules", "contract"),
)
pytest.register_assert_rewrite(*(f"replaybuf.testing.{part}" for part in _PARTS))

from replaybuf.testing.contract import (  # noqa: E402
    CheckpointContract,
    CopyContract,
    CursorContract,
    DurableContract,
    ExactContract,
    GroupContract,
    LeaseContract,
    StorageContract,
)
from replaybuf.testing.harness import Harness, group, rollout  # noqa: E402

__all__ = [
    "CheckpointContract",
    "CopyContract",
    "CursorContract",
    "DurableContract",
    "ExactContract",
    "GroupContract",
    "Harness",
    "LeaseContract",
    "StorageContract",
    "group",
    "rollout",
]
