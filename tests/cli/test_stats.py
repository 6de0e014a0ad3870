"""`replaybuf stats`."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime

import pytest

from replaybuf import ReplayBufferConfig
from tests.cli.conftest import run, run_json


def test_counts_by_task_and_status(filled: str) -> None:
    rows = {(row["task_name"], row["status"]): row for row in run_json("stats", filled)["groups"]}
    assert {lane: (row["groups"], row["rollouts"]) for lane, row in rows.items()} == {
        ("code", "completed"): (3, 12),
        ("code", "expired"): (1, 4),
        ("math", "completed"): (8, 32),
        ("math", "expired"): (1, 4),
    }


def test_counts_what_was_dropped(filled: str) -> None:
    assert sum(row["dropped"] for row in run_json("stats", filled)["groups"]) == 1


def test_a_task_of_which_all_was_dropped_is_there(empty: str) -> None:
    async def drop() -> None:
        async with ReplayBufferConfig(url=empty).build() as buffer:
            await buffer.storage.drop("math", 3)

    asyncio.run(drop())
    [row] = run_json("stats", empty)["groups"]
    assert (row["task_name"], row["status"], row["groups"], row["dropped"]) == ("math", "expired", 0, 3)
    assert "math" in run("stats", empty).stdout


def test_both_databases_say_the_same(filled: str) -> None:
    [row] = [
        row for row in run_json("stats", filled)["groups"] if (row["task_name"], row["status"]) == ("math", "completed")
    ]
    assert row["reward"] == pytest.approx(0.5625)
    assert row["staleness"] == 2.0
    assert (row["max_staleness"], row["prompt_tokens"], row["response_tokens"]) == (3, 1280, 31555)
    assert isinstance(row["staleness"], float)


def test_ages_are_times_in_utc(filled: str) -> None:
    for row in run_json("stats", filled)["groups"]:
        oldest, newest = (datetime.fromisoformat(row[name]) for name in ("oldest", "newest"))
        assert oldest <= newest <= datetime.now(UTC)
        assert (datetime.now(UTC) - oldest).total_seconds() < 600


def test_json_tells_of_the_whole_database(filled: str) -> None:
    database = run_json("stats", filled)["database"]
    assert database["schema"] == "0002"
    assert database["unswept_payloads"] <= 3
    assert database["database_bytes"] > 100_000


def test_lines_and_csv_hold_the_rows(filled: str) -> None:
    rows = run_json("stats", filled)["groups"]
    assert [json.loads(line) for line in run("stats", filled, "--nl").stdout.splitlines()] == rows
    read = list(csv.DictReader(io.StringIO(run("stats", filled, "--csv").stdout)))
    assert [list(row) for row in read] == [list(row) for row in rows]
    assert [row["groups"] for row in read] == [str(row["groups"]) for row in rows]


def test_the_table_has_a_total(filled: str) -> None:
    [total] = [line.split() for line in run("stats", filled).stdout.splitlines() if line.startswith("total")]
    assert total[1:4] == ["13", "1", "52"]


def test_an_empty_buffer_is_no_error(empty: str) -> None:
    run("db", "upgrade", empty)
    assert run("stats", empty).stdout.startswith("The buffer is empty.\n")
