"""What people ask first of a large run is answered from an index, through the views too, on both databases."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, insert, text

from replaybuf.storage.sql.schema.tables import batch, group, lane, payload
from tests.storage.test_schema import create, run

GROUPS, BATCHES, TAKEN = 1_000, 250, 4

#: Queries of some rows. None may read a table whole that grows with the run.
QUERIES = (
    "SELECT * FROM groups WHERE uid = 17",
    "SELECT * FROM groups ORDER BY uid DESC LIMIT 20",
    "SELECT * FROM rollouts WHERE uid = 17",
    "SELECT uid, position, full_response FROM rollouts ORDER BY uid DESC LIMIT 20",
    "SELECT * FROM batches WHERE step = 413",
    "SELECT * FROM batches WHERE id = 17",
    "SELECT * FROM batches ORDER BY id DESC LIMIT 20",
    "SELECT * FROM batches ORDER BY step DESC LIMIT 20",
    "SELECT * FROM batch_groups WHERE step = 413",
    "SELECT * FROM batch_groups WHERE batch = 17",
    "SELECT * FROM batch_groups WHERE uid = 17",
    "SELECT g.worker, g.reward FROM batch_groups b JOIN groups g ON g.uid = b.uid WHERE b.step = 413",
    "SELECT r.response FROM batch_groups b JOIN rollouts r ON r.uid = b.uid WHERE b.step = 413 AND r.reward = 0",
    "SELECT * FROM leases",
    "SELECT * FROM leases WHERE worker = 'gpu-1'",
)
_WHOLE = re.compile(r"Seq Scan on (rb_group|rb_payload|rb_batch|rb_past)\b|^SCAN [gpb]$")
_SORTED = "USE TEMP B-TREE FOR ORDER BY"


def fill(connection: Connection) -> None:
    lanes = [{"id": n, "buffer": "default", "task_name": "math", "leased": n == 1} for n in (1, 2)]
    connection.execute(insert(lane), [one | {"status": "completed"} for one in lanes])
    marks = json.dumps({"oldest": [1], "newest": [1], "reward": [0.0]})
    numbers = f"WITH RECURSIVE n(uid) AS (SELECT 1 UNION ALL SELECT uid + 1 FROM n WHERE uid < {GROUPS})"
    cast = "CAST(:json AS jsonb)" if connection.dialect.name == "postgresql" else ":json"
    for table, columns, values in (
        (group, "lane, priority, times_sampled, created_at, bytes, marks", f"2, 1, 0, 1, 1, {cast}"),
        (payload, "outline, data", f"{cast}, :data"),
    ):
        parameters = {"json": marks} if table is group else {"json": '[{"response": "4"}]', "data": b"."}
        connection.execute(
            text(f"INSERT INTO {table.name} (uid, {columns}) {numbers} SELECT uid, {values} FROM n"), parameters
        )
    leased = "lane = 1, lease = 7, leased_until = 2e9, holder = 'gpu-1'"
    connection.execute(text(f"UPDATE rb_group SET {leased} WHERE uid BETWEEN 100 AND 110"))
    nothing = {"buffer": "default", "taken_at": 1.0, "epoch": 0, "status": "completed", "groups": TAKEN, "settled": 0}
    connection.execute(insert(batch), [nothing | _batch(n) for n in range(BATCHES)])
    names = ", ".join(column.name for column in group.columns)
    drawn = f"SELECT {names}, (uid - 1) / {TAKEN} + 1, 1 FROM rb_group"
    connection.execute(text(f"INSERT INTO rb_past ({names}, draw, staleness) {drawn}"))


def _batch(step: int) -> dict[str, object]:
    first = step * TAKEN + 1
    return {"id": step + 1, "step": step, "first_uid": first, "last_uid": first + TAKEN - 1}


def whole_tables(connection: Connection) -> dict[str, Sequence[str]]:
    """The parts of plans that read a whole table, by query."""
    explain = _postgres_problems if connection.dialect.name == "postgresql" else _sqlite_problems
    found = {query: explain(connection, query) for query in QUERIES}
    return {query: problems for query, problems in found.items() if problems}


def _postgres_problems(connection: Connection, query: str) -> list[str]:
    """PostgreSQL reads small tables whole: here it does where no index can serve."""
    for method in ("seqscan", "hashjoin", "mergejoin"):
        connection.execute(text(f"SET LOCAL enable_{method} = off"))
    return [line for (line,) in connection.execute(text(f"EXPLAIN {query}")) if _WHOLE.search(line)]


def _sqlite_problems(connection: Connection, query: str) -> list[str]:
    """SQLite says SCAN of a table that it reads in its order, too: in a query with a limit, if it needn't sort."""
    plan = [(parent, line) for _, parent, _, line in connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
    if "LIMIT" in query:
        return [line for parent, line in plan if parent == 0 and line == _SORTED]
    return [line for _, line in plan if _WHOLE.search(line)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_nothing_that_grows_is_read_whole(kind: str, request: pytest.FixtureRequest, tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/run.db" if kind == "sqlite" else request.getfixturevalue("postgres_database")
    await run(url, create)
    await run(url, fill)
    assert await run(url, whole_tables) == {}
