"""Two buffers side by side: one over a model, which says what is right, and one over a database.

A hypothesis state machine runs the same random operations on both and compares all that can be seen of them after each:
results, errors, groups with their rollouts, counts, and the SQL views of databases.
"""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("machine", "seen")))

from tests.side_by_side.machine import SideBySide  # noqa: E402

__all__ = ["SideBySide"]
