"""No hot statement reads a whole table or sorts, on either database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.million import fill_many
from benchmarks.plans import explain_all
from replaybuf.storage.sql.engine.hooks import Hook

GROUPS = 20_000


class Catching(Hook):
    """Catches statements with their parameters."""

    def __init__(self) -> None:
        self.caught: list[tuple[str, Any]] = []

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        self.caught.append((sql, values))


async def _check(url: str) -> None:
    await fill_many(url, GROUPS)
    found = await explain_all(url)
    purposes = {explained.purpose for explained in found}
    assert purposes >= {
        "refresh",
        "take fifo",
        "take staleness",
        "take prioritized",
        "take mixed prioritized",
        "evict prioritized",
        "lease",
        "annotate",
        "sweep",
    }
    bad = [f"{one.purpose}: {one.problems}\n{one.statement}\n{one.plan}" for one in found if one.problems]
    assert not bad, "\n\n".join(bad)
    [overdue] = [one for one in found if one.purpose == "look after groups" and "leased_until <=" in one.statement]
    assert "rb_group_leased" in "".join(overdue.plan), overdue.plan  # not a lane after the other


async def test_plans__sqlite(tmp_path: Path) -> None:
    """SQLite answers all of them from indexes."""
    await _check(f"sqlite:///{tmp_path}/run.db")


@pytest.mark.filterwarnings("default")
async def test_plans__postgresql(postgres_database: str) -> None:
    """PostgreSQL does, with custom and with generic plans."""
    await _check(postgres_database)
