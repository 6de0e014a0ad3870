"""No hot statement reads a whole table or sorts, on either database."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from benchmarks.databases import TASK, execute, open_buffer
from benchmarks.groups import TRAIN_STEP
from benchmarks.million import fill_many, refresh
from benchmarks.plans import explain_all
from replaybuf.storage.sql.engine.hooks import Hook, installed

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
        "evict prioritized",
        "lease",
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


@pytest.mark.filterwarnings("default")
async def test_plans__none_is_pinned_in_this_lane_but_many_are_in_others(postgres_database: str) -> None:
    """PostgreSQL doesn't look through the table for one, which it takes for common; however cheap that seems to it."""
    await fill_many(postgres_database, GROUPS)
    async with open_buffer(postgres_database, "staleness") as buffer:
        for step in range(TRAIN_STEP + 1, TRAIN_STEP + 11):
            await refresh(buffer, step)  # the expired are pinned
        await execute(postgres_database, "ANALYZE rb_group")
        with installed(catching := Catching()):
            for _ in range(2):  # the first one looks up the lane
                await buffer.get(64, TASK)
    statement, parameters = next(one for one in catching.caught if "AS other" in one[0])
    connection = await asyncpg.connect(postgres_database)
    try:
        await connection.execute("SET seq_page_cost = 0; SET cpu_tuple_cost = 0.0001")
        plan = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {statement}", *parameters)
    finally:
        await connection.close()
    nodes = re.findall(r'"Node Type": "([^"]*)"[^{}]*"Alias": "other"', plan)
    assert nodes in (["Index Scan"], ["Index Only Scan"]), plan
