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

Laws about groups and metadata are tested on the storage itself, those about rules of the buffer (staleness, expiry,
waiting) on a `ReplayBuffer` over it. The laws of chance (`chances.py`) take long. A database whose draws are compared
with those of the model (`tests/storage/test_same_draws.py`) can do without them: `ExactContract` is the rest. Of that,
`TransactionLaws` are left where random operations are compared with the model, too (`tests/side_by_side`).
"""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{part.stem}" for part in Path(__file__).parent.glob("[a-z]*.py")))
