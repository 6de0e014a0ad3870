"""The contract: the laws that a buffer keeps on every database.

A database is tested by a subclass that says how a new, empty storage is made; pytest runs one test for each law:

    class TestMyDatabase(StorageContract):
        @pytest.fixture
        def new_storage(self, tmp_path):
            numbers = itertools.count()
            return lambda codec, rules: SQLStorage(f"sqlite:///{tmp_path}/{next(numbers)}.db", codec, rules)

`new_storage(codec, rules)` returns another empty storage at each call, not opened yet; the suite opens and closes it.
One that outlives its process, or that several processes share, keeps `DurableContract` too, which needs a second
fixture: `same_place(storage, codec)` returns a further storage over the same data, with the same rules, whether or not
the first one is open.

Laws about groups and metadata are tested on the storage itself, those about rules of the buffer (expiry, waiting) on a
`ReplayBuffer` over it. What is here is what random operations beside the model (`tests/side_by_side`) don't show:
waits, calls at the same time, time, damage, several storages over one place, and what errors say. The model keeps the
laws of chance, which take long, and a database whose draws are its draws (`tests/storage/test_same_draws.py`) can do
without them: `ExactContract` is the rest. Of that, `TransactionLaws` rest on how a database locks and tells others.
"""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{part.stem}" for part in Path(__file__).parent.glob("[a-z]*.py")))
