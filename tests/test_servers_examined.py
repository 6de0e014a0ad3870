"""What is said of a primary's synchronous standbys."""

from __future__ import annotations

import pytest

from replaybuf.storage.sql.engine.outage import Synchronous

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("names", "wanted"),
    [("", 0), ("*", 1), ("db2, db3", 1), ("2 (db2, db3)", 2), ("FIRST 2 (db2, db3, db4)", 2), ("any 3(*)", 3)],
)
def test_how_many_standbys_a_commit_waits_for(names: str, wanted: int) -> None:
    assert Synchronous(names, 0, 0).wanted == wanted
